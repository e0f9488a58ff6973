# SPDX-License-Identifier: Apache-2.0
"""Temperatures of the draft's confidences, one a draft position, fitted from what was accepted.

sigma(c_i / tau_i) shall be P(draft i accepted | drafts before it accepted)  (v41-facts 8.5).  So
position i is observed only where it was verified and everything before it was accepted.  Which
drafts are verified depends on the confidences alone, never on the outcome, so a fit on scheduled
traffic is not biased by the scheduling.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

LOWEST, HIGHEST = 0.05, 20.0  # bounds of a temperature
ENOUGH = 200  # observations below which a position uses the temperature of all positions together


@dataclass(frozen=True)
class Calibration:
    """temperature [k]; error [k]: standard error of 1 / temperature (0: not fitted); count [k]: observations."""

    temperature: tuple[float, ...]
    error: tuple[float, ...]
    count: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.temperature or len({len(self.temperature), len(self.error), len(self.count)}) != 1:
            raise ValueError("calibration: temperature, error and count must have one entry a draft position")
        for value in self.temperature:
            if not isinstance(value, (int, float)) or not LOWEST <= value <= HIGHEST:
                raise ValueError(f"calibration.temperature: {value!r} is outside {LOWEST} to {HIGHEST}")

    @classmethod
    def none(cls, k: int) -> Calibration:
        """Confidences as the model gives them."""
        return cls((1.0,) * k, (0.0,) * k, (0,) * k)

    @classmethod
    def from_json(cls, raw: dict) -> Calibration:
        try:
            return cls(tuple(raw["temperature"]), tuple(raw["error"]), tuple(raw["count"]))
        except (KeyError, TypeError):
            raise ValueError("calibration: not an object of temperature, error and count lists") from None

    def inverse(self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """1 / temperature [k], to keep on the device for `calibrated`."""
        return 1 / torch.tensor(self.temperature, dtype=torch.float64).to(device=device, dtype=dtype)


def calibrated(logits: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Probabilities sigma(c / tau): logits [..., k], inverse temperature [k], in the logits' dtype."""
    return torch.sigmoid(logits * inverse.to(logits.dtype))


def observed(verified: np.ndarray, accepted: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """(seen, label) bool [n, k] of draft blocks with `verified` drafts of which `accepted` were, int [n]."""
    verified, accepted = np.asarray(verified), np.asarray(accepted)
    if ((accepted < 0) | (accepted > verified) | (verified > k)).any():
        raise ValueError(f"accepted: must lie in 0..verified, and verified in 0..{k}")
    position = np.arange(k)
    seen = (position < verified[:, None]) & (position <= accepted[:, None])
    return seen, position < accepted[:, None]


def fit(logits: np.ndarray, verified: np.ndarray, accepted: np.ndarray, enough: int = ENOUGH) -> Calibration:
    """The maximum-likelihood temperature of each position: logits [n, k], verified and accepted int [n].

    A position with fewer than `enough` observations takes the temperature of all positions together,
    and 1 when these are too few as well.
    """
    logits, enough = np.asarray(logits, dtype=np.float64), max(enough, 1)
    k = logits.shape[1]
    seen, label = observed(verified, accepted, k)
    seen &= np.isfinite(logits)
    pooled, _ = slope(logits[seen], label[seen]) if seen.sum() >= enough else (1.0, 0.0)
    found = []
    for i in range(k):
        rows = seen[:, i]
        found.append(slope(logits[rows, i], label[rows, i]) if rows.sum() >= enough else (pooled, 0.0))
    return Calibration(
        tuple(float(1 / b) for b, _ in found), tuple(float(e) for _, e in found), tuple(int(c) for c in seen.sum(0))
    )


def slope(logits: np.ndarray, label: np.ndarray) -> tuple[float, float]:
    """(b, its standard error): b minimises the cross entropy of sigma(b c) within the bounds.

    The loss is convex in b.  Newton steps kept inside a shrinking bracket: the same on every machine
    up to rounding, and it ends for separable or contradicting labels too (at a bound).
    """
    if not logits.any():
        return 1.0, 0.0
    low, high = 1 / HIGHEST, 1 / LOWEST

    def derivatives(b: float) -> tuple[float, float]:
        p = 0.5 * (1 + np.tanh(0.5 * b * logits))
        return float(((p - label) * logits).sum()), float((p * (1 - p) * logits * logits).sum())

    b = 1.0
    if derivatives(low)[0] >= 0:
        b = low
    elif derivatives(high)[0] <= 0:
        b = high
    else:
        for _ in range(100):
            gradient, curvature = derivatives(b)
            low, high = (low, b) if gradient > 0 else (b, high)
            step = b - gradient / curvature if curvature > 0 else low
            step = step if low < step < high else 0.5 * (low + high)
            if abs(step - b) <= 1e-13 * b:
                break
            b = step
    curvature = derivatives(b)[1]
    return b, curvature**-0.5 if curvature > 0 else 0.0


def cross_entropy(logits: np.ndarray, verified: np.ndarray, accepted: np.ndarray, by: Calibration) -> float:
    """Mean negative log likelihood in nats over all observed positions under `by`."""
    logits = np.asarray(logits, dtype=np.float64) / np.asarray(by.temperature)
    seen, label = observed(verified, accepted, logits.shape[1])
    return float(np.logaddexp(0, np.where(label, -logits, logits))[seen].mean())
