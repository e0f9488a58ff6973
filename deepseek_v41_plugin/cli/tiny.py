# SPDX-License-Identifier: Apache-2.0
"""``dsv41 tiny``: a small random checkpoint in the released layout."""

import argparse
import json
import math
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from ..checkpoint import expected_tensors
from ..checkpoint.index import INDEX_NAME
from ..config import ModelConfig
from ..config_fields import shorten
from ..model.engram_hash import compressed_vocab
from . import tiny_tokenizer as words
from .shards import plan_shards, shard_names, write_index, write_shard
from .tiny_presets import PRESETS, SHARD_MIB, make_config
from .tiny_weights import Weights

_WRITER = "dsv41 tiny"
_MOST_LAYERS = 64


def _previous_shards(folder: Path) -> list[Path] | None:
    """Shards of an earlier ``dsv41 tiny`` in ``folder``, or None if it wrote none."""
    try:
        index = json.loads((folder / INDEX_NAME).read_text(encoding="utf-8"))
        if index["metadata"]["writer"] != _WRITER:
            return None
        return [folder / Path(name).name for name in set(index["weight_map"].values())]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _prepare(folder: Path, force: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: not a folder. Name a new or empty folder.")
    folder.mkdir(parents=True, exist_ok=True)
    stale = _previous_shards(folder)
    if stale is None and any(folder.iterdir()) and not force:
        raise ValueError(
            f"{folder}: not empty and not written by {_WRITER}. "
            "Name another folder, or pass --force to write into it."
        )
    for path in stale or ():
        path.unlink(missing_ok=True)


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_tiny(
    out_dir: str | Path,
    preset: str = "tiny",
    seed: int = 0,
    layers: int | None = None,
    vision: bool = True,
    shard_mib: float | None = None,
    force: bool = False,
    overrides: dict | None = None,
) -> Path:
    """Write a checkpoint of ``preset`` ("tiny" or "sm90") and return its folder.

    Equal arguments give byte-identical files. ``layers`` (1 to 64) cuts or lengthens the
    backbone, ``shard_mib`` bounds a shard in MiB, ``overrides`` replaces text_config
    fields (the table sizes follow from engram_vocab_size and engram_n_heads). Raises
    ValueError for an argument out of range or a folder with foreign files (unless ``force``),
    and ConfigError for overrides that contradict each other.
    """
    if preset not in PRESETS:
        known = ", ".join(PRESETS)
        raise ValueError(f"preset: {shorten(preset)} is unknown. Choose one of {known}.")
    if seed < 0:
        raise ValueError(f"seed: {shorten(seed)} is negative. Use a seed of 0 or more.")
    if layers is not None and not 1 <= layers <= _MOST_LAYERS:
        raise ValueError(
            f"layers: {shorten(layers)} is out of range. Use between 1 and {_MOST_LAYERS} layers."
        )
    shard_mib = SHARD_MIB[preset] if shard_mib is None else shard_mib
    if not 0 < shard_mib < 1e9:
        raise ValueError(f"shard_mib: {shard_mib} is out of range. Use a positive size.")
    sizes = PRESETS[preset] | (overrides or {})
    words_of = (sizes["vocab_size"], sizes["max_position_embeddings"])
    with TemporaryDirectory() as scratch:
        vocab = words.write_tokenizer(Path(scratch), *words_of)
        classes = compressed_vocab(Path(scratch) / "tokenizer.json", sizes["vocab_size"])
    named = {"bos": words.BOS, "eos": words.EOS, "pad": words.PAD, "image": words.IMAGE}
    ids = {key: vocab[token] for key, token in (named | {"noise": words.NOISE}).items()}
    raw = make_config(preset, layers, vision, ids, int(classes.max()) + 1, overrides)
    cfg = ModelConfig.from_hf(raw)
    specs = expected_tensors(cfg)

    # Nothing is written or removed before the arguments have proved sound.
    folder = Path(out_dir)
    _prepare(folder, force)
    words.write_tokenizer(folder, *words_of)
    plan = plan_shards(specs, int(shard_mib * (1 << 20)))
    write_index(folder, plan, specs, {"writer": _WRITER, "preset": preset, "seed": seed})
    # The more rows a softmax can see, the larger a sink must be to take part.
    sink = math.log(cfg.sliding_window + cfg.index_topk) / 2
    weights = Weights(specs, seed, sink)
    for name, tensors in zip(shard_names(len(plan)), plan):
        write_shard(folder / name, tensors, specs, weights)
    generation = {k: raw[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", generation)
    _write_json(folder / "config.json", raw)
    return folder


def add_parser(subparsers) -> argparse.ArgumentParser:
    """Add ``tiny`` to an argparse subparsers object; its ``run`` default is ``run``."""
    parser = subparsers.add_parser(
        "tiny",
        help="write a small random checkpoint in the released layout",
        description="Write a small random DeepSeek-V4.1 checkpoint: every layer kind and "
        "storage format of the released one, at a size for tests.",
    )
    parser.add_argument("dir", metavar="DIR", help="a new or empty folder")
    parser.add_argument(
        "--preset",
        choices=list(PRESETS),
        default="tiny",
        help="tiny: 4 MB, for any machine; sm90: 0.43 GB, with Hopper's head sizes",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default 0")
    parser.add_argument(
        "--layers", type=int, metavar="N", help=f"backbone layers, 1 to {_MOST_LAYERS} (default 8)"
    )
    parser.add_argument("--shard-mib", type=float, metavar="N", help="largest shard in MiB")
    parser.add_argument(
        "--vision",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="include a small vision tower (default)",
    )
    parser.add_argument("--force", action="store_true", help="write among foreign files")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint that ``args`` describes; 0, or 1 after an error message."""
    try:
        folder = write_tiny(
            args.dir,
            args.preset,
            args.seed,
            args.layers,
            args.vision,
            args.shard_mib,
            args.force,
        )
    except (ValueError, OSError) as err:
        print(f"dsv41 tiny: {err}", file=sys.stderr)
        return 1
    shards = list(folder.glob("model-*.safetensors"))
    size = sum(path.stat().st_size for path in shards) / 1e6
    print(f"{folder}: {len(shards)} shards, {size:.1f} MB, preset {args.preset}")
    return 0
