# SPDX-License-Identifier: Apache-2.0
"""The whole model on its Triton kernels, under Triton's interpreter, against the plain ops.

Run as a program, with the interpreter, this file writes the logits of a case that another file holds.
"""

import sys

import pytest
import torch

from deepseek_v41_plugin.cli.tiny import write_tiny
from deepseek_v41_plugin.kernels.registry import OPS
from deepseek_v41_plugin.model.prepare import prepare
from tests.core import load_core, load_core_draft, random_ids
from tests.interpreted import answers_of
from tests.pager import Pager

# Sizes that every kernel takes; window 8, 4 rows chosen, candidates beyond 8 rows.
SIZES = {"moe_intermediate_size": 128}
# Ops that the prepared model runs and that have a twin.
TWINS = {
    "attend", "group_linear", "index_select", "latent_pair_latents", "latent_write_record", "mhc_enter", "mhc_last", "mhc_leave", "mhc_turn",
    "moe_experts", "moe_route", "norm_rows", "quantize_rows", "row_linear", "swiglu_rows", "wide_linear",
}


def answer(case: dict, cache: str) -> dict:
    """Prompts in one step, then steps of 1 to 3 rows, then a block from the draft."""
    model, draft = load_core(case["folder"], torch.bfloat16, cache=cache), load_core_draft(case["folder"], torch.bfloat16, cache=cache)
    assert prepare(model, force=True) and prepare(draft, force=True)
    host, logits = Pager(model, len(case["prompts"]), 48, 8, case["seed"], draft), []
    for step in (case["prompts"], *case["steps"]):
        logits += host.run(step).values()
    blocks = host.propose({r: ids[0] for r, ids in case["prompts"].items()}, 3)
    return {"logits": torch.cat(logits), "block": torch.cat([x for x, _ in blocks.values()])}


@pytest.fixture(scope="module")
def case(run_seed, tmp_path_factory):
    folder = write_tiny(tmp_path_factory.mktemp("triton") / "tiny", preset="tiny", seed=run_seed, overrides=SIZES)
    import random

    rng, cfg = random.Random(run_seed), load_core(folder).cfg
    prompts = {r: random_ids(rng, cfg, length) for r, length in enumerate((21, 1, 6))}
    steps = [{r: random_ids(rng, cfg, rng.randrange(1, 4)) for r in prompts} for _ in range(2)]
    return {"folder": folder, "prompts": prompts, "steps": steps, "seed": rng.randrange(1 << 30)}


@pytest.mark.parametrize("cache", ["auto", "fp8_ds_mla"])
def test_twins(case, tmp_path, cache):
    """As far from float64 as the plain ops in bf16, whose roundings differ here and there; every twin ran."""
    got, plain = answers_of(__file__, case | {"cache": cache}, tmp_path), answer(case, cache)
    assert got.pop("ran") == TWINS
    exact, draft = load_core(case["folder"], cache=cache), load_core_draft(case["folder"], cache=cache)
    host = Pager(exact, len(case["prompts"]), 48, 8, case["seed"], draft)
    truth = {"logits": torch.cat([x for step in (case["prompts"], *case["steps"]) for x in host.run(step).values()])}
    truth["block"] = torch.cat([x for x, _ in host.propose({r: ids[0] for r, ids in case["prompts"].items()}, 3).values()])
    for name, x in got.items():
        assert x.isfinite().all() and x.shape == truth[name].shape
        error, usual = ((y.double() - truth[name]).abs().median() for y in (x, plain[name]))
        assert error < 2 * usual, (name, error, usual)


def main(case_file: str, answer_file: str) -> None:
    """With the first twin of every op, and notes of which ran."""
    ran, case = set(), torch.load(case_file, weights_only=False)

    def chosen(op):
        impl = op.impls[0]
        if impl.name == "torch":
            return impl

        def run(*args, **kwargs):
            ran.add(op.name)
            return impl.fn(*args, **kwargs)

        return type(impl)(impl.name, run, impl.supported)

    for op in OPS.values():
        op.choose = lambda device, impl=chosen(op): impl
    torch.save(answer(case, case["cache"]) | {"ran": ran}, answer_file)


if __name__ == "__main__":
    main(*sys.argv[1:])
