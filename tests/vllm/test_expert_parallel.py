# SPDX-License-Identifier: Apache-2.0
"""Rows of two data parallel ranks through the experts of both, in two processes over gloo."""

from queue import Empty
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from deepseek_v41_plugin.kernels import invariant
from deepseek_v41_plugin.model.loading import fill_parameters
from deepseek_v41_plugin.model.moe import MoE
from deepseek_v41_plugin.model.parameters import Hidden
from deepseek_v41_plugin.model.settings import ExpertRanks, Settings
from deepseek_v41_plugin.vllm import expert_parallel

RANKS, EXPERTS, TOP_K = 2, 6, 3
# As much of a config as a MoE reads.
CFG = SimpleNamespace(
    hidden_size=64, moe_intermediate_size=32, n_shared_experts=1, swiglu_limit=7.0, routed_scaling_factor=1.5, gate_temp=1.0,
)


def moe_of(settings: Settings, seed: int) -> MoE:
    """Random weights, the same experts whichever ranks hold them."""
    whole = MoE(CFG, Settings(settings.dtype, batch_invariant=settings.batch_invariant), EXPERTS, TOP_K)
    fill_parameters(whole, seed)
    if settings.experts is None:
        return whole
    part = MoE(CFG, settings, EXPERTS, TOP_K)
    state = whole.state_dict()
    for name in ("w13", "w13_scale", "w2", "w2_scale"):
        state[f"experts.{name}"] = state[f"experts.{name}"][part.experts.loaded]
    part.load_state_dict(state)
    return part


def rank_main(rank: int, folder: str, jobs: list, answers) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    group = SimpleNamespace(rank_in_group=rank, world_size=RANKS, cpu_group=dist.group.WORLD, device_group=dist.group.WORLD)
    expert_parallel.get_dp_group = expert_parallel.get_ep_group = lambda: group
    rows = expert_parallel.Rows()
    ranks = ExpertRanks(rank, RANKS, 2, rows.begin, rows.gather, expert_parallel.sum_over(lambda: group))
    out = []
    with torch.inference_mode():
        for dtype, together, seed, inputs in jobs:
            layer = moe_of(Settings(dtype, batch_invariant=together, experts=ranks), seed)
            rows.begin(len(inputs[rank]))
            with invariant.switched(together):
                out.append(layer(Hidden(inputs[rank])))
    answers.put((rank, [x.numpy() for x in out]))
    dist.barrier()
    dist.destroy_process_group()


def run(folder, jobs: list) -> list[list[torch.Tensor]]:
    """What each rank answers to each job."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    processes = multiprocessing.spawn(rank_main, (str(folder), jobs, answers), RANKS, join=False)
    got = {}
    while len(got) < RANKS:
        try:
            rank, out = answers.get(timeout=0.5)
        except Empty:
            processes.join(timeout=0)  # raises what a rank raised
        else:
            got[rank] = out
    while not processes.join():
        pass
    return [[torch.from_numpy(x) for x in got[rank]] for rank in range(RANKS)]


def test_rows_of_two_ranks(run_rng, tmp_path):
    """As one rank with all experts, whatever rows the ranks have, none included; bit for bit when it is to be so."""
    seed, generator = run_rng.randrange(1 << 30), torch.Generator().manual_seed(run_rng.randrange(1 << 30))

    def rows(count: int, dtype) -> torch.Tensor:
        return torch.randn(count, CFG.hidden_size, generator=generator, dtype=torch.float64).to(dtype)

    counts = [(3, 5), (1, 0), (0, 4), (0, 0), (run_rng.randint(0, 20), run_rng.randint(0, 20))]
    exact = [(torch.float64, False, seed, [rows(n, torch.float64) for n in pair]) for pair in counts]
    x, others = rows(4, torch.float32), rows(9, torch.float32)
    bits = [(torch.float32, True, seed, inputs) for inputs in ([x, others], [others, x], [x[:1], x[1:]])]
    got = run(tmp_path, exact + bits)

    whole = moe_of(Settings(torch.float64), seed)
    for job, (_, _, _, inputs) in enumerate(exact):
        for rank in range(RANKS):
            assert got[rank][job].shape == inputs[rank].shape
            if len(inputs[rank]):
                torch.testing.assert_close(got[rank][job], whole(Hidden(inputs[rank])), rtol=1e-12, atol=1e-12)
    at = len(exact)
    assert torch.equal(got[0][at], got[1][at + 1]), "a row's bits depend on whose it is"
    assert torch.equal(got[0][at], torch.cat((got[0][at + 2], got[1][at + 2]))), "a row's bits depend on those beside it"
