#!/usr/bin/env bash
# Steps of one model.  steps.sh host|plugin [DRAFTS] [REGEX]   (EXTRA: further options)
. "$(dirname "$0")/env.sh"
attempt "steps-$1-${2:-0}" "$PYTHON" bench/steps.py --impl "$1" --drafts "${2:-0}" --only "${3:-}" --csv "$ROOT/results/steps.csv" ${EXTRA---profile}
code=$?
grep -aE '^(start|pool|kv|prefill|decode)|^    |NOT vLLM' "$ROOT/results/steps-$1-${2:-0}.log" | tail -n 150 | cut -c1-200
"$PYTHON" bench/pareto.py "$ROOT/results/steps.csv" 2>/dev/null | tail -n 40
exit $code
