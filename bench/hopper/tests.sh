#!/usr/bin/env bash
# Tests on the GPU, one file after another; the summary comes last.  tests.sh [NAME...]   (NAME: linear_cuda, symm_mem, ...)
# Each file has EACH seconds at most, and one that fails does not stop the next; EXTRA: further options of pytest.
. "$(dirname "$0")/env.sh"
each=${EACH:-150} log=$ROOT/results/tests.log code=0 summary=
[ $# -gt 0 ] || set -- {linear,experts,attention,indexer,mhc,latent,route}_cuda symm_mem warm_up_cuda
for name; do
    most=$(($(left) - 15)) begin=$SECONDS
    if [ "$most" -lt 20 ]; then
        said="no time left" one=1
    else
        [ "$most" -le "$each" ] || most=$each
        printf '\n== %s\n' "$name" >>"$log"
        timeout -k 5 "$most" "$PYTHON" -m pytest -q -p no:cacheprovider ${EXTRA-} "tests/gpu/test_$name.py" >>"$log" 2>&1
        one=$?
        said=$(tail -n 1 "$log" | cut -c1-120)
        [ $one != 124 ] && [ $one != 137 ] || said="stopped after $most s"
    fi
    [ $one = 0 ] || code=1
    summary+=$(printf '%-14s %-4s %4d s  %s' "$name" "$([ $one = 0 ] && echo ok || echo FAIL)" $((SECONDS - begin)) "$said")$'\n'
done
grep -aE '^(FAILED|ERROR|E  )' "$log" 2>/dev/null | tail -n 60 | cut -c1-200
printf '\n== summary\n%s' "$summary" | tee -a "$log"
exit $code
