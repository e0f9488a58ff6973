# SPDX-License-Identifier: Apache-2.0
"""Reads a checkpoint directory: the nested config.json and the safetensors shards."""

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors import safe_open

from . import formats

# A table of at most this many bytes is read whole; of a larger one only the rows asked for.
_WHOLE_TABLE_BYTES = 1 << 26


@dataclass(frozen=True)
class Layer:
    """What one layer owns and what it borrows (facts 4.6)."""

    index: int
    ratio: int  # 0 window only; 1 or 2 tokens to a global row
    kv_source: int | None  # layer whose global KV and index keys are read
    index_source: int | None  # layer whose selected rows are read
    restricted: bool  # scores limited to the candidate source's blocks
    engram: int | None  # ordinal among the Engram layers


def read_config(directory: Path) -> SimpleNamespace:
    """``text_config`` as attributes, plus the top level fields that text needs."""
    raw = json.loads((directory / "config.json").read_text())
    if "text_config" not in raw:
        raise ValueError("config.json: text_config is missing. Give a nested V4.1 config")
    c = SimpleNamespace(**raw["text_config"])
    c.image_token_id = raw.get("image_token_id")
    c.tile = tuple(raw["quantization_config"]["weight_block_size"])
    c.gate_temp = getattr(c, "gate_temp", None) or 1.0
    return c


def _source(sources: list[int], layer: int) -> int:
    return max(s for s in sources if s <= layer)


def plan_layers(c: SimpleNamespace) -> list[Layer]:
    """One Layer per backbone layer; a source is the largest source id not above the layer."""
    plans = []
    for i in range(c.num_hidden_layers):
        ratio = c.compress_ratios[i]
        kv = _source(c.kv_source_layer_ids, i) if ratio else None
        index = _source(c.index_source_layer_ids, i) if ratio else None
        candidate = c.candidate_source_layer_id
        restricted = (
            candidate is not None
            and index == i > candidate
            and kv == _source(c.kv_source_layer_ids, candidate)
        )
        engram = c.engram_layer_ids.index(i) if i in c.engram_layer_ids else None
        plans.append(Layer(i, ratio, kv, index, restricted, engram))
    return plans


class Weights:
    """Tensors by their checkpoint names, decoded to float64 on ``device``.

    With ``cache=False`` each use decodes anew, so that memory stays at one tensor.
    """

    def __init__(self, directory: str | Path, tile: tuple[int, int], device, cache: bool = True):
        self.tile = tile
        self.device = torch.device(device)
        self.cache: dict[str, torch.Tensor] | None = {} if cache else None
        self._shard_of = {}
        for path in sorted(Path(directory).glob("*.safetensors")):
            shard = safe_open(str(path), framework="pt")
            for name in shard.keys():
                self._shard_of[name] = shard
        if not self._shard_of:
            raise ValueError(f"{directory}: no safetensors shard. Give a checkpoint directory")

    def __contains__(self, name: str) -> bool:
        return name in self._shard_of

    def raw(self, name: str) -> torch.Tensor:
        """The tensor as stored."""
        if name not in self._shard_of:
            raise ValueError(f"{name}: not in any shard. Check the checkpoint")
        return self._shard_of[name].get_tensor(name).to(self.device)

    def _cached(self, name: str, decode) -> torch.Tensor:
        if self.cache is None:
            return decode()
        if name not in self.cache:
            self.cache[name] = decode()
        return self.cache[name]

    def plain(self, name: str) -> torch.Tensor:
        """A BF16 or F32 tensor as float64."""
        return self._cached(name, lambda: self.raw(name).double())

    def matrix(self, prefix: str) -> torch.Tensor:
        """``prefix.weight`` [out, in], scaled by ``prefix.scale`` if it is quantised."""
        return self._cached(prefix, lambda: self._decode(prefix))

    def _decode(self, prefix: str) -> torch.Tensor:
        weight = self.raw(f"{prefix}.weight")
        if weight.dtype == torch.int8:
            return formats.decode_mxfp4(weight, self.raw(f"{prefix}.scale"))
        if weight.dtype == torch.float8_e4m3fn:
            return formats.decode_fp8(weight, self.raw(f"{prefix}.scale"), self.tile)
        return weight.double()

    def table_rows(self, prefix: str, rows: torch.Tensor) -> torch.Tensor:
        """Rows of an Engram table (per row, per 32 columns scales): [len(rows), dim] float64."""
        weight, scale = (self._rows(f"{prefix}.{part}", rows) for part in ("weight", "scale"))
        return formats.decode_fp8(weight, scale, (1, 32))

    def _rows(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        view = self._shard_of[name].get_slice(name)
        count, width = view.get_shape()
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < count:
            raise ValueError(f"{name}: a hash row is beyond its {count} rows. Check the primes")
        if count * width <= _WHOLE_TABLE_BYTES:
            return self.raw(name).view(torch.uint8)[rows].view(view[0:1].dtype)
        unique, inverse = rows.unique(return_inverse=True)
        picked = torch.cat([view[r : r + 1].view(torch.uint8) for r in unique.tolist()])
        return picked.to(self.device)[inverse].view(view[0:1].dtype)
