# SPDX-License-Identifier: Apache-2.0
"""The gate that adds n-gram memory to the residual stream."""

from ..registry import op
from .reference import gate_and_add as _reference

engram_gate = op("engram_gate", _reference)
