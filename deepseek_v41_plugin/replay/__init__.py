# SPDX-License-Identifier: Apache-2.0
"""SWA bounded replay: which rows run and which window keys they see.  Pure, no host, no device.

    plan      policy and plan of a step, vectorised over its requests
    metadata  the plan spelled out: rows, key ranges and slots of each kind of layer
    compare   mask against compact and both against the rules, batch by batch
    batches   random batches to compare on

(v41-facts 10)
"""

from .batches import Batch, random_batches
from .compare import first_difference
from .metadata import KINDS, LayerRows, describe
from .plan import MODES, Plan, Policy, ReplayError, plan

__all__ = [
    "KINDS", "MODES", "Batch", "LayerRows", "Plan", "Policy", "ReplayError", "describe", "first_difference", "plan",
    "random_batches",
]
