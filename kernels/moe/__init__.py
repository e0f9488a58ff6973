# SPDX-License-Identifier: Apache-2.0
"""Routing and the MXFP4 experts."""

import torch

from ..registry import op, triton, with_triton
from .narrow import spread_ok
from .reference import experts as _experts
from .reference import route as _route
from .reference import swiglu
from .replicas import Replicas


def _on_hopper(device: torch.device) -> tuple[bool, str]:
    ok, reason = with_triton(device)
    if ok and torch.cuda.get_device_capability(device)[0] != 9:
        return False, "written for SM90's FP8 tensor cores and tensor maps"
    return ok, reason


route = op("moe_route", _route, triton(__name__ + ".triton_route", "route"))
experts = op("moe_experts", _experts, triton(__name__ + ".triton_experts", "experts", _on_hopper), graphs=False)

__all__ = ["Replicas", "experts", "route", "spread_ok", "swiglu"]
