"""Triton on a CPU without a compiler: a backend entry for its interpreter, and two repairs.

Importing this module imports Triton, so TRITON_INTERPRET=1 must be in the environment by then.
"""

import functools
import importlib
import sys
import time

import triton.language as tl
from triton.backends import Backend, backends
from triton.backends.compiler import BaseBackend, GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

PATCHES = (
    "triton.language.standard",
    "triton.language.random",
    "triton.backends.backends[cpu]",
    "triton.runtime.interpreter.InterpreterBuilder.create_icmp*",
    "triton.runtime.interpreter.InterpreterBuilder.create_fcmp*",
)


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


def interpret_library() -> list[str]:
    """Declare Triton's own library functions (`tl.sum`, `tl.cdiv`, ...) again, interpreted.

    `triton.jit` reads TRITON_INTERPRET where a function is declared. `import vllm` brings Triton in
    through torch._inductor before it resolves its platform, so in the first process the library is
    declared for the compiler and the interpreter could not call it. Does nothing otherwise.

    Returns the modules outside Triton and torch whose kernels were declared too early as well;
    those kernels cannot run in this process.
    """
    library = ("triton.language.standard", "triton.language.random")
    stale = [name for name in library if _compiled(sys.modules[name])]
    for name in stale:
        module = importlib.reload(sys.modules[name])
        for exported in _compiled(tl):
            if exported in vars(module):
                setattr(tl, exported, vars(module)[exported])
    if not stale:
        return []
    return sorted(
        name
        for name, module in list(sys.modules.items())
        if name.split(".")[0] not in ("triton", "torch") and _compiled(module)
    )


def _compiled(module) -> list[str]:
    """Names in `module` that hold a function declared for Triton's compiler."""
    names = getattr(module, "__dict__", {})
    return [name for name, value in list(names.items()) if type(value) is JITFunction]


def _typed(compare):
    @functools.wraps(compare)
    def int1(self, lhs, rhs):
        return interpreter.TensorHandle(compare(self, lhs, rhs).data.astype(bool), tl.int1)

    int1.dsv41_typed = True
    return int1


def fix_comparisons() -> None:
    """Give comparisons in the interpreter the type they have on a GPU, int1.

    They come typed as their operands. Broadcasting a scalar condition converts its data to that
    type, and a mask that holds it is then an int array, which masked loads and stores refuse.
    """
    builder = interpreter.InterpreterBuilder
    for name in dir(builder):
        compare = getattr(builder, name)
        if name.startswith(("create_icmp", "create_fcmp")) and not hasattr(compare, "dsv41_typed"):
            setattr(builder, name, _typed(compare))
