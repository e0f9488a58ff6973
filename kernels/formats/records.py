# SPDX-License-Identifier: Apache-2.0
"""Cache records: one row of bytes a token (window) or a compressed row (global KV, index key)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import blocks
from .scalar import E4M3_MAX, ceil_log2, e4m3, e8m0_decode, e8m0_encode, pack_nibbles, pow2, unpack_nibbles, widened


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

    def round(self, x: torch.Tensor) -> torch.Tensor:
        """x as it would come back from the cache; same shape and dtype."""
        return self.decode(self.encode(x), x.dtype)


class WindowRecord(Record):
    """E4M3 per 32 under E8M0: dim + dim/32 bytes (528 for 512)."""

    def __init__(self, dim: int):
        super().__init__("window", dim, dim + dim // blocks.FP8_BLOCK)

    def encode(self, x):
        q, exponent = blocks.fp8_quantize(widened(x))
        return torch.cat((q.view(torch.uint8), e8m0_encode(exponent)), -1)

    def decode(self, record, dtype):
        q, scale = record[..., : self.dim].contiguous(), record[..., self.dim :]
        return blocks.scaled_rows(q.view(torch.float8_e4m3fn), scale, dtype)


class GlobalRecord(Record):
    """E2M1 per 16 under E4M3: dim/2 + dim/16 bytes (288 for 512)."""

    def __init__(self, dim: int):
        super().__init__("global", dim, dim // 2 + dim // blocks.GLOBAL_BLOCK)

    def encode(self, x):
        codes, scale = blocks.global_quantize(widened(x))
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
        codes, exponent = blocks.index_quantize(widened(x))
        return torch.cat((pack_nibbles(codes), e8m0_encode(exponent)), -1)

    def decode(self, record, dtype):
        return blocks.mxfp4_rows(record[..., : self.dim // 2], record[..., self.dim // 2 :], dtype)


class Fp8RopeRecord(Record):
    """V4's record: E4M3 per 64 under E8M0, the RoPE dims in bf16: 584 bytes for 448 + 64, padded to 8.

    Order here: E4M3 values, bf16 values, scales.
    """

    def __init__(self, dim: int, rope: int):
        self.plain, self.rope = dim - rope, rope
        self.groups = -(-self.plain // 64)
        super().__init__("fp8_rope", dim, self.plain + 2 * rope + -(-self.groups // 8) * 8)

    def encode(self, x):
        x = widened(x)
        plain = torch.nn.functional.pad(x[..., : self.plain], (0, self.groups * 64 - self.plain))
        plain = plain.unflatten(-1, (self.groups, 64))
        exponent = ceil_log2(plain.abs().amax(-1).clamp(min=1e-4) / E4M3_MAX)
        q = e4m3(plain * pow2(-exponent, x.dtype)[..., None]).flatten(-2)[..., : self.plain].contiguous()
        rope = x[..., self.plain :].to(torch.bfloat16).contiguous()
        scales = torch.nn.functional.pad(e8m0_encode(exponent), (0, self.width - self.plain - 2 * self.rope - self.groups))
        return torch.cat((q.view(torch.uint8), rope.view(torch.uint8), scales), -1)

    def decode(self, record, dtype):
        plain, rope, scales = record.split((self.plain, 2 * self.rope, self.width - self.plain - 2 * self.rope), -1)
        scale = e8m0_decode(scales[..., : self.groups], dtype).repeat_interleave(64, -1)[..., : self.plain]
        values = plain.contiguous().view(torch.float8_e4m3fn).to(dtype) * scale
        return torch.cat((values, rope.contiguous().view(torch.bfloat16).to(dtype)), -1)


class Fp8IndexRecord(Record):
    """E4M3 under one power of two a row, kept as float32: dim + 4 bytes (132 for 128)."""

    def __init__(self, dim: int):
        super().__init__("fp8_index", dim, dim + 4)

    def encode(self, x):
        x = widened(x)
        exponent = ceil_log2(x.abs().amax(-1, keepdim=True).clamp(min=1e-4) / E4M3_MAX)
        q = e4m3(x * pow2(-exponent, x.dtype))
        return torch.cat((q.view(torch.uint8), pow2(exponent, torch.float32).view(torch.uint8)), -1)

    def decode(self, record, dtype):
        q, scale = record[..., : self.dim].contiguous(), record[..., self.dim :].contiguous()
        return q.view(torch.float8_e4m3fn).to(dtype) * scale.view(torch.float32).to(dtype)


@dataclass(frozen=True)
class CacheFormat:
    """The three records of a model's caches."""

    window: Record
    compressed: Record
    index: Record


def cache_format(name: str, head_dim: int, rope_dim: int, index_dim: int) -> CacheFormat:
    """`auto`: the formats the model was trained with.  `fp8_ds_mla`: V4's 584-byte record for window
    and compressed rows and FP8 index keys, as vLLM keeps V4.1 on Hopper."""
    if name == "fp8_ds_mla":
        record = Fp8RopeRecord(head_dim, rope_dim)
        return CacheFormat(record, record, Fp8IndexRecord(index_dim))
    if name == "auto":
        return CacheFormat(WindowRecord(head_dim), GlobalRecord(head_dim), IndexRecord(index_dim))
    raise ValueError(f"cache format {name!r} is unknown. Use auto or fp8_ds_mla")
