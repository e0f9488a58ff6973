# SPDX-License-Identifier: Apache-2.0
"""Which implementation of an op runs: the first supported one, or the one DSV41_OP_<NAME> forces."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

Supported = Callable[[torch.device], tuple[bool, str]]


class OpError(RuntimeError):
    """An implementation was forced that does not exist or does not run here."""


@dataclass(frozen=True)
class Impl:
    """One implementation of an op. `supported(device) -> (bool, reason when False)`."""

    name: str
    fn: Callable
    supported: Supported


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


def op(name: str, reference: Callable, *faster: Impl) -> Op:
    """Register op `name`: its faster implementations first, then the plain torch one."""
    OPS[name] = Op(name, (*faster, Impl("torch", reference, anywhere)))
    return OPS[name]
