# SPDX-License-Identifier: Apache-2.0
"""Checkpoint headers: the released inventory, and an error for each kind of damage."""

import json
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest
from safetensors import safe_open

from deepseek_v41_plugin.checkpoint import (
    CheckpointError,
    TensorSpec,
    expected_tensors,
    read_index,
    validate,
)
from deepseek_v41_plugin.cli.tiny import write_tiny
from deepseek_v41_plugin.config import ModelConfig

INDEX = "model.safetensors.index.json"


def load_config(folder):
    return ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))


@pytest.fixture(autouse=True)
def repeatable(run_rng):
    random.seed(run_rng.getrandbits(32))


@pytest.fixture(scope="module")
def intact(tmp_path_factory, run_seed):
    return write_tiny(tmp_path_factory.mktemp("ckpt") / "intact", seed=run_seed)


@pytest.fixture
def broken(intact, tmp_path):
    return Path(shutil.copytree(intact, tmp_path / "broken"))


def read_header(path):
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write_header(path, header, data):
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def edit_index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def shard_of(folder, name):
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][name]


def refused(folder, *words):
    with pytest.raises(CheckpointError) as caught:
        validate(load_config(folder), folder)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 900
    for word in words:
        assert str(word) in message, message
    return message


def pick(folder, dtype=None):
    names = [n for n, e in read_index(folder).items() if dtype in (None, e.dtype)]
    name = random.choice(names)
    print("tensor", name)
    return name


def test_released_inventory():
    raw = json.loads((Path(__file__).parent / "data/released_config.json").read_text())
    specs = expected_tensors(ModelConfig.from_hf(raw))
    assert len(specs) == 96_085
    assert sum(s.nbytes for s in specs.values()) == 510_286_023_000
    assert Counter(s.dtype for s in specs.values()) == {
        "BF16": 520,
        "F32": 387,
        "F8_E4M3": 357,
        "I8": 47_232,
        "F8_E8M0": 47_589,
    }
    for name, shape, dtype in [
        ("layers.7.hc_attn_fn", (24, 20480), "F32"),
        ("layers.0.attn.wq_a.scale", (40, 160), "F8_E8M0"),
        ("layers.39.ffn.experts.383.w2.weight", (5120, 1152), "I8"),
        ("layers.39.ffn.experts.383.w2.scale", (5120, 72), "F8_E8M0"),
        ("layers.14.engram.embed.weight", (384016682, 256), "F8_E4M3"),
        ("layers.14.engram.embed.scale", (384016682, 8), "F8_E8M0"),
        ("layers.1.engram.wkv.weight", (25600, 6144), "F8_E4M3"),
        ("layers.36.attn.indexer.wq_b.weight", (4096, 1280), "F8_E4M3"),
        ("mtp.0.main_proj.weight", (5120, 15360), "F8_E4M3"),
        ("mtp.2.confidence_head.proj.weight", (1, 5376), "BF16"),
        ("aligner.w1.weight", (5120, 9216), "BF16"),
    ]:
        assert specs[name] == TensorSpec(shape, dtype), name
    absent = (
        "layers.20.attn.compressor.wgate.weight",
        "layers.24.attn.indexer.wk.weight",
        "mtp.0.attn.compressor.wkv.weight",
        "mtp.0.norm.weight",
    )
    assert not specs.keys() & set(absent)


def test_index_agrees_with_the_safetensors_library(intact):
    entries = read_index(intact)
    for path in intact.glob("*.safetensors"):
        with safe_open(path, "pt") as shard:
            for name in shard.keys():
                entry = entries[name]
                tensor = shard.get_tensor(name)
                assert entry.path == path and entry.shape == tuple(tensor.shape)
                assert entry.end - entry.begin == tensor.nbytes
                if tensor.element_size() == 4:
                    raw = path.read_bytes()[entry.begin : entry.end]
                    assert raw == tensor.numpy().tobytes()


def test_intact_checkpoints_pass(intact, tmp_path):
    assert validate(load_config(intact), intact) == []
    names = sorted(intact.glob("*.safetensors"))
    header, data = {}, b""
    for path in names:
        part, chunk = read_header(path)
        part.pop("__metadata__")
        for name, record in part.items():
            begin, end = record["data_offsets"]
            header[name] = record | {"data_offsets": [begin + len(data), end + len(data)]}
        data += chunk
    shutil.copy(intact / "config.json", tmp_path)
    write_header(tmp_path / "model.safetensors", header, data)
    assert validate(load_config(tmp_path), tmp_path) == []


def test_missing_shard(broken):
    path = random.choice(sorted(broken.glob("*.safetensors")))
    path.unlink()
    refused(broken, f"shard {path.name} is missing", "needed for")


def test_no_checkpoint_at_all(tmp_path, intact):
    with pytest.raises(CheckpointError, match="neither model.safetensors.index.json nor"):
        read_index(tmp_path)


def test_truncated_shard(broken):
    name = pick(broken)
    path = shard_of(broken, name)
    size = path.stat().st_size
    for cut in (size - 1, size // 2):
        with path.open("r+b") as file:
            file.truncate(cut)
        message = refused(broken, f"shard {path.name} is truncated")
        assert str(cut) in message


def test_truncated_inside_the_header(broken):
    path = shard_of(broken, "norm.weight")
    for cut in (100, 4, 0):
        with path.open("r+b") as file:
            file.truncate(cut)
        refused(broken, path.name, "header")


def test_trailing_bytes(broken):
    path = shard_of(broken, "norm.weight")
    with path.open("ab") as file:
        file.write(b"\0" * 5)
    refused(broken, path.name, "behind its last tensor")


@pytest.mark.parametrize("start", [b"\xff" * 8, b"\0" * 8, None])
def test_garbage_header(broken, start):
    path = shard_of(broken, pick(broken))
    raw = bytearray(path.read_bytes())
    if start is None:
        raw[8:40] = random.randbytes(32)
    else:
        raw[:8] = start
    path.write_bytes(raw)
    refused(broken, f"shard {path.name} has a garbage header")


@pytest.mark.parametrize(
    "record",
    [
        None,
        {"dtype": "F9", "shape": [1], "data_offsets": [0, 1]},
        {"dtype": ["F9"] * 999, "shape": [1], "data_offsets": [0, 1]},
        {"dtype": "BF16", "shape": [10**999] * 9, "data_offsets": [0, 10**999]},
        {"dtype": "BF16", "shape": [-1], "data_offsets": [0, 2]},
        {"dtype": "BF16", "shape": [2], "data_offsets": [0, 2]},
        {"dtype": "BF16", "shape": [2]},
        {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4, 8]},
    ],
)
def test_malformed_record(broken, record):
    path = shard_of(broken, "norm.weight")
    header, data = read_header(path)
    header["norm.weight"] = record
    write_header(path, header, data)
    refused(broken, "norm.weight", path.name)


def test_indexed_but_not_stored(broken):
    name = pick(broken)
    path = shard_of(broken, name)
    header, data = read_header(path)
    header["renamed"] = header.pop(name)
    write_header(path, header, data)
    refused(broken, f"{name} is not in shard {path.name}")


def test_missing_tensor(broken):
    name = pick(broken, "F8_E8M0")
    path = shard_of(broken, name)
    edit_index(broken, lambda mapping: mapping.pop(name))
    refused(broken, f"{name} is missing", path.name)


def test_many_missing_tensors_are_counted(broken):
    def drop(mapping):
        for name in [n for n in mapping if n.startswith("layers.3.ffn.experts.")]:
            del mapping[name]

    edit_index(broken, drop)
    message = refused(broken, "43 more (48 problems in all)")
    assert message.count("is missing") == 5


@pytest.mark.parametrize(
    "dtype, other, accepted",
    [
        ("I8", "U8", True),
        ("F8_E8M0", "U8", True),
        ("F8_E4M3", "U8", False),
        ("F8_E4M3", "F8_E5M2", False),
        ("F8_E8M0", "I8", False),
        ("BF16", "F16", False),
        ("F32", "I32", False),
    ],
)
def test_dtypes(broken, dtype, other, accepted):
    name = pick(broken, dtype)
    path = shard_of(broken, name)
    header, data = read_header(path)
    header[name]["dtype"] = other
    write_header(path, header, data)
    if accepted:
        assert validate(load_config(broken), broken) == []
    else:
        refused(broken, f"{name} in shard {path.name} has dtype {other}", dtype)


def test_wrong_shape(broken):
    name = pick(broken, "F8_E4M3")
    path = shard_of(broken, name)
    header, data = read_header(path)
    rows, columns = header[name]["shape"]
    header[name]["shape"] = [rows * 2, columns // 2]
    write_header(path, header, data)
    refused(broken, f"{name} in shard {path.name} has shape [{rows * 2}, {columns // 2}]")


def test_a_config_of_other_sizes(broken):
    raw = json.loads((broken / "config.json").read_text())
    raw["text_config"]["moe_intermediate_size"] = 96
    (broken / "config.json").write_text(json.dumps(raw))
    refused(broken, "layers.0.ffn.experts.0.w1.weight in shard", "more (")


def test_unexpected_tensors_are_listed(broken):
    path = shard_of(broken, "norm.weight")
    header, data = read_header(path)
    span = [len(data), len(data) + 6]
    header["layers.0.attn.extra"] = {"dtype": "BF16", "shape": [3], "data_offsets": span}
    write_header(path, header, data + bytes(6))
    edit_index(broken, lambda mapping: mapping.update({"layers.0.attn.extra": path.name}))
    assert validate(load_config(broken), broken) == ["layers.0.attn.extra"]


def test_vision_and_draft_follow_the_config(broken):
    def drop(prefixes):
        def change(mapping):
            for name in [n for n in mapping if n.startswith(prefixes)]:
                del mapping[name]

        return change

    raw = json.loads((broken / "config.json").read_text())
    edit_index(broken, drop(("vision.", "aligner.", "image_")))
    refused(broken, "vision.patch_embed.proj.weight is missing")
    del raw["vision_config"]
    (broken / "config.json").write_text(json.dumps(raw))
    assert validate(load_config(broken), broken) == []

    text = raw["text_config"]
    text["compress_ratios"] = text["compress_ratios"][:-2]
    text["num_nextn_predict_layers"] = 0
    (broken / "config.json").write_text(json.dumps(raw))
    unused = validate(load_config(broken), broken)
    assert unused and all(name.startswith("mtp.") for name in unused)
    edit_index(broken, drop(("mtp.",)))
    assert validate(load_config(broken), broken) == []


def test_bad_index(broken):
    for text, word in [
        ("{", "cannot be read"),
        ("[]", "weight_map"),
        ('{"weight_map": {}}', "weight_map"),
        ('{"weight_map": {"norm.weight": "../other.safetensors"}}', "norm.weight"),
        ('{"weight_map": {"norm.weight": 3}}', "norm.weight"),
        ('{"weight_map": {"norm.weight": ""}}', "in '', which is not a file name"),
        ('{"weight_map": {"norm.weight": ".."}}', "in '..', which is not a file name"),
        ('{"weight_map": {"norm.weight": "%s"}}' % ("x" * 5000), "which is not a file name"),
        ("[" * 100_000, "cannot be read (RecursionError)"),
    ]:
        (broken / INDEX).write_text(text)
        refused(broken, word)


def test_deeply_nested_header(broken):
    path = shard_of(broken, "norm.weight")
    text = b"[" * 100_000
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    refused(broken, f"shard {path.name} has a garbage header")


@pytest.mark.parametrize("shift, word", [(-1, "overlaps"), (1, "leaves a gap behind")])
def test_tensors_must_be_contiguous(broken, shift, word):
    path = shard_of(broken, "norm.weight")
    header, data = read_header(path)
    metadata = header.pop("__metadata__", {})
    names = sorted(header, key=lambda n: header[n]["data_offsets"])
    at = random.randrange(1, len(names))
    moved = data + b"\0" if shift > 0 else data[:-1]
    for name in names[at:]:
        header[name]["data_offsets"] = [v + shift for v in header[name]["data_offsets"]]
    write_header(path, header | {"__metadata__": metadata}, moved)
    refused(broken, f"{names[at]} in shard {path.name} {word} {names[at - 1]}")


def test_two_tensors_on_the_same_bytes(broken):
    path = shard_of(broken, "norm.weight")
    header, data = read_header(path)
    header["copy"] = header["norm.weight"]
    write_header(path, header, data)
    refused(broken, "copy", "overlaps", "norm.weight", path.name)


def test_first_tensor_must_start_at_zero(broken):
    path = shard_of(broken, "norm.weight")
    write_header(path, {"a": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]}}, bytes(3))
    refused(broken, f"a in shard {path.name} leaves a gap behind the header")


def test_long_names_are_clipped(broken):
    def lengthen(mapping):
        shard = mapping["norm.weight"]
        mapping.update({f"{i}\n" + "y" * 5000: shard for i in range(9)})

    edit_index(broken, lengthen)
    refused(broken, "yyy... is not in shard", "problems in all")
