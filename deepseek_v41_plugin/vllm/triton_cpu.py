# SPDX-License-Identifier: Apache-2.0
"""The entry "cpu" in Triton's table of backends that vLLM looks for: Triton's interpreter.

Importing this module imports Triton, so TRITON_INTERPRET=1 must be in the environment by then.
"""

import time

from triton.backends import Backend, backends
from triton.backends.compiler import BaseBackend, GPUTarget
from triton.backends.driver import DriverBase

PATCHES = ("triton.backends.backends[cpu]",)


class InterpreterBackend(BaseBackend):
    """Compiles nothing. Inductor keys its caches with the hash of the current target's backend."""

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return target.backend == "cpu"

    def hash(self) -> str:
        return "interpreter"

    def _refuse(self, *_, **__):
        raise NotImplementedError(
            "this Triton kernel was declared without TRITON_INTERPRET=1, and there is no compiler "
            "for the CPU: import vllm before the kernel's module"
        )

    parse_options = add_stages = load_dialects = get_module_map = _refuse


class InterpreterDriver(DriverBase):
    """The device of the interpreter: the CPU, always there."""

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError(f"{ty}: the interpreter has no C++ types")

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", 0, 1)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self):
        import torch

        return torch.device("cpu")

    def get_benchmarker(self):
        def once(call, *, quantiles: list[float], **_) -> list[float]:
            start = time.perf_counter()
            call()
            return [1e3 * (time.perf_counter() - start)] * len(quantiles)

        return once


def register_backend() -> None:
    """Put the entry "cpu" into Triton's table of backends unless one is there."""
    backends.setdefault("cpu", Backend(compiler=InterpreterBackend, driver=InterpreterDriver))
