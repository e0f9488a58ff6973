# SPDX-License-Identifier: Apache-2.0
"""Loaded weights into the forms that FP8 tensor cores take."""

from __future__ import annotations

import torch
from torch import nn

from ..kernels.linear import row_linear_op
from .settings import Settings
from .uniform import even_out


def why_plain(settings: Settings, device: torch.device) -> str | None:
    """Why the weights stay as they are in the checkpoint: one sentence, or None where they are prepared."""
    if settings.dtype != torch.bfloat16:
        return f"activations are {str(settings.dtype).removeprefix('torch.')}, and FP8 tensor cores give bfloat16"
    if not settings.activation_quant:
        return "activation_quant is off, and FP8 tensor cores take FP8 activations"
    if settings.batch_invariant:
        return "the batch-invariant mode runs the plain products"
    chosen = row_linear_op.choose(device)
    return f"row_linear runs as {chosen.name} on {device}" if chosen.name == "torch" else None


def prepare(model: nn.Module, force: bool = False) -> bool:
    """Call `prepare` of every module that has one, parts before wholes; whether that was done.

    After loading, and after loading again.  `force`: also where the plain ops run, for comparisons.
    """
    if model.settings.uniform_routing:
        even_out(model)
    if why_plain(model.settings, next(model.parameters()).device) and not force:
        return False
    for module in reversed(list(model.modules())):
        if hasattr(module, "prepare"):
            module.prepare()
    return True
