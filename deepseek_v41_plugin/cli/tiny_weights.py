# SPDX-License-Identifier: Apache-2.0
"""Random weights whose every part has a say in the output.

The residual stream stays between 1 and 10, gates and routers are far from saturation, and
logits have a standard deviation of about 4, so that greedy choices are clear-cut.
"""

import hashlib
import re

import numpy as np

from ..checkpoint import TensorSpec
from . import encode

# (name, mean, standard deviation, whether the latter is divided by sqrt(fan-in))
_LAWS = [
    (re.compile(pattern), mean, std, fan)
    for pattern, mean, std, fan in (
        (r"norm\d?\.weight$", 1.0, 0.1, False),
        (r"engram\.[qk]_weight$", 1.0, 0.2, False),
        (r"hc_\w+_base$", 0.0, 1.0, False),
        (r"hc_\w+_scale$", 1.0, 0.2, False),
        (r"attn_sink$", 0.0, 1.0, False),
        (r"gate\.bias(_vl)?$", 0.0, 0.2, False),
        (r"\.bias$", 0.0, 0.02, False),
        (r"^image_", 0.0, 1.0, False),
        (r"(^|\.)embed$", 0.0, 1.0, False),
        (r"^head$", 0.0, 4.0, True),
        (r"wgate$", 0.0, 2.0, True),
        (r"gate$", 0.0, 2.0, True),
        (r"attn\.wq_b$", 0.0, 1.5, True),
        (r"attn\.wo_b$", 0.0, 0.4, True),
        (r"experts\.\d+\.w2$", 0.0, 0.1, True),
        (r"shared_experts\.w2$", 0.0, 0.1, True),
        (r"engram\.wkv$", 0.0, 0.25, True),
        (r"", 0.0, 1.0, True),
    )
]
# Blocks of a tensor differ in size by this many powers of two (standard deviation).
_SPREAD = 0.7
_SPREAD_RMS = float(np.exp((_SPREAD * np.log(2)) ** 2))
# Every second 32-block of an expert's inner width is driven hard enough to meet the clamp.
_HOT, _COOLED = 4.0, 1 / 8


def _rng(seed: int, name: str) -> np.random.Generator:
    digest = hashlib.sha256(name.encode()).digest()
    return np.random.default_rng([seed, int.from_bytes(digest[:8], "little")])


def _normal(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    stem = name.removesuffix(".weight")
    for pattern, mean, std, fan in _LAWS:
        if pattern.search(name if pattern.pattern.startswith("norm") else stem):
            scale = std / np.sqrt(shape[-1]) if fan else std
            x = rng.standard_normal(shape, np.float32)
            x *= np.float32(scale)
            x += np.float32(mean)
            return x
    raise AssertionError(name)


def _spread(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return (2.0 ** rng.normal(0, _SPREAD, shape) / _SPREAD_RMS).astype(np.float32)


def _blocks(factors: np.ndarray, shape: tuple[int, int], rows: int) -> np.ndarray:
    return factors.repeat(rows, 0)[: shape[0]].repeat(encode.BLOCK, 1)[:, : shape[1]]


def _drive(stem: str, w: np.ndarray) -> np.ndarray:
    axis = {"w1": 0, "w3": 0, "w2": 1}.get(stem.rsplit(".", 1)[-1])
    if axis is None or "experts." not in stem:
        return w
    odd = (np.arange(w.shape[axis]) // encode.BLOCK) % 2 == 1
    gain = np.where(odd, _COOLED if axis else _HOT, 1).astype(np.float32)
    return w * (gain if axis else gain[:, None])


class Weights:
    """Tensor bytes by name; a pure function of seed, name, shape and dtype.

    ``sink`` is the mean of the attention sinks, a logit beside those of all visible rows.
    """

    def __init__(self, specs: dict[str, TensorSpec], seed: int, sink: float = 1.0):
        self.specs, self.seed, self.sink = specs, seed, sink
        self._pending: dict[str, np.ndarray] = {}

    def values(self, stem: str) -> np.ndarray:
        """The float32 values meant for the projection ``stem`` before it is encoded."""
        spec = self.specs[f"{stem}.weight"]
        packed = spec.dtype == "I8"
        shape = (spec.shape[0], spec.shape[1] * (2 if packed else 1))
        rng = _rng(self.seed, stem)
        w = _drive(stem, _normal(rng, f"{stem}.weight", shape))
        rows = 1 if packed or stem.endswith(".engram.embed") else encode.BLOCK
        factors = _spread(rng, (-(-shape[0] // rows), -(-shape[1] // encode.BLOCK)))
        return w * _blocks(factors, shape, rows)

    def __call__(self, name: str) -> np.ndarray:
        if name in self._pending:
            return self._pending.pop(name)
        spec = self.specs[name]
        if spec.dtype in ("BF16", "F32"):
            x = _normal(_rng(self.seed, name), name, spec.shape)
            if name.endswith("attn_sink"):
                x += np.float32(self.sink)
            return encode.bf16(x) if spec.dtype == "BF16" else x
        stem = name.rsplit(".", 1)[0]
        dtype = self.specs[f"{stem}.weight"].dtype
        if dtype == "I8":
            coder = encode.mxfp4
        elif stem.endswith(".engram.embed"):
            coder = encode.fp8_rows
        else:
            coder = encode.fp8_tiles
        codes, scales = coder(self.values(stem))
        self._pending |= {f"{stem}.weight": codes, f"{stem}.scale": scales}
        return self._pending.pop(name)
