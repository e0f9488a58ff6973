# SPDX-License-Identifier: Apache-2.0
"""Sparse attention of one latent (K = V) over window and compressed rows, with a sink."""

from ..registry import op, triton
from .reference import attend as _attend
from .reference import sparse_attention

attend = op("attend", _attend, triton(__name__ + ".triton_attend", "attend"))

__all__ = ["attend", "sparse_attention"]
