# SPDX-License-Identifier: Apache-2.0
"""Ceilings far above any real model, so that a damaged config fails at once."""

from typing import Any

from .config_fields import Section

LAYERS = 1024
EXPERTS = 1 << 16
TOKENS = 1 << 32
# Experts over all layers and draft stages; each has six tensors.
_ALL_EXPERTS = 1 << 18
# Engram tables over all layers; each has a prime to be searched for.
_ALL_TABLES = 1 << 12

# Sizes without an entry go up to ``config_fields.LARGEST``.
CEILINGS = {
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 1 << 16,
    "o_groups": 1 << 16,
    "max_position_embeddings": TOKENS,
    "sliding_window": TOKENS,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": EXPERTS,
    "hc_mult": 64,
    "hc_sinkhorn_iters": 1000,
    "index_n_heads": 1 << 16,
    "dspark_n_routed_experts": EXPERTS,
    "dspark_num_experts_per_tok": EXPERTS,
    "dspark_block_size": 1 << 16,
}
VISION_CEILINGS = {
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 1 << 16,
    "patch_size": 1 << 12,
    "downsample_ratio": 1 << 12,
    "min_pixels": 1 << 32,
}


def check_experts(text: Section, got: dict[str, Any]) -> None:
    """Bound the experts of all layers together; raises ConfigError."""
    stages, drafts = got["num_nextn_predict_layers"], got["dspark_n_routed_experts"]
    for field, layers, each in (
        ("n_routed_experts", got["num_hidden_layers"], got["n_routed_experts"]),
        ("dspark_n_routed_experts", stages, drafts),
    ):
        if layers * each > _ALL_EXPERTS:
            raise text.fail(
                field,
                f"{each} experts in each of {layers} layers are too many",
                f"at most {_ALL_EXPERTS} in all are supported",
            )


def check_tables(text: Section, layers: int, max_ngram: int, heads: int) -> None:
    """Bound the Engram tables of all layers together; raises ConfigError."""
    tables = layers * max(0, max_ngram - 1) * heads
    if tables > _ALL_TABLES:
        raise text.fail(
            "engram_n_heads",
            f"{heads} heads for {max_ngram - 1} n-gram orders in {layers} layers are too many",
            f"at most {_ALL_TABLES} tables in all are supported",
        )
