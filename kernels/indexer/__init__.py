# SPDX-License-Identifier: Apache-2.0
"""Which compressed rows a query attends to: scores, top-k, candidate blocks."""

from ..registry import op, triton
from .reference import best_blocks, best_rows, scores
from .reference import select as _select

select = op("index_select", _select, triton(__name__ + ".triton_select", "select"), graphs=False)

__all__ = ["best_blocks", "best_rows", "scores", "select"]
