#!/usr/bin/env bash
# A server of one model under load.  serving.sh host|plugin [DRAFTS]   (EXTRA: further options)
. "$(dirname "$0")/env.sh"
attempt "serving-$1-${2:-0}" "$PYTHON" bench/serving.py --impl "$1" --drafts "${2:-0}" --csv "$ROOT/results/serving.csv" \
    --log "$ROOT/results/server-$1.txt" ${EXTRA-}
code=$?
tail -n 12 "$ROOT/results/serving-$1-${2:-0}.log" | cut -c1-200
exit $code
