# SPDX-License-Identifier: Apache-2.0
"""Rebalancers over symmetric memory: a GPU for each rank where there are enough, else they share."""

import pytest
import torch
import torch.distributed as dist

from deepseek_v41_plugin.eplb.board import Board
from deepseek_v41_plugin.eplb.transport import TransportError
from deepseek_v41_plugin.eplb.transport.symm_mem import SymmetricMemory, supported
from tests.eplb.band import Band, hang_and_go_on


@pytest.mark.parametrize("ranks,wait", [(2, False), (2, True), (4, False)])
def test_processes(run_rng, ranks, wait):
    """Every byte of every slot in every step, over three rebalances."""
    with Band(ranks, run_rng.getrandbits(32), wait, cuda=True) as band:
        for generation in range(1, 4):
            band.play("begin")
            band.until_idle()
            assert all(band.said[rank][1:3] == [generation, 0] for rank in range(ranks)), band.said


def test_a_late_rank(run_rng):
    with Band(2, run_rng.getrandbits(32), hang=1, cuda=True) as band:
        hang_and_go_on(band, 1)


@pytest.fixture
def alone():
    """A group of one, in this process."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield Board(store, "model", 0, 1), dist.group.WORLD
    dist.destroy_process_group()


def test_a_push_is_no_kernel(alone):
    """Copies go to the copy engines: the profiler sees memory copies and no kernel."""
    board, group = alone
    layer = [torch.zeros(2, 1 << 20, dtype=torch.uint8, device="cuda"), torch.zeros(2, 3, dtype=torch.float8_e8m0fnu, device="cuda")]
    buffers = SymmetricMemory.open(board, layer, group)
    source = [torch.full_like(tensor.view(torch.uint8), 7).view(tensor.dtype) for tensor in layer]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for dst, src in zip(buffers.tensors(0), source):
            buffers.push(dst[1], src[0])
        buffers.flush()
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert names and all("Memcpy" in name for name in names), names
    for dst, src in zip(buffers.tensors(0), source):
        assert torch.equal(dst[1].view(torch.uint8), src[0].view(torch.uint8)) and not dst[0].view(torch.uint8).any()


def test_refusals(alone, monkeypatch):
    board, group = alone
    assert supported([torch.zeros(1, device="cuda")]) == (True, "")
    ok, why = supported([torch.zeros(1), torch.zeros(1, device="cuda")])
    assert not ok and "one CUDA device" in why
    with pytest.raises(TransportError, match="the group's rank 0 of 1 is the board's 0 of 2|nothing from rank 1"):
        SymmetricMemory.open(Board(dist.HashStore(), "other", 0, 2), [torch.zeros(1, device="cuda")], group, 0.0)
    from torch._C._distributed_c10d import _SymmetricMemory

    def full(*args):
        raise RuntimeError("CUDA driver error: out of memory\nat somewhere")

    monkeypatch.setattr(_SymmetricMemory, "empty_strided_p2p", full)
    with pytest.raises(TransportError, match="rank 0: 256 bytes of symmetric memory: CUDA driver error: out of memory. Lower"):
        SymmetricMemory.open(Board(dist.HashStore(), "third", 0, 1), [torch.zeros(1, device="cuda")], group)
