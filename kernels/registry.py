# SPDX-License-Identifier: Apache-2.0
"""Which implementation of an op runs: the first supported one, or the one DSV41_OP_<NAME> forces."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec

import torch

Supported = Callable[[torch.device], tuple[bool, str]]


class OpError(RuntimeError):
    """An implementation was forced that does not exist or does not run here."""


@dataclass(frozen=True)
class Impl:
    """One implementation of an op. `supported(device) -> (bool, reason when False)`.

    graphs: whether a CUDA graph can hold it: it reads nothing back, and its shapes follow from its arguments' alone.
    """

    name: str
    fn: Callable
    supported: Supported
    graphs: bool = True


@dataclass
class Op:
    """A named op with its implementations, most preferred first.

    Calling it runs the implementation chosen for the device of its first tensor argument.
    """

    name: str
    impls: tuple[Impl, ...]
    _chosen: dict[str, Impl] = field(default_factory=dict, repr=False)

    @property
    def variable(self) -> str:
        return "DSV41_OP_" + self.name.upper()

    def choose(self, device: torch.device) -> Impl:
        forced = os.environ.get(self.variable)
        if forced:
            for impl in self.impls:
                if impl.name == forced:
                    ok, reason = impl.supported(device)
                    if not ok:
                        raise OpError(f"{self.variable}={forced}: {reason}")
                    return impl
            names = ", ".join(impl.name for impl in self.impls)
            raise OpError(f"{self.variable}={forced}: no such implementation; choose from {names}")
        for impl in self.impls:
            if impl.supported(device)[0]:
                return impl
        raise OpError(f"{self.name}: no implementation runs on {device}")

    def explain(self, device: torch.device) -> list[tuple[str, bool, str]]:
        """(implementation, chosen, reason) for each implementation, for `dsv41 doctor`."""
        chosen = self.choose(device)
        rows = []
        for impl in self.impls:
            ok, reason = impl.supported(device)
            if impl is chosen:
                reason = "forced by " + self.variable if os.environ.get(self.variable) else "first supported"
            elif ok:
                reason = "supported, not preferred"
            rows.append((impl.name, impl is chosen, reason))
        return rows

    def __call__(self, *args, **kwargs):
        device = next(a.device for a in args if isinstance(a, torch.Tensor))
        impl = self._chosen.get(device.type)
        if impl is None:
            impl = self._chosen[device.type] = self.choose(device)
        return impl.fn(*args, **kwargs)


OPS: dict[str, Op] = {}


def anywhere(device: torch.device) -> tuple[bool, str]:
    """The plain forms are torch only and run on any device."""
    return True, ""


def with_triton(device: torch.device) -> tuple[bool, str]:
    """Kernels in Triton run on GPUs."""
    if device.type != "cuda":
        return False, "Triton needs a GPU; its interpreter on the CPU is for tests"
    return (True, "") if find_spec("triton") else (False, "Triton is not installed: pip install triton")


def triton(module: str, name: str, supported: Supported = with_triton) -> Impl:
    """`name` of `module`, which imports Triton and is imported when first asked for: where nothing needs it, it need not be there."""

    def run(*args, **kwargs):
        return getattr(import_module(module), name)(*args, **kwargs)

    return Impl("triton", run, supported)


def op(name: str, reference: Callable, *faster: Impl, graphs: bool = True) -> Op:
    """Register op `name`: its faster implementations first, then the plain torch one (graphs: whether that may be captured)."""
    OPS[name] = Op(name, (*faster, Impl("torch", reference, anywhere, graphs)))
    return OPS[name]
