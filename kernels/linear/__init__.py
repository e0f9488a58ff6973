# SPDX-License-Identifier: Apache-2.0
"""Dense Linears over E4M3 weights with 32 x 32 E8M0 scales."""

from ..registry import op
from .reference import fp8_linear as _reference

fp8_linear = op("fp8_linear", _reference)
