# SPDX-License-Identifier: Apache-2.0
"""Which drafts are verified, and the batch that is left: on the device, without a host sync."""

from ..registry import op
from .reference import Trim, survival
from .reference import lengths as _lengths
from .reference import remap as _remap
from .reference import trim as _trim

lengths = op("verification_lengths", _lengths)
remap = op("verification_remap", _remap)
trim = op("verification_trim", _trim)

__all__ = ["Trim", "lengths", "remap", "survival", "trim"]
