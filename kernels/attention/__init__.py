# SPDX-License-Identifier: Apache-2.0
"""Sparse attention of one latent (K = V) over window and compressed rows, with a sink."""

from ..registry import op
from .reference import sparse_attention as _reference

sparse_attention = op("sparse_attention", _reference)
