# SPDX-License-Identifier: Apache-2.0
"""Routing and the MXFP4 experts."""

from ..registry import op
from .reference import experts as _experts
from .reference import route as _route
from .reference import swiglu

route = op("moe_route", _route)
experts = op("moe_experts", _experts)

__all__ = ["experts", "route", "swiglu"]
