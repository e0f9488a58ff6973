# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint must hold, where its bytes lie, and whether the two agree."""

from .check import validate
from .expected import TensorSpec, expected_tensors
from .index import CheckpointError, TensorEntry, read_index

__all__ = [
    "CheckpointError",
    "TensorEntry",
    "TensorSpec",
    "expected_tensors",
    "read_index",
    "validate",
]
