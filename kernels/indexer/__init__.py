# SPDX-License-Identifier: Apache-2.0
"""Which compressed rows a query attends to: scores, top-k, candidate blocks."""

from ..registry import op
from .reference import best_blocks, best_rows
from .reference import scores as _scores

scores = op("index_scores", _scores)

__all__ = ["best_blocks", "best_rows", "scores"]
