# SPDX-License-Identifier: Apache-2.0
"""Latents: their norm, RoPE and records in the caches, and the mean over pairs of tokens."""

from ..registry import op, triton
from . import reference

write_record = op("latent_write_record", reference.write_record, triton(__name__ + ".triton_record", "write_record"))
pair_latents = op("latent_pair_latents", reference.pair_latents, triton(__name__ + ".triton_pairs", "pair_latents"))

__all__ = ["pair_latents", "write_record"]
