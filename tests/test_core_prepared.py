# SPDX-License-Identifier: Apache-2.0
"""Weights as FP8 tensor cores take them, with the plain ops: as near to the reference as the checkpoint's own form."""

import pytest
import torch

from deepseek_v41_plugin.cli.tiny import write_tiny
from deepseek_v41_plugin.model.loading import load_checkpoint
from deepseek_v41_plugin.model.parameters import Fp8Linear, GroupLinear
from deepseek_v41_plugin.model.prepare import prepare, why_plain
from deepseek_v41_plugin.model.settings import Settings
from tests.core import load_core, load_core_draft, random_ids
from tests.pager import Pager
from tests.reference import ReferenceModel

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(run_seed, tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("prepared") / "tiny", preset="tiny", seed=run_seed)


def logits(model, draft, prompts: list[list[int]], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of all prompts' rows, and of a block that the draft proposes behind each."""
    host = Pager(model, len(prompts), 64, 16, seed, draft)
    rows = host.run(dict(enumerate(prompts)))
    blocks = host.propose({r: ids[0] for r, ids in enumerate(prompts)}, 3)
    return torch.cat([rows[r] for r in rows]).double(), torch.cat([blocks[r][0] for r in blocks]).double()


def test_prepared(folder, run_rng):
    """bf16 activations round more than any form of the weights does: both forms are as far from float64."""
    prompts = [random_ids(run_rng, load_core(folder).cfg, length) for length in (40, 1, 9)]
    seed = run_rng.randrange(1 << 30)
    exact, exact_blocks = logits(load_core(folder), load_core_draft(folder), prompts, seed)
    want = torch.cat([ReferenceModel(folder).logits(ids) for ids in prompts])
    assert torch.allclose(exact, want, rtol=0, atol=1e-9)
    models = [load_core(folder, torch.bfloat16), load_core_draft(folder, torch.bfloat16)]
    plain, plain_blocks = logits(*models, prompts, seed)
    for model in models:
        assert prepare(model, force=True)
        linears = [m for m in model.modules() if isinstance(m, Fp8Linear)]
        assert all(m.row is not None for m in linears)
        assert all(m.words is not None for m in model.modules() if isinstance(m, GroupLinear))
    first = models[0].layers[0].attn
    assert first.joined.q.data_ptr() == first.wq_a.weight.data_ptr() == first.wq_a.row.q.data_ptr()
    got, got_blocks = logits(*models, prompts, seed)
    for mine, other, truth in ((got, plain, exact), (got_blocks, plain_blocks, exact_blocks)):
        assert not torch.equal(mine, other)
        error, usual = ((x - truth).abs().median() for x in (mine, other))
        assert error < 2 * usual, (error, usual)


def addresses(model) -> dict[str, int]:
    """Of all that a forward reads."""
    found = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    for name, module in model.named_modules():
        for what in ("row", "joined", "words", "parts"):
            held = getattr(module, what, None)
            for i, tensor in enumerate(held if isinstance(held, tuple) else (held,)):
                if tensor is not None:
                    found[f"{name}.{what}.{i}"] = tensor.data_ptr()
    return found


def test_loading_again(folder, run_rng):
    """A host that wakes up loads into the same tensors, which lie in another order by then."""
    model, ids = load_core(folder, torch.bfloat16), random_ids(run_rng, load_core(folder).cfg, 20)
    prepare(model, force=True)
    want, held = Pager(model, 1, 64, 16, 1).run({0: ids})[0], addresses(model)
    assert len(held) > 100
    load_checkpoint(model, folder)
    prepare(model, force=True)
    assert addresses(model) == held, "graphs read where the weights were"
    assert torch.equal(Pager(model, 1, 64, 16, 1).run({0: ids})[0], want)


def test_why_plain(folder):
    for settings, text in (
        (Settings(), "row_linear runs as torch on cpu"), (Settings(torch.float32), "activations are float32"),
        (Settings(activation_quant=False), "activation_quant is off"), (Settings(batch_invariant=True), "batch-invariant"),
    ):
        assert why_plain(settings, CPU).startswith(text.split(",")[0]) or text in why_plain(settings, CPU)
    assert not prepare(load_core(folder, torch.bfloat16))
