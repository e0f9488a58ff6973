# SPDX-License-Identifier: Apache-2.0
"""Buffers in shared memory, and what is checked before any are made."""

import os
import threading
import types

import numpy as np
import pytest
import torch
import torch.distributed as dist

from deepseek_v41_plugin.eplb.board import Board
from deepseek_v41_plugin.eplb.transport import TransportError, layout, same_weights, shm, symm_mem, views

FOREVER = 600.0


def together(ranks: int, call, store=None):
    """What `call(board)` returns or raises on each of `ranks` threads."""
    store = store or dist.HashStore()
    out = [None] * ranks

    def run(rank):
        try:
            out[rank] = call(Board(store, "model", rank, ranks))
        except Exception as error:
            out[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return out


def layer(local: int = 3) -> list[torch.Tensor]:
    return [
        torch.zeros(local, 5, 7, dtype=torch.uint8), torch.zeros(local, 3, dtype=torch.bfloat16),
        torch.zeros(local, 2, 2, dtype=torch.float8_e8m0fnu), torch.zeros(local),
    ]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where the files of this test are."""
    monkeypatch.setattr(shm, "FOLDER", tmp_path)
    return tmp_path


def test_views_lie_apart(rng):
    tensors = layer()
    starts, size = layout(tensors)
    assert all(start % 256 == 0 for start in starts)
    flat = torch.zeros(size, dtype=torch.uint8)
    parts = views(flat, tensors)
    assert [(part.shape, part.dtype) for part in parts] == [(tensor.shape, tensor.dtype) for tensor in tensors]
    for part in parts:
        part.view(torch.uint8).fill_(1)
    assert flat.sum() == sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_push_arrives(rng, folder, ranks):
    local = int(rng.integers(1, 5))
    peers = together(ranks, lambda board: shm.SharedMemory.open(board, layer(local), FOREVER))
    assert not list(folder.iterdir()), "files are left"
    sent = {}
    for rank in range(ranks):
        for peer in range(ranks):
            for i, tensor in enumerate(peers[rank].tensors(peer)):
                row = (rank + peer) % local
                size = tensor[row].numel() * tensor.element_size()
                src = torch.from_numpy(rng.integers(0, 100, size).astype(np.uint8)).view(tensor.dtype).view(tensor[row].shape)
                peers[rank].push(tensor[row], src)
                sent[peer, i, row] = src
        peers[rank].flush()
    for (peer, i, row), src in sent.items():
        for rank in range(ranks):  # all see the same memory
            assert torch.equal(peers[rank].tensors(peer)[i][row : row + 1].view(torch.uint8), src[None].view(torch.uint8))
    kept = peers[0].tensors(0)[0]
    for buffers in peers:
        buffers.wait(buffers.record())
        buffers.close()
        buffers.close()
    kept.fill_(1)  # a tensor that is still held is still there


def test_a_full_folder_is_said_on_all_ranks(folder, monkeypatch):
    create = shm._create
    made = []

    def full(path, size):
        made.append(path)
        if len(made) == 2:
            raise OSError(28, "No space left on device")
        return create(path, size)

    monkeypatch.setattr(shm, "_create", full)
    errors = together(3, lambda board: shm.SharedMemory.open(board, layer(), FOREVER))
    assert all(isinstance(error, TransportError) for error in errors)
    assert len({str(error) for error in errors}) == 1 and "No space left on device. Give the container more" in str(errors[0])
    assert not list(folder.iterdir())


def test_another_machine_is_said_on_all_ranks(folder, monkeypatch):
    attach = shm._attach

    def elsewhere(path, size):
        if threading.current_thread().name == "far":
            raise FileNotFoundError(2, "No such file or directory")
        return attach(path, size)

    def call(board):
        if board.rank == 1:
            threading.current_thread().name = "far"
        return shm.SharedMemory.open(board, layer(), FOREVER)

    monkeypatch.setattr(shm, "_attach", elsewhere)
    errors = together(3, call)
    assert {str(error) for error in errors} == {
        "rank 1 cannot map the memory of rank 0: No such file or directory. Are they on one machine?"}
    assert not list(folder.iterdir())


def test_a_rank_that_does_not_come_leaves_no_file(folder):
    store = dist.HashStore()
    with pytest.raises(TransportError, match="nothing from rank 1"):
        shm.SharedMemory.open(Board(store, "model", 0, 2), layer(), 0.0)
    with pytest.raises(TransportError, match="nothing from rank 1"):  # too late
        shm.SharedMemory.open(Board(store, "model", 1, 2), layer(), FOREVER)
    assert not list(folder.iterdir())


def test_survivors_remove_the_files_of_the_dead(folder):
    """Rank 1 is gone between its allocation and its mapping."""
    store = dist.HashStore()
    other = Board(store, "model", 1, 2)
    (folder / "dsv41-eplb-dead").write_bytes(bytes(4096))
    other.publish(("shm", 1), b"+dsv41-eplb-dead")
    with pytest.raises(TransportError, match="shm mapped: nothing from rank 1"):
        shm.SharedMemory.open(Board(store, "model", 0, 2), layer(), 0.0)
    assert not list(folder.iterdir())


@pytest.mark.parametrize("change,text", [
    (lambda w: w.pop(), "rank 1, layers: 1, but rank 0 has 2"),
    (lambda w: [tensors.pop() for tensors in w], "rank 1, tensors: 3, but rank 0 has 4"),
    (lambda w: [tensors.__setitem__(3, tensors[3].double()) for tensors in w], "rank 1, tensor 3: ['float64', 3], but rank 0 has ['float32', 3]"),
    (lambda w: [tensors.__setitem__(i, t[:2].contiguous()) for tensors in w for i, t in enumerate(tensors)], "rank 1, tensor 0: ['uint8', 2, 5, 7]"),
    (lambda w: w[1].__setitem__(0, w[1][0][:, :4].contiguous()), "rank 1: layer 1 has"),
    (lambda w: w[1].__setitem__(0, w[1][0].transpose(1, 2).contiguous().transpose(1, 2)), "rank 1: layer 1, tensor 0 is not contiguous"),
    (lambda w: w.clear(), "rank 1: no layers"),
])
def test_unequal_weights_are_refused_by_all(change, text):
    def call(board):
        weights = [layer(), layer()]
        if board.rank == 1:
            change(weights)
        same_weights(board, weights, FOREVER)

    errors = together(3, call)
    assert all(isinstance(error, TransportError) and text in str(error) for error in errors), errors
    assert len({str(error) for error in errors}) == 1


def test_equal_weights_pass():
    assert together(3, lambda board: same_weights(board, [layer(), layer()], FOREVER)) == [None] * 3


def test_where_a_transport_works():
    assert shm.supported(layer()) == (True, "")
    assert not shm.supported([torch.zeros(1, device="meta")])[0]
    ok, why = symm_mem.supported(layer())
    assert not ok and "CUDA" in why


def test_symmetric_memory_is_refused_by_all_where_one_cannot():
    errors = together(2, lambda board: symm_mem.SymmetricMemory.open(board, layer(), None, FOREVER))
    assert {str(error) for error in errors} == {"rank 0: symmetric memory holds tensors of one CUDA device only"}
    assert all(isinstance(error, TransportError) for error in errors)


def test_a_gpu_for_each_rank(monkeypatch):
    gpus = iter(["a", "b", "a", "a", "b"])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid=next(gpus)))
    monkeypatch.delenv(symm_mem.SHARE_ONE_GPU, raising=False)
    assert together(2, lambda board: symm_mem._agree(board, layer(), "", FOREVER)) == [None] * 2
    errors = together(3, lambda board: symm_mem._agree(board, layer(), "", FOREVER))
    assert len({str(error) for error in errors}) == 1 and "has a GPU that another rank has, too" in str(errors[0])
    monkeypatch.setenv(symm_mem.SHARE_ONE_GPU, "1")
    gpus = iter("aa")
    assert together(2, lambda board: symm_mem._agree(board, layer(), "", FOREVER)) == [None] * 2


def test_the_environment_is_left_as_it_was(monkeypatch):
    first, second = symm_mem.RENDEZVOUS
    monkeypatch.setenv(first, "before")
    monkeypatch.delenv(second, raising=False)
    with pytest.raises(ZeroDivisionError), symm_mem._environment(symm_mem.RENDEZVOUS):
        assert os.environ[first] == os.environ[second] == "1"
        1 / 0
    assert os.environ[first] == "before" and second not in os.environ
