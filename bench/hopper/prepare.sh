#!/usr/bin/env bash
# Unpack whatever parts and wheels of .device came along with this call; with the last one install the plugin and say what is there.
#     prepare.sh [last]
set -euo pipefail
ROOT=${ROOT:-/opt} PYTHON=${PYTHON:-python3}
mkdir -p "$ROOT/v41" "$ROOT/hum" "$ROOT/results"
for part in .device/part-*.tar.xz; do
    [ -e "$part" ] || continue
    tar xJf "$part" -C "$ROOT/v41"
    echo "unpacked $part"
done
for wheel in .device/*.whl; do
    [ -e "$wheel" ] || continue
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$ROOT/hum" "$wheel"
    echo "installed $wheel"
done
if [ "${1:-}" = last ]; then
    "$PYTHON" -m pip install -q --no-deps --no-build-isolation --no-compile --upgrade --target "$ROOT/plug" .
    PYTHONPATH=$ROOT/v41:$ROOT/hum:$ROOT/plug "$PYTHON" - <<'P'
from importlib.metadata import PackageNotFoundError, version
for name in ("vllm", "humming-kernels", "deepseek-v41-plugin", "torch", "triton"):
    try:
        print(name, version(name))
    except PackageNotFoundError:
        print(name, "ABSENT")
P
fi
