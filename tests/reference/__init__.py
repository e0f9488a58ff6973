# SPDX-License-Identifier: Apache-2.0
"""An uncached float64 forward of DeepSeek-V4.1-Flash, independent of the package."""

from .draft import Proposal, ReferenceDraft
from .model import ReferenceModel
from .runs import GlobalRows, Replay, Run

__all__ = ["GlobalRows", "Proposal", "ReferenceDraft", "ReferenceModel", "Replay", "Run"]
