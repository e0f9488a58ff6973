# SPDX-License-Identifier: Apache-2.0
"""``dsv41 tiny``: layout, seeds, storage formats, tokenizer, and refusals."""

import argparse
import filecmp
import functools
import json

import numpy as np
import pytest

from deepseek_v41_plugin.checkpoint import expected_tensors, read_index, validate
from deepseek_v41_plugin.cli import encode, tiny, tiny_tokenizer
from deepseek_v41_plugin.cli.tiny import write_tiny
from deepseek_v41_plugin.cli.tiny_presets import make_config
from deepseek_v41_plugin.cli.tiny_weights import Weights
from deepseek_v41_plugin.config import ConfigError, ModelConfig
from deepseek_v41_plugin.model.engram_hash import compressed_vocab
from deepseek_v41_plugin.model.rope import frequencies

GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


@pytest.fixture(scope="module")
def seed(run_seed):
    return run_seed


@pytest.fixture(scope="module")
def folder(tmp_path_factory, seed):
    return write_tiny(tmp_path_factory.mktemp("tiny") / "a", seed=seed)


@pytest.fixture(scope="module")
def cfg(folder):
    return ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))


def cli(*argv):
    parser = argparse.ArgumentParser()
    tiny.add_parser(parser.add_subparsers())
    args = parser.parse_args(["tiny", *map(str, argv)])
    return args.run(args)


def e4m3(codes):
    """E4M3FN by its definition: sign, 4 exponent bits (bias 7), 3 mantissa bits."""
    codes = codes.astype(np.int64)
    exponent, mantissa = codes >> 3 & 15, (codes & 7) / 8
    value = np.where(exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * 2.0 ** (exponent - 7))
    assert not ((codes & 127) == 127).any(), "NaN"
    return np.where(codes & 128, -value, value)


def nibbles(packed):
    return np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)


# Folders are fresh for each test and not rewritten once they have been read here.
entries = functools.cache(read_index)


def raw(folder, name):
    entry = entries(folder)[name]
    data = np.fromfile(entry.path, np.uint8, entry.end - entry.begin, offset=entry.begin)
    kind = {"BF16": np.uint16, "F32": np.float32}.get(entry.dtype, np.uint8)
    return data.view(kind).reshape(entry.shape)


def decode(folder, stem):
    weight, scale = raw(folder, f"{stem}.weight"), raw(folder, f"{stem}.scale")
    power = 2.0 ** (scale.astype(np.float64) - 127)
    if entries(folder)[f"{stem}.weight"].dtype == "I8":
        return GRID[nibbles(weight)] * power.repeat(32, 1), power.repeat(32, 1)
    rows = 1 if stem.endswith("engram.embed") else 32
    power = power.repeat(rows, 0)[: len(weight)].repeat(32, 1)[:, : weight.shape[1]]
    return e4m3(weight) * power, power


def test_the_checkpoint_is_valid_and_all_alive(folder, cfg):
    assert validate(cfg, folder) == []
    assert len(expected_tensors(cfg)) == 806
    assert {p.ratio for p in cfg.layers} == {0, 1, 2}
    assert any(p.restricted for p in cfg.layers)
    assert sum(p.is_kv_source for p in cfg.layers) == 3
    assert cfg.vision and cfg.num_nextn_predict_layers == 2
    assert cfg.engram_num_embeddings == (630, 834)
    primes = [sum(layer, ()) for layer in cfg.engram_primes]
    assert primes == [(97, 101, 103, 107, 109, 113), (127, 131, 137, 139, 149, 151)]
    ids = (cfg.bos_token_id, cfg.eos_token_id, cfg.pad_token_id)
    assert ids == (0, 1, 2) and cfg.image_token_id < cfg.vocab_size


def test_tables_are_alone_in_the_last_shards(folder, cfg):
    by_shard = {}
    for name, entry in read_index(folder).items():
        by_shard.setdefault(entry.path.name, set()).add(name)
    names = sorted(by_shard)
    count = len(names)
    assert count >= 4
    assert names == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    for shard, layer in zip(names[-2:], cfg.engram_layer_ids):
        at = f"layers.{layer}.engram.embed"
        assert by_shard[shard] == {f"{at}.weight", f"{at}.scale"}


def test_equal_seeds_give_equal_bytes(folder, seed, tmp_path):
    again = write_tiny(tmp_path / "again", seed=seed)
    names = sorted(p.name for p in folder.iterdir())
    assert names == sorted(p.name for p in again.iterdir())
    assert filecmp.cmpfiles(folder, again, names, shallow=False) == (names, [], [])
    other = write_tiny(tmp_path / "other", seed=seed + 1)
    same, different, _ = filecmp.cmpfiles(folder, other, names, shallow=False)
    assert set(different) == {n for n in names if n.startswith("model-")} | {
        "model.safetensors.index.json"
    }


def test_shard_size_does_not_change_tensors(folder, seed, run_rng, tmp_path):
    other = write_tiny(tmp_path / "other", seed=seed, shard_mib=0.3)
    assert len(list(other.glob("*.safetensors"))) > len(list(folder.glob("*.safetensors")))
    for name in run_rng.sample(sorted(entries(folder)), 60):
        assert (raw(folder, name) == raw(other, name)).all(), name


@pytest.mark.parametrize(
    "stem, error",
    [
        ("layers.0.attn.wq_b", 2**-4),
        ("layers.5.attn.wo_a", 2**-4),
        ("layers.4.engram.wkv", 2**-4),
        ("layers.4.engram.embed", 2**-4),
        ("layers.1.engram.embed", 2**-4),
        ("mtp.0.main_proj", 2**-4),
        ("layers.6.ffn.shared_experts.w2", 2**-4),
        ("layers.3.ffn.experts.5.w1", 2**-2),
        ("layers.7.ffn.experts.0.w2", 2**-2),
        ("mtp.1.ffn.experts.3.w3", 2**-2),
    ],
)
def test_formats_hold_the_values_meant(folder, cfg, seed, stem, error):
    meant = Weights(expected_tensors(cfg), seed).values(stem).astype(np.float64)
    stored, power = decode(folder, stem)
    assert stored.shape == meant.shape
    floor = power * (0.25 if error > 0.1 else 2.0**-10)
    # FP4 saturates at 6 only if the scale is too small, which the coder must avoid.
    assert (np.abs(stored - meant) <= np.maximum(np.abs(meant) * error, floor)).all()
    exponents = np.log2(np.unique(power))
    assert (exponents == np.round(exponents)).all()
    assert len(exponents) >= 2 or raw(folder, f"{stem}.scale").size < 32, "few may be equal by chance"
    top = np.abs(meant).max() / power.max()
    assert top <= (6 if error > 0.1 else 448)


def test_e2m1_rounds_to_even_and_saturates():
    x = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.01, 99.0, 0.26], np.float32)
    want = np.array([0, 1, 1, 2, 2, 4, 4, 6, 6, 0.5])
    assert (GRID[encode.e2m1(x)] == want).all()
    assert (GRID[encode.e2m1(-x)] == -want).all()
    assert encode.e2m1(np.float32([-0.0]))[0] == 8


def test_scale_bytes_are_exact_powers():
    for limit in (6.0, 448.0):
        for k in (-20, -1, 0, 3):
            edge = limit * 2.0**k
            above = np.nextafter(edge, np.inf)
            got = encode.scale_bytes(np.array([edge, above, edge * 0.75, 0.0]), limit)
            assert got.tolist() == [127 + k, 128 + k, 127 + k, 127]


def test_bf16_and_e4m3_agree_with_torch(seed):
    import torch

    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(5000) * 10.0 ** rng.integers(-6, 6, 5000)).astype(np.float32)
    want = torch.from_numpy(x).bfloat16().view(torch.uint16).numpy()
    assert (encode.bf16(x) == want).all()
    values = np.sort(e4m3(np.r_[0:127, 128:255].astype(np.uint8)))
    got = e4m3(encode.e4m3(x))
    nearest = np.abs(np.clip(x, -448, 448)[:, None] - values).min(1)
    assert (np.abs(np.clip(x, -448, 448) - got) == nearest).all()


def test_ragged_tiles_round_trip(seed):
    w = np.random.default_rng(seed).standard_normal((45, 70)).astype(np.float32)
    codes, scales = encode.fp8_tiles(w)
    assert codes.shape == (45, 70) and scales.shape == (2, 3)
    spread = 2.0 ** (scales.repeat(32, 0)[:45].repeat(32, 1)[:, :70].astype(float) - 127)
    assert (np.abs(e4m3(codes) * spread - w) <= np.maximum(abs(w) / 16, spread / 1024)).all()


def test_tokenizer_round_trips_bytes_and_specials(folder, cfg):
    from tokenizers import Tokenizer

    tok = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tok.get_vocab_size() == cfg.vocab_size
    assert all(tok.id_to_token(i) is not None for i in range(cfg.vocab_size))
    text = "Grüße,\n\t<b> 中文 🙂" + bytes(range(1, 128)).decode()
    ids = tok.encode(text).ids
    assert ids == [b + 3 for b in text.encode()] and tok.decode(ids) == text
    for token in (*tiny_tokenizer.HIDDEN, *tiny_tokenizer.MARKERS):
        (only,) = tok.encode(token).ids
        assert tok.decode([only], skip_special_tokens=False) == token
        hidden = tok.decode([only]) == ""
        assert hidden == (token in tiny_tokenizer.HIDDEN)
    assert tok.token_to_id(tiny_tokenizer.IMAGE) == cfg.image_token_id
    assert tok.token_to_id(tiny_tokenizer.NOISE) == cfg.dspark_noise_token_id


def test_compressed_vocab_is_the_configs(folder, cfg):
    classes = compressed_vocab(folder / "tokenizer.json", cfg.vocab_size)
    count = cfg.engram_compressed_vocab_size
    assert set(classes.tolist()) == set(range(count)) and 128 < count < cfg.vocab_size
    assert classes[3 + ord("A")] == classes[3 + ord("a")]


def test_sm90_config_has_hoppers_sizes():
    tokens = {"bos": 0, "eos": 1, "pad": 2, "image": 259, "noise": 260}
    cfg = ModelConfig.from_hf(make_config("sm90", None, True, tokens, 500))
    assert (cfg.num_attention_heads, cfg.head_dim, cfg.qk_rope_head_dim) == (64, 512, 64)
    assert (cfg.index_n_heads, cfg.index_head_dim, cfg.index_topk) == (32, 128, 512)
    assert (cfg.sliding_window, cfg.o_groups, cfg.num_nextn_predict_layers) == (128, 8, 3)
    assert {p.ratio for p in cfg.layers} == {0, 1, 2} and any(p.restricted for p in cfg.layers)
    assert sum(s.nbytes for s in expected_tensors(cfg).values()) < 600e6
    assert len(tiny_tokenizer.token_list(cfg.vocab_size)) == cfg.vocab_size


@pytest.mark.parametrize("layers", [1, 3, 5, 6, 12])
def test_layers_cuts_or_lengthens(tmp_path, layers):
    folder = write_tiny(tmp_path / "x", layers=layers, vision=False)
    cfg = ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))
    assert cfg.num_hidden_layers == layers and cfg.vision is None
    assert validate(cfg, folder) == []


def test_overrides(tmp_path):
    fields = {"n_routed_experts": 4, "engram_n_heads": 1}
    folder = write_tiny(tmp_path / "x", layers=2, overrides=fields)
    cfg = ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))
    assert cfg.n_routed_experts == 4 and cfg.engram_num_embeddings == (97 + 101 + 103,)
    assert validate(cfg, folder) == []
    before = sorted(p.name for p in folder.iterdir())
    with pytest.raises(ConfigError, match="text_config.head_dim"):
        write_tiny(folder, overrides={"head_dim": 33})
    assert sorted(p.name for p in folder.iterdir()) == before


def test_command(tmp_path, capsys):
    target = tmp_path / "new"
    assert cli(target, "--layers", 2, "--no-vision", "--seed", 5, "--shard-mib", 0.5) == 0
    assert "tiny" in capsys.readouterr().out
    assert not any(n.startswith("vision") for n in read_index(target))
    # Its own checkpoint may be replaced, and no shard of the former stays behind.
    assert cli(target, "--layers", 1, "--seed", 6) == 0
    indexed = {e.path for e in read_index(target).values()}
    assert indexed == set(target.glob("*.safetensors"))


def test_foreign_folders_are_refused(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    assert cli(tmp_path, "--layers", 1) == 1
    error = capsys.readouterr().err
    assert str(tmp_path) in error and "--force" in error and error.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]
    assert cli(tmp_path, "--layers", 1, "--force") == 0
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_someone_elses_checkpoint_is_refused(folder, tmp_path, capsys):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    del index["metadata"]["writer"]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert cli(tmp_path) == 1
    assert "not written by dsv41 tiny" in capsys.readouterr().err


def test_bad_arguments(tmp_path, capsys):
    for option, value, message in [
        ("--seed", -1, "seed: -1 is negative"),
        ("--layers", 0, "layers: 0 is out of range. Use between 1 and 64"),
        ("--layers", 65, "layers: 65 is out of range"),
    ]:
        assert cli(tmp_path / "a", option, value) == 1
        assert message in capsys.readouterr().err
    assert cli(tmp_path / "a", "--shard-mib", 0) == 1
    assert cli(tmp_path / "a", "--shard-mib", "nan") == 1
    (tmp_path / "file").write_text("")
    assert cli(tmp_path / "file") == 1
    assert "not a folder" in capsys.readouterr().err
    with pytest.raises(ValueError, match="preset: 'big' is unknown"):
        write_tiny(tmp_path / "a", "big")
    with pytest.raises(ValueError, match="vocab_size: 100 is not between"):
        write_tiny(tmp_path / "a", overrides={"vocab_size": 100})
    with pytest.raises(ValueError, match="vocab_size: 10000.* is not between") as caught:
        write_tiny(tmp_path / "a", overrides={"vocab_size": 10**999})
    assert len(str(caught.value)) < 200


def test_yarn_is_alive_and_agrees_with_the_lengths(cfg):
    yarn = cfg.rope_scaling
    assert yarn.factor == cfg.max_position_embeddings / yarn.original_max_position_embeddings
    plain = cfg.compress_rope_theta ** (-np.arange(0, 1, 2 / cfg.qk_rope_head_dim))
    ratio = frequencies(cfg, True).numpy() / plain
    assert np.isclose(ratio, 1).sum() >= 1 and np.isclose(ratio, 1 / yarn.factor).sum() >= 1
    between = (ratio < 0.99) & (ratio > 1.01 / yarn.factor)
    assert between.sum() >= 1
