# SPDX-License-Identifier: Apache-2.0
"""Repairs to Triton's interpreter where it differs from the compiler.

Importing this module imports Triton, so TRITON_INTERPRET=1 must be in the environment by then.
Each function may be called again without effect.
"""

import dataclasses
import functools
import importlib
import sys

import numpy as np
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

PATCHES = (
    "triton.language.standard",
    "triton.language.random",
    "triton.runtime.interpreter.InterpreterBuilder.create_icmp*",
    "triton.runtime.interpreter.InterpreterBuilder.create_fcmp*",
    "triton.runtime.interpreter._patch_lang_core",
    "triton.runtime.interpreter.interpreter_builder.options",
    "triton.language.extra.libdevice.log1p",
)


def apply() -> list[str]:
    """Apply all repairs; returns what `interpret_library` returns."""
    fix_comparisons()
    fix_range()
    fix_log1p()
    skip_overflow_checks()
    return interpret_library()


def skip_overflow_checks() -> None:
    """Leave out the check after every integer operation, as the GPU compilers do outside debugging.

    It takes a quarter of an interpreted step.
    """
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


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


def _typed_range(first, second=None, step=1, **_):
    """`tl.range` whose index is a scalar tensor, int64 if a bound is, else int32."""
    start, stop = (0, first) if second is None else (first, second)
    wide = any(isinstance(b, tl.tensor) and b.dtype.primitive_bitwidth == 64 for b in (start, stop))
    dtype, np_dtype = (tl.int64, np.int64) if wide else (tl.int32, np.int32)
    for index in range(start, stop, step):
        yield tl.tensor(interpreter.TensorHandle(np.array([index], dtype=np_dtype), dtype), dtype)


def fix_range() -> None:
    """Give the index of `tl.range` the type it has on a GPU; the interpreter yields Python ints.

    Kernels that convert the index (`row.to(tl.int64)`), as vLLM's top-k and top-p, fail on ints.
    """
    original = interpreter._patch_lang_core
    if hasattr(original, "dsv41_typed"):
        return

    @functools.wraps(original)
    def patch_lang_core(lang, scope):
        original(lang, scope)
        scope.set_attr(lang, "range", _typed_range)

    patch_lang_core.dsv41_typed = True
    interpreter._patch_lang_core = patch_lang_core


def _log1p(value: tl.tensor) -> tl.tensor:
    handle = value.handle
    with np.errstate(divide="ignore", invalid="ignore"):
        return tl.tensor(interpreter.TensorHandle(np.log1p(handle.data), handle.dtype), value.type)


def fix_log1p() -> None:
    """Give libdevice.log1p a body; compilers replace the empty one, the interpreter calls it.

    vLLM's rejection sampler needs it where drafts are sampled (draft_sample_method "probabilistic").
    """
    libdevice.log1p = _log1p
