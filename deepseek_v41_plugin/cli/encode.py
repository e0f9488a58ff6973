# SPDX-License-Identifier: Apache-2.0
"""Float arrays into the checkpoint's storage formats.

Each encoder takes float32 and returns raw bytes as unsigned arrays. A scale byte b stands
for 2^(b-127) and is the smallest power of two that brings its block into range.
"""

import numpy as np

BLOCK = 32
E4M3_MAX = 448.0
E2M1_MAX = 6.0
# Smallest float32 that rounds to code j+1: ties go to the even code.
_MIDPOINTS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
_STEPS = np.where(
    np.arange(7) % 2 == 1, _MIDPOINTS, np.nextafter(_MIDPOINTS, np.float32(np.inf))
)


def scale_bytes(amax: np.ndarray, limit: float) -> np.ndarray:
    """UE8M0 bytes of 2^ceil(log2(amax / limit)); 127 where ``amax`` is 0."""
    mantissa, exponent = np.frexp(np.asarray(amax, np.float64) / limit)
    ceiling = np.where(mantissa == 0.5, exponent - 1, exponent)
    ceiling = np.where(np.asarray(amax) == 0, 0, ceiling)
    return np.clip(ceiling + 127, 0, 254).astype(np.uint8)


def _powers(scales: np.ndarray) -> np.ndarray:
    return np.ldexp(np.float32(1), scales.astype(np.int32) - 127)


def bf16(x: np.ndarray) -> np.ndarray:
    """uint16 bit patterns, round to nearest even; ``x`` must be finite."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def e4m3(x: np.ndarray) -> np.ndarray:
    """uint8 E4M3FN codes, round to nearest even, saturating at 448."""
    import torch

    values = torch.from_numpy(np.clip(x, -E4M3_MAX, E4M3_MAX))
    return values.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def e2m1(x: np.ndarray) -> np.ndarray:
    """uint8 codes 0..15 (bit 3 is the sign), round to nearest even, saturating at 6."""
    magnitude = np.searchsorted(_STEPS, np.abs(x), side="right").astype(np.uint8)
    return magnitude | (np.signbit(x).astype(np.uint8) << 3)


def fp8_tiles(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[out, in] -> codes uint8 [out, in] and scales uint8 [ceil(out/32), ceil(in/32)]."""
    rows, columns = w.shape
    tiles = (-(-rows // BLOCK), -(-columns // BLOCK))
    padded = np.zeros((tiles[0] * BLOCK, tiles[1] * BLOCK), np.float32)
    padded[:rows, :columns] = np.abs(w)
    amax = padded.reshape(tiles[0], BLOCK, tiles[1], BLOCK).max(axis=(1, 3))
    scales = scale_bytes(amax, E4M3_MAX)
    spread = _powers(scales).repeat(BLOCK, 0)[:rows].repeat(BLOCK, 1)[:, :columns]
    return e4m3(w / spread), scales


def fp8_rows(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[rows, columns] -> codes uint8 and scales uint8 [rows, columns/32]."""
    groups = w.reshape(len(w), -1, BLOCK)
    scales = scale_bytes(np.abs(groups).max(axis=-1), E4M3_MAX)
    return e4m3(groups / _powers(scales)[..., None]).reshape(w.shape), scales


def mxfp4(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[out, in] -> packed uint8 [out, in/2] (low nibble: even column), scales [out, in/32]."""
    groups = w.reshape(len(w), -1, BLOCK)
    scales = scale_bytes(np.abs(groups).max(axis=-1), E2M1_MAX)
    codes = e2m1(groups / _powers(scales)[..., None]).reshape(w.shape)
    return codes[:, 0::2] | (codes[:, 1::2] << 4), scales
