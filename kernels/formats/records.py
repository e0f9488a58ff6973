"""Cache records: one row of bytes a token (window) or a compressed row (global KV, index key)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import blocks
from .scalar import pack_nibbles, unpack_nibbles


@dataclass(frozen=True)
class Record:
    """A record format: `width` bytes for `dim` values, [values | scales]."""

    name: str
    dim: int
    width: int

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Values [..., dim] -> bytes [..., width] (uint8)."""
        raise NotImplementedError

    def decode(self, record: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Bytes [..., width] -> values [..., dim] in `dtype`."""
        raise NotImplementedError


class WindowRecord(Record):
    """E4M3 per 32 under E8M0: dim + dim/32 bytes (528 for 512)."""

    def __init__(self, dim: int):
        super().__init__("window", dim, dim + dim // blocks.FP8_BLOCK)

    def encode(self, x):
        q, exponent = blocks.fp8_quantize(x)
        return torch.cat((q.view(torch.uint8), blocks.exponent_bytes(exponent)), -1)

    def decode(self, record, dtype):
        q, scale = record[..., : self.dim].contiguous(), record[..., self.dim :]
        return blocks.scaled_rows(q.view(torch.float8_e4m3fn), scale, dtype)


class GlobalRecord(Record):
    """E2M1 per 16 under E4M3: dim/2 + dim/16 bytes (288 for 512)."""

    def __init__(self, dim: int):
        super().__init__("global", dim, dim // 2 + dim // blocks.GLOBAL_BLOCK)

    def encode(self, x):
        codes, scale = blocks.global_quantize(x)
        return torch.cat((pack_nibbles(codes), scale.view(torch.uint8)), -1)

    def decode(self, record, dtype):
        codes = unpack_nibbles(record[..., : self.dim // 2])
        scale = record[..., self.dim // 2 :].contiguous().view(torch.float8_e4m3fn)
        return blocks.global_dequantize(codes, scale, dtype)


class IndexRecord(Record):
    """E2M1 per 32 under E8M0: dim/2 + dim/32 bytes (68 for 128)."""

    def __init__(self, dim: int):
        super().__init__("index", dim, dim // 2 + dim // blocks.INDEX_BLOCK)

    def encode(self, x):
        codes, exponent = blocks.index_quantize(x)
        return torch.cat((pack_nibbles(codes), blocks.exponent_bytes(exponent)), -1)

    def decode(self, record, dtype):
        codes = unpack_nibbles(record[..., : self.dim // 2])
        exponent = record[..., self.dim // 2 :].to(torch.int32) - 127
        return blocks.index_dequantize(codes, exponent, dtype)
