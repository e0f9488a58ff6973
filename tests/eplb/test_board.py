# SPDX-License-Identifier: Apache-2.0
"""The board over torch's stores: first decision, what is missing, what is forgotten."""

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from deepseek_v41_plugin.eplb.board import Board, BoardLost, Missing


@pytest.fixture(params=["hash", "tcp", "file", "prefix"])
def store(request, tmp_path):
    if request.param == "hash":
        return dist.HashStore()
    if request.param == "file":
        return dist.FileStore(str(tmp_path / "store"), 2)
    tcp = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    return tcp if request.param == "tcp" else dist.PrefixStore("group", tcp)


def test_messages(store, run_rng):
    one, two = (Board(store, "model", rank, 2) for rank in range(2))
    value = run_rng.randbytes(1000) + b"\0"
    assert one.read((3, "load", 0)) is None and not one.has((3, "load", 0))
    two.publish((3, "load", 1), value)
    assert two.has((3, "load", 1))  # a TCP store does not acknowledge what is set: an answer shows that it is there
    assert one.read((3, "load", 1)) == value
    assert one.missing([(3, "load", 0), (3, "load", 1)]) == [0]
    assert not one.has((3, "load", 0), (3, "load", 1))
    assert Board(store, "draft", 0, 2).read((3, "load", 1)) is None


def test_the_first_decision_stands(store):
    boards = [Board(store, "model", rank, 4) for rank in range(4)]
    start, said = threading.Barrier(4), [b""] * 4

    def decide(rank):
        start.wait()
        said[rank] = boards[rank].decide((1, 0, "decision"), f"rank {rank}".encode())

    threads = [threading.Thread(target=decide, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(said)) == 1 and said[0] in {f"rank {rank}".encode() for rank in range(4)}
    assert boards[0].decide((1, 0, "decision"), b"later") == boards[1].read((1, 0, "decision")) == said[0]


def test_old_generations_are_forgotten(run_rng):
    store = dist.HashStore()
    boards = [Board(store, "model", rank, 2) for rank in range(2)]
    for generation in (4, 9):
        for rank, board in enumerate(boards):
            board.publish((generation, 0, "load", rank), b"x")
            board.decide((generation, 0, "decision"), b"x")
    for board in boards:
        board.publish(("weights", board.rank), b"x")
        board.forget(9)
    assert not any(boards[0].has((4, 0, *key)) for key in (("load", 0), ("load", 1), ("decision",)))
    assert boards[0].has((9, 0, "load", 0), (9, 0, "load", 1), (9, 0, "decision"), ("weights", 0), ("weights", 1))


def test_gather(store):
    boards = [Board(store, "model", rank, 2) for rank in range(2)]
    other = threading.Thread(target=boards[1].gather, args=("start", b"one", 600))
    other.start()
    assert boards[0].gather("start", b"\0zero", 600) == [b"\0zero", b"one"]
    other.join()


def test_gather_names_the_missing_and_all_agree(store):
    boards = [Board(store, "model", rank, 4) for rank in range(4)]
    boards[2].publish(("start", 2), b"")
    assert boards[2].has(("start", 2))
    with pytest.raises(Missing, match="rank 1, 3 in 0 s") as caught:
        boards[0].gather("start", b"", 0)
    assert caught.value.ranks == (1, 3)
    with pytest.raises(Missing, match="rank 1, 3"):  # though nobody waits for it, and it has all
        boards[3].publish(("start", 1), b"")
        boards[3].gather("start", b"", 600)


def test_a_lost_store_is_said():
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, None, False, timeout=timedelta(seconds=100))
    board = Board(client, "model", 0, 1, timeout=100.0)
    board.publish((0, "x", 0), b"")
    del server, client
    for request in (lambda: board.has((0, "x", 0)), lambda: board.decide((0, "y"), b"v"), lambda: board.publish((0, "x", 0), b"")):
        with pytest.raises(BoardLost, match="rebalancer model"):
            request()
    board.forget(9)  # nothing to do about it
