# SPDX-License-Identifier: Apache-2.0
"""Multi-copy residual stream (mHC): mixes, collapse into a sublayer, expansion out of it; and these as a model takes
them, from one sublayer into the next."""

from ..registry import op, triton
from . import reference
from .reference import collapse as _collapse
from .reference import expand, mixes
from .weights import Entered, MixerWeights, prepare

collapse = op("mhc_collapse", _collapse)
enter = op("mhc_enter", reference.enter, triton(__name__ + ".triton_turn", "enter"))
turn = op("mhc_turn", reference.turn, triton(__name__ + ".triton_turn", "turn"))
leave = op("mhc_leave", expand, triton(__name__ + ".triton_ends", "leave"))
last = op("mhc_last", reference.last, triton(__name__ + ".triton_ends", "last"))

__all__ = ["Entered", "MixerWeights", "collapse", "enter", "expand", "last", "leave", "mixes", "prepare", "turn"]
