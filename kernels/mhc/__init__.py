# SPDX-License-Identifier: Apache-2.0
"""Multi-copy residual stream (mHC): mixes, collapse into a sublayer, expansion out of it."""

from ..registry import op
from .reference import collapse as _collapse
from .reference import expand as _expand
from .reference import mixes as _mixes

mixes = op("mhc_mixes", _mixes)
collapse = op("mhc_collapse", _collapse)
expand = op("mhc_expand", _expand)
