# SPDX-License-Identifier: Apache-2.0
"""Row and block choice against brute force over Python lists, on scores full of ties."""

import torch

from deepseek_v41_plugin.kernels import indexer
from deepseek_v41_plugin.kernels.paging import read_rows, slots_of, write_rows

MINUS = float("-inf")


def brute_rows(score: list[float], k: int) -> list[int]:
    order = sorted((j for j, s in enumerate(score) if s > MINUS), key=lambda j: (-score[j], j))[:k]
    return sorted(order) + [-1] * (k - len(order))


def brute_blocks(score: list[float], visible: int, k: int, size: int) -> set[int]:
    blocks = {}
    for j, s in enumerate(score):
        blocks[j // size] = max(blocks.get(j // size, MINUS), s)
    if visible:
        blocks[(visible - 1) // size] = float("inf")
    best = sorted((b for b, s in blocks.items() if s > MINUS), key=lambda b: (-blocks[b], b))[:k]
    return set(best)


def test_best_rows_and_blocks(run_rng):
    for _ in range(60):
        n, k, size = run_rng.randrange(1, 40), run_rng.randrange(1, 12), run_rng.randrange(1, 6)
        kept_blocks = run_rng.randrange(1, 6)
        visible = [run_rng.randrange(0, n + 1) for _ in range(4)]
        score = torch.tensor([[float(run_rng.randrange(3)) if j < v else MINUS for j in range(n)] for v in visible])
        rows = indexer.best_rows(score, k)
        kept = indexer.best_blocks(score, torch.tensor(visible), kept_blocks, size)
        assert rows.shape == (4, k) and kept.shape == (4, n)
        for t, v in enumerate(visible):
            assert rows[t].tolist() == brute_rows(score[t].tolist(), k)
            want = brute_blocks(score[t].tolist(), v, kept_blocks, size)
            assert [j // size in want for j in range(n)] == kept[t].tolist()


def test_scores(run_rng):
    torch.manual_seed(run_rng.randrange(1 << 30))
    q, w, keys = torch.randn(5, 3, 8).double(), torch.randn(5, 3).double(), torch.randn(11, 8).double()
    visible = torch.tensor([0, 1, 5, 11, 7])
    got = indexer.scores(q, w, keys, visible)
    for t in range(5):
        for j in range(11):
            want = sum(w[t, h] * max(float(q[t, h] @ keys[j]), 0) for h in range(3)) if j < visible[t] else MINUS
            assert abs(float(got[t, j]) - float(want)) < 1e-12 or got[t, j] == want


class Bytes:
    """A record of raw bytes, to look at addressing alone."""

    def decode(self, record, dtype):
        return record.to(dtype)


def test_rows_land_where_the_table_says(run_rng):
    states, blocks = run_rng.choice([1, 4, 16]), 9
    cache = torch.zeros(blocks, states, 2, dtype=torch.uint8)
    table = torch.tensor([run_rng.sample(range(1, blocks), 3) for _ in range(2)], dtype=torch.int32)
    rows = torch.tensor([[0, 3 * states - 1, -1], [states, 1 % states, 2 * states]])
    slots = slots_of(table, torch.tensor([1, 0]), rows, states)
    for i, request in enumerate((1, 0)):
        for j, row in enumerate(rows[i].tolist()):
            want = -1 if row < 0 else int(table[request, row // states]) * states + row % states
            assert slots[i, j] == want
    write_rows(cache, slots[0], torch.tensor([[7, 8], [9, 10], [11, 12]]))
    got = read_rows(cache, slots[0], Bytes(), torch.float32)
    assert got[0].tolist() == [7, 8] and got[1].tolist() == [9, 10]
    assert got[2].tolist() == [0, 0], "a dropped row reads as zeros"
    assert not cache[1:].sum() - 34, "a dropped row writes to the null block alone"
