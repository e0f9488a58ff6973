# SPDX-License-Identifier: Apache-2.0
"""How many drafts to verify: pure policy, no host and no stream.

    profile   cost curves and calibration on disk        budget     the step's total, on the CPU
    curve     a piecewise-linear, padded cost            known      last-known confidences at a fixed age
    costs     what a step costs                          agreement  one decision for all ranks
    calibration  temperatures of the confidences         tally      counts for metrics

The per-request lengths are chosen on the device: kernels/verification.
"""

from .agreement import GroupPlan, agree, offer
from .budget import Plan, plan
from .calibration import Calibration, calibrated
from .costs import StepCosts, slowest_costs
from .curve import Curve, CurveError
from .known import LastKnown
from .profile import Profile, ProfileError
from .tally import Tally

__all__ = [
    "Calibration", "Curve", "CurveError", "GroupPlan", "LastKnown", "Plan", "Profile", "ProfileError", "StepCosts",
    "Tally", "agree", "calibrated", "offer", "plan", "slowest_costs",
]
