# Sourced by the scripts beside it, in the repository's root on the lent machine: paths, results, a limit.
# ROOT is where packages and results live while the machine stays warm; OUT is emptied before each call and comes back.
set -uo pipefail
ROOT=${ROOT:-/opt} PYTHON=${PYTHON:-python3} OUT=${OUT:-/tmp/out} LIMIT=${LIMIT:-510}
mkdir -p "$ROOT/results" "$ROOT/triton" "$OUT"
export PYTHONPATH=$ROOT/v41:$ROOT/hum:$ROOT/plug${PYTHONPATH:+:$PYTHONPATH}
export VLLM_USE_FLASHINFER_SAMPLER=0 HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 VLLM_LOGGING_LEVEL=${VLLM_LOGGING_LEVEL:-WARNING}
# Kernels compiled by one call are found by the next ones; processes of a call share them too.
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$ROOT/triton}
# NVLink multicast can put GPUs that others share out of service, and the host's all-reduce over symmetric memory uses it.
export VLLM_ALLREDUCE_USE_SYMM_MEM=0
export DSV41_COMMIT=${DSV41_COMMIT:-$(cat .device/commit 2>/dev/null || echo unknown)}

left() { echo $((LIMIT - SECONDS)); }

keep() { cp "$ROOT"/results/* "$OUT"/ 2>/dev/null; }

# What was measured comes back even if the call is killed at its limit.
(while sleep 3; do keep; done) & keeper=$!
trap 'kill $keeper 2>/dev/null; keep' EXIT

# attempt LOG COMMAND...: a device lost to one cell costs that process only; the next one goes on behind that cell.
attempt() {
    local log=$ROOT/results/$1.log code=1 try
    shift
    for try in 1 2 3; do
        [ "$(left)" -gt 40 ] || { echo "no time left for try $try"; return 1; }
        timeout -k 5 $(($(left) - 15)) "$@" --seconds $(($(left) - 60)) >>"$log" 2>&1
        code=$?
        [ $code = 3 ] || break
        echo "the device was lost; again"
    done
    return $code
}
