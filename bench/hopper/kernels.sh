#!/usr/bin/env bash
# Kernels: ours and the host's, of the ops that a step spends its time in.  kernels.sh [REGEX]   (EXTRA: further options)
# The plain torch forms are not timed: the experts' alone are loops over 384 at 13 sizes.
. "$(dirname "$0")/env.sh"
default='ceiling|(moe_experts|row_linear|attend|index_select|mhc_turn|group_linear|wide_linear|latent\w*|norm_rows|moe_route)/.*(triton|host)'
wanted=${1:-$default}
attempt kernels "$PYTHON" bench/kernels.py --csv "$ROOT/results/kernels.csv" --only "$wanted" ${EXTRA---host}
code=$?
grep -aE '^[a-z_]+/' "$ROOT/results/kernels.log" | tail -n 120 | cut -c1-170
exit $code
