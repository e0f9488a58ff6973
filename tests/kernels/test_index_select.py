# SPDX-License-Identifier: Apache-2.0
"""Choice of compressed rows: the plain form against loops, Triton's form against the plain one.

Run as a program, with Triton's interpreter, this file answers the cases of one file into another.  Values are small
multiples of powers of two, so that all sums are exact in float32: choices must be equal, ties included.
"""

import math
import random
import sys

import pytest
import torch

from deepseek_v41_plugin.kernels import indexer
from deepseek_v41_plugin.kernels.formats.records import Fp8IndexRecord, IndexRecord
from deepseek_v41_plugin.kernels.indexer import reference
from deepseek_v41_plugin.kernels.paging import Paged
from tests.interpreted import answers_of

CPU = torch.device("cpu")
GRID = (-3.0, -2.0, -1.5, -1.0, -0.5, 0.0, 0.0, 0.5, 1.0, 2.0, 3.0, 4.0)
POISON = 2_000_000_007  # above any score as ordered bits, and no id


def values(rng, *shape: int) -> torch.Tensor:
    """Numbers that both records keep as they are."""
    g = torch.Generator().manual_seed(rng.randrange(1 << 30))
    return torch.tensor(GRID)[torch.randint(len(GRID), shape, generator=g)]


def quarter_turns(rng, rope: int) -> torch.Tensor:
    """Frequencies at which RoPE only swaps and negates."""
    return torch.tensor([rng.randrange(-2, 3) * math.pi / 2 for _ in range(rope // 2)], dtype=torch.float64)


def pages(rng, keys: list[torch.Tensor], record, states: int) -> Paged:
    """Keys [n, d] of each request in scattered blocks; what holds no key is NaN, what the table does not need is far outside."""
    need = [-(-len(k) // states) for k in keys]
    ids = rng.sample(range(1, sum(need) + 2), sum(need))
    pad = rng.choice([0, 4, 16]) if record.width % 4 == 0 else rng.randrange(9)
    cache = torch.full((sum(need) + 2, states * record.width + pad), 0xFF, dtype=torch.uint8)
    cache = cache[:, : states * record.width].unflatten(1, (states, record.width))
    table = torch.full((len(keys), max(need) + 1), 1 << 30, dtype=torch.int32)
    for r, k in enumerate(keys):
        raw = record.encode(k)
        for b in range(need[r]):
            block = table[r, b] = ids.pop()
            part = raw[b * states : (b + 1) * states]
            cache[block, : len(part)] = part
    return Paged(cache, table, states)


def random_case(
    rng, rows: list[int], visible: list[int], *, heads: int = 4, dim: int = 32, rope: int = 16, topk: int = 4, ratio: int = 1, fp8: bool = False,
    candidates: tuple[int, int] | None = None, restricted: bool = False, padding: int = 0, states: int = 4, dtype=torch.bfloat16, config: dict | None = None,
) -> dict:
    """Requests of rows[r] rows, of which the last sees visible[r] keys."""
    record = (Fp8IndexRecord if fp8 else IndexRecord)(dim)
    keys = pages(rng, [values(rng, max(v, 1), dim) for v in visible], record, states)
    count, requests = sum(rows), len(rows)
    positions, req = [], []
    for r, (n, v) in enumerate(zip(rows, visible, strict=True)):
        last = v * ratio + rng.randrange(ratio) - 1
        positions += [max(last - n + 1 + i, -1) for i in range(n)]
        req += [r] * n
    positions += [rng.choice([-1, 0, 5, 1 << 20]) for _ in range(padding)]
    req += [requests] * padding
    total = count + padding
    case = {
        "q": values(rng, total, heads, dim).to(dtype), "weights": values(rng, total, heads) / 4, "positions": torch.tensor(positions, dtype=torch.int64),
        "freq": quarter_turns(rng, rope), "req": torch.tensor(req, dtype=torch.int64),
        "first": torch.tensor([sum(rows[:r]) for r in range(requests + 1)], dtype=torch.int64),
        "keys": keys, "record": record, "ratio": ratio, "topk": topk, "bound": max(*visible, 1) + rng.choice([0, 1, 7]),
        "candidates": candidates, "allowed": None, "most_rows": max(rows, default=1) + rng.choice([0, 0, 3]),
    }
    if restricted:
        source = case | {"q": values(rng, total, heads, dim), "weights": values(rng, total, heads)}
        case["allowed"] = reference.select(**source)[1]
    small = {"rows": (1, 2, 4, 8), "keys": (16, 32), "programs": (1, 4, 9), "chunk": (32, 64), "workspace": (1, 600, 1 << 20)}
    small = {name: rng.choice(some) for name, some in small.items()}
    return case | {"config": small | (config or {})}


def random_cases(rng) -> dict[str, dict]:
    """Few rows in all: the interpreter is slow."""
    def lengths(n, top=75):
        return [rng.choice([0, 1, 3, 4, 5, 15, 16, 17, 31, 32, 33, rng.randrange(1, top)]) for _ in range(n)]

    tiny = {"candidates": (4, 2)}
    few = [rng.randrange(5) * (rng.random() < 0.03) for _ in range(600)]
    real = {"heads": 32, "dim": 128, "rope": 64, "topk": 16, "states": 64, "config": {"keys": 64, "rows": 8, "chunk": 64}}
    return {
        "ragged": random_case(rng, [rng.randrange(1, 10) for _ in range(5)], lengths(5)),
        "ragged, ratio 2": random_case(rng, [rng.randrange(1, 10) for _ in range(4)], lengths(4), ratio=2, padding=2),
        "ragged, FP8": random_case(rng, [rng.randrange(1, 10) for _ in range(4)], lengths(4), ratio=rng.choice([1, 2]), fp8=True, padding=1),
        "source": random_case(rng, [rng.randrange(1, 7) for _ in range(4)], lengths(4), **tiny, padding=1),
        "source, FP8": random_case(rng, [3, 1], [70, 33], fp8=True, candidates=(3, 8), topk=7),
        "restricted": random_case(rng, [rng.randrange(1, 7) for _ in range(4)], lengths(3) + [60], **tiny, restricted=True, padding=2),
        "restricted, FP8": random_case(rng, [2, 1], [70, 9], fp8=True, restricted=True, candidates=(9, 4), topk=11),
        "a block less a row": random_case(rng, [3], [rng.randrange(21, 40, 2)], candidates=(2, 2), restricted=True),
        "candidates are all": random_case(rng, [3, 1], [30, 7], restricted=True, candidates=(40, 2)),
        "real sizes": random_case(rng, [6, 1], [rng.randrange(100, 140), 20], **real),
        "real sizes, FP8": random_case(rng, [2], [150], **real, fp8=True),
        "real sizes, restricted": random_case(rng, [2], [200], **real, candidates=(8, 8), restricted=True),
        "one row of many chunks": random_case(rng, [1], [rng.randrange(300, 400)], topk=9, config={"chunk": 32}),
        "source of many chunks": random_case(rng, [1], [rng.randrange(300, 400)], topk=5, candidates=(7, 2), config={"chunk": 32}),
        "many requests, few with rows": random_case(rng, few, [rng.randrange(9) for _ in few], config={"rows": 2, "workspace": 1 << 20}) | {"most_rows": 2000},
        "no rows in a request": random_case(rng, [0, 5, 0, 0, 2, 0], [0, 40, 3, 9, 20, 0]),
        "float32 q": random_case(rng, [3], [40], dtype=torch.float32),
        "no rows": random_case(rng, [0], [3]),
        "only padding": random_case(rng, [0], [9], padding=3, **tiny),
        "wide choice": random_case(rng, [2], [50], topk=40),
        "all rows are chosen": random_case(rng, [3, 1], [16, 9], topk=30, candidates=(20, 2), padding=1) | {"bound": 30},
    }


def expected(case: dict, device: str = "cpu") -> tuple:
    return reference.select(**on(case, device))


def on(case: dict, device: str) -> dict:
    def move(x):
        return x.to(device) if isinstance(x, torch.Tensor) else x

    return {name: Paged(*map(move, x)) if name == "keys" else move(x) for name, x in case.items() if name != "config"}


def answer(case: dict, device: str = "cpu", **config) -> tuple:
    from deepseek_v41_plugin.kernels.indexer.triton_select import Config, select

    return select(**on(case, device), config=Config(**(case["config"] | config)))


def check_equal(name: str, got, want) -> None:
    for g, w in zip(got, want, strict=True):
        assert (g is None) == (w is None), name
        if g is not None:
            assert g.dtype == torch.int32 and g.shape == w.shape and torch.equal(g, w), name


def chosen_by_loops(case: dict, t: int) -> list[int]:
    """One row, in Python's numbers."""
    r, record, (cache, table, states) = int(case["req"][t]), case["record"], case["keys"]
    position, size = int(case["positions"][t]), (case["candidates"] or (0, 1))[1]
    visible = (position + 1) // case["ratio"] if r < len(table) and position >= 0 else 0
    q = case["q"][t].double().tolist()
    for head in q:
        for i, f in enumerate(case["freq"].tolist()):
            j = len(head) - 2 * len(case["freq"]) + 2 * i
            c, s = round(math.cos(position * f)), round(math.sin(position * f))
            head[j], head[j + 1] = head[j] * c - head[j + 1] * s, head[j] * s + head[j + 1] * c
    scores = {}
    for j in range(visible):
        if case["allowed"] is not None and visible > case["topk"] and j // size not in case["allowed"][t].tolist():
            continue
        k = record.decode(cache[int(table[r, j // states]), j % states], torch.float64).tolist()
        scores[j] = sum(w * max(sum(a * b for a, b in zip(head, k, strict=True)), 0) for head, w in zip(q, case["weights"][t].tolist(), strict=True))
    best = sorted(sorted(scores, key=lambda j: (-scores[j], j))[: case["topk"]])
    return best + [-1] * (case["topk"] - len(best))


def test_plain_form_is_a_loops(run_rng):
    for case in (
        random_case(run_rng, [3, 1, 2], [20, 2, 9], ratio=2, padding=2), random_case(run_rng, [2, 4], [31, 12], fp8=True),
        random_case(run_rng, [4, 2], [29, 12], candidates=(4, 2), restricted=True),
    ):
        chosen, kept = expected(case)
        assert kept is None
        assert chosen.tolist() == [chosen_by_loops(case, t) for t in range(len(case["q"]))]


def test_source_keeps_best_blocks(run_rng):
    case = random_case(run_rng, [1, 3], [40, 5], candidates=(4, 2), padding=1)
    chosen, kept = expected(case)
    plain, _ = expected(case | {"candidates": None})
    assert torch.equal(chosen, plain), "the source's own choice is not restricted"
    again = case | {"allowed": kept}
    for t, (rows, blocks) in enumerate(zip(expected(again)[0].tolist(), kept.tolist(), strict=True)):
        visible = min(int(case["positions"][t]) + 1, 40 if t == 0 else 5) if t < 4 else 0
        ids = [b for b in blocks if b >= 0]
        assert blocks == sorted(ids) + [-1] * (4 - len(ids)) and len(ids) == min(4, -(-visible // 2))
        assert not visible or (visible - 1) // 2 in ids
        assert {r // 2 for r in rows if r >= 0} <= set(ids)


def test_wrong_candidates_are_named(run_rng):
    case = random_case(run_rng, [1], [9])
    for bad, word in (({"allowed": torch.zeros(1, 2, dtype=torch.int32)}, "allowed"), ({"candidates": (1, 2)}, "candidates")):
        with pytest.raises(ValueError, match=f"^{word}: .*give"):
            indexer.select(*on(case | bad, "cpu").values())


def test_cpu_takes_the_plain_form():
    assert indexer.select.choose(CPU).name == "torch"


@pytest.fixture(scope="module")
def interpreted(run_seed, tmp_path_factory):
    """(cases, Triton's answers, other answers of the same): one process with the interpreter answers all."""
    rng, folder = random.Random(f"{run_seed} select"), tmp_path_factory.mktemp("select")
    cases = random_cases(rng)
    return cases, *answers_of(__file__, (cases, rng.randrange(1 << 30)), folder)


def test_triton_equals_torch(interpreted):
    cases, answers, _ = interpreted
    assert set(cases) == set(answers)
    for name, case in cases.items():
        check_equal(name, answers[name], expected(case))


def test_queries_of_triton(interpreted):
    """Random positions and values: the same numbers but for the last bits of sine and cosine, which few roundings see."""
    for record, (q, positions, freq, got, scale) in interpreted[2].items():
        want = reference.widened(reference.rope(q, positions, freq))
        want = (IndexRecord if record == "FP4" else Fp8IndexRecord)(q.shape[-1]).round(want)
        off = (got * scale - want).abs()
        assert float((off > 0).float().mean()) < 2e-3, record
        step = want.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True).expand(*want.shape[:-1], -1, 32).flatten(-2)
        assert bool((off <= step / 2).all()), record


def test_the_cases_are_what_their_names_say(run_rng):
    """Ties at the edge of the choice, or the comparison shows nothing of them."""
    case = random_case(run_rng, [1], [400], topk=9)
    q = case["q"].float()
    keys = case["record"].decode(case["keys"].cache[case["keys"].block_table[0, :100].long()].flatten(0, 1), torch.float32)
    score = reference.scores(q, case["weights"], keys, torch.tensor([400]))[0]
    assert len(score.unique()) < 400 and float(score.frac().abs().min()) == 0


def random_queries(rng, fp4: bool):
    """What `_query` makes of random values -> (q, positions, freq, values, scale)."""
    from deepseek_v41_plugin.kernels.indexer import triton_query

    rows, heads, dim, rope = 3, 4, 64, 32
    g = torch.Generator().manual_seed(rng.randrange(1 << 30))
    q = (torch.randn(rows, heads, dim, generator=g) * torch.randn(rows, 1, dim, generator=g).mul(3).exp2()).bfloat16()
    positions, freq = torch.randint(0, 1 << 20, (rows,), generator=g), torch.rand(rope // 2, generator=g, dtype=torch.float64)
    out = torch.empty(rows, heads, dim).to(torch.bfloat16 if fp4 else torch.float8_e4m3fn)
    weights, tiles = torch.empty(rows, heads), torch.empty(1, 4, dtype=torch.int32)
    first = torch.tensor([0, rows])
    triton_query._query[(1, 4)](
        q, q.stride(0), torch.ones(rows, heads), heads, positions, freq, first, out, weights, tiles, 1, 0, rows, 1, 1, 0,
        HEADS=heads, DIM=dim, ROPE=rope, ROWS=4, FP4=fp4,
    )
    assert tiles.tolist() == [[0, rows, 0, int(positions.max()) + 1]]
    out = out.float()
    if fp4:
        out = out.unflatten(-1, (-1, 4, 2)).mT.flatten(-3)
    return q, positions, freq, out, 2 * weights[..., None] / (2.0**64 if fp4 else 1)


def main(cases_file: str, answers_file: str) -> None:
    """Every new tensor is full of poison, so that what no kernel writes is seen."""
    empty, (cases, seed) = torch.empty, torch.load(cases_file, weights_only=False)

    def poisoned(*shape, **options):
        x = empty(*shape, **options)
        return x.copy_(torch.full_like(x, float("nan") if x.dtype.is_floating_point else POISON, dtype=x.dtype))

    torch.empty = poisoned
    answers = {name: answer(case) for name, case in cases.items()}
    queries = {record: random_queries(random.Random(seed), record == "FP4") for record in ("FP4", "FP8")}
    torch.save((answers, queries), answers_file)


if __name__ == "__main__":
    main(*sys.argv[1:])
