# SPDX-License-Identifier: Apache-2.0
"""The core on a GPU: the float64 reference's logits, in both cache formats, however the rows are cut."""

import pytest
import torch

from deepseek_v41_plugin.cli.tiny import write_tiny
from deepseek_v41_plugin.kernels.registry import OPS
from tests.core import load_core
from tests.pager import Pager
from tests.reference import ReferenceModel

# float64 on both sides; exp and log differ in the last bits between devices.
BOUND = 1e-7


@pytest.fixture(scope="module")
def folder(run_seed, tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("cuda") / "tiny", preset="tiny", seed=run_seed)


@pytest.mark.parametrize(("cache", "kv_format"), [("auto", "v41"), ("fp8_ds_mla", "v4")])
def test_random_chunks_equal_the_reference(folder, run_rng, cache, kv_format):
    reference = ReferenceModel(folder, kv_format=kv_format)
    model = load_core(folder, device="cuda", cache=cache)
    host = Pager(model, 4, 96, 16, run_rng.randrange(1 << 30))
    prompts = {r: [run_rng.randrange(3, 250) for _ in range(run_rng.randrange(20, 90))] for r in range(4)}
    parts: dict[int, list] = {r: [] for r in prompts}
    done = dict.fromkeys(prompts, 0)
    while any(done[r] < len(prompts[r]) for r in prompts):
        chunks = {}
        for r, ids in prompts.items():
            n = run_rng.choice([1, 1, 2, 3, 7, 17])
            if chunk := ids[done[r] : done[r] + n]:
                chunks[r] = chunk
                done[r] += len(chunk)
        for r, logits in host.run(chunks).items():
            parts[r].append(logits.cpu())
    for r, ids in prompts.items():
        assert (torch.cat(parts[r]) - reference.logits(ids)).abs().max() < BOUND


def test_every_op_has_an_implementation_here():
    import deepseek_v41_plugin.model.model  # noqa: F401  registers the ops

    assert OPS
    for op in OPS.values():
        assert op.choose(torch.device("cuda")).name


def test_the_reference_itself_agrees_across_devices(folder, run_rng):
    ids = [run_rng.randrange(3, 250) for _ in range(60)]
    here, there = ReferenceModel(folder), ReferenceModel(folder, device="cuda")
    assert (there.logits(ids).cpu() - here.logits(ids)).abs().max() < BOUND
