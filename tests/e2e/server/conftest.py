# SPDX-License-Identifier: Apache-2.0
"""One server for all tests of this folder, its words, random prompts."""

import importlib.util

import pytest

if not all(importlib.util.find_spec(name) for name in ("vllm", "openai")):
    collect_ignore_glob = ["test_*.py"]

FLAGS = (
    "--dtype", "float32", "--additional-config", '{"dsv41": {"exact": true}}',
    "--max-model-len", "2048", "--max-num-seqs", "64", "--kv-cache-memory-bytes", "128M",
    "--block-size", "16", "--reasoning-parser", "deepseek_v41", "--enable-prompt-tokens-details",
    "--tool-call-parser", "deepseek_v41", "--enable-auto-tool-choice", "--no-swa-bounded-replay",
)  # fmt: skip


@pytest.fixture(scope="session")
def server(checkpoint, tmp_path_factory):
    from tests.e2e.server.harness import serving

    with serving(checkpoint, tmp_path_factory.mktemp("log") / "server.log", *FLAGS) as running:
        yield running


@pytest.fixture(scope="session")
def client(server):
    return server.client()


@pytest.fixture(scope="session")
def words(checkpoint):
    from tests.e2e.server.harness import Words

    return Words(checkpoint)


@pytest.fixture
def prompt(words, run_rng):
    """A function: length -> that many random ids of plain text, other ones on every call."""
    return lambda length: [run_rng.choice(words.plain) for _ in range(length)]
