# SPDX-License-Identifier: Apache-2.0
"""Time of one op: CUDA graph replays over input sets that together outgrow the L2; its error; what the device can do."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

L2 = 60 << 20
SETS = 192  # at most: inputs of tiny ops stay in the L2 however many there are, as they do in the model


@dataclass
class Work:
    """One input set of an op, and what any implementation of it must do.

    bytes: read and written once each; flops on the matrix units, of kind `rate` (bf16 or fp8).
    rowwise: arguments with a row a token, which a check cuts to its first rows (none: it takes them whole);
    written: arguments that the op writes into, so part of its result; extra: what a host's kernel wants besides.
    """

    args: tuple
    bytes: float
    flops: float = 0.0
    rate: str = "bf16"
    kwargs: dict = field(default_factory=dict)
    rowwise: tuple[int, ...] = ()
    written: tuple[int, ...] = ()
    extra: dict = field(default_factory=dict)

    def head(self, rows: int) -> Work:
        args = tuple(_cut(a, rows) if i in self.rowwise else a for i, a in enumerate(self.args))
        return Work(args, 0, kwargs=self.kwargs, written=self.written)

    def result(self, fn: Callable, **more):
        """What fn(*args) gives on copies of what it writes into."""
        args = tuple(_copied(a) if i in self.written else a for i, a in enumerate(self.args))
        out = fn(*args, **self.kwargs, **more)
        return out, tuple(args[i] for i in self.written)


def _cut(value, rows: int):
    if isinstance(value, tuple):
        cut = [_cut(v, rows) for v in value]
        return type(value)(*cut) if hasattr(value, "_fields") else tuple(cut)
    return value[:rows] if isinstance(value, torch.Tensor) else value


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """With its strides: pages may lie apart."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)


def parts(value) -> Iterator[torch.Tensor]:
    """Tensors of an output; FP8 rows as their values, since two roundings of one value need not agree in both fields."""
    if value is None:
        return
    if hasattr(value, "q") and hasattr(value, "scale"):
        yield value.q.float() * value.scale.float()[:, None]
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from parts(item)
    elif isinstance(value, torch.Tensor):
        yield value


def _tensors(value) -> Iterator[torch.Tensor]:
    """As they lie in memory."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def error(found, wanted) -> float:
    """The worst of the outputs: floats by ||a - b|| / ||b||, sets of row numbers and bytes by the share that differs; NaN is never small."""
    worst = 0.0
    found, wanted = list(parts(found)), list(parts(wanted))
    if len(found) != len(wanted):
        raise ValueError(f"{len(found)} outputs, the reference has {len(wanted)}")
    for a, b in zip(found, wanted, strict=True):
        if a.shape != b.shape:
            raise ValueError(f"an output of {tuple(a.shape)}, the reference's has {tuple(b.shape)}")
        if not b.numel():
            continue
        if b.is_floating_point():
            a, b = a.double(), b.double()
            one = float((a - b).norm() / b.norm().clamp(min=1e-30))
        elif b.dtype != torch.uint8 and b.ndim == 2:
            a, b = a.long().sort(-1).values, b.long().sort(-1).values
            one = max(_outside(a, b), _outside(b, a))
        else:
            one = float((a != b).float().mean())
        worst = one if math.isnan(one) else max(worst, one)
        if math.isnan(worst):
            return worst
    return worst


def _outside(a: torch.Tensor, b: torch.Tensor) -> float:
    """Share of a's entries that are not in the same row of b; both sorted."""
    at = torch.searchsorted(b, a).clamp(max=b.shape[1] - 1)
    return float((b.gather(1, at) != a).float().mean())


def checked(work: Work, fn: Callable, wanted, rows: int, **more) -> float:
    """Error over the first `rows` rows of a run over all of them.

    Memory as large as the outputs is freed full of NaN just before: an allocator that gives it back shows what was not written.
    """
    first, written = work.result(fn, **more)
    shapes = [(t.shape, t.dtype, t.device) for t in _tensors(first)]
    del first, written
    poison = [torch.empty(s, dtype=d, device=v) for s, d, v in shapes if s]
    for tensor in poison:  # NaN in every float format, a number out of all bounds in integers
        tensor.view(torch.uint8).fill_(0xFF if tensor.is_floating_point() else 0x7F)
    del poison
    out, written = work.result(fn, **more)
    return error((_cut(out, rows) if work.rowwise else out, written), wanted)


def time_op(calls: list[Callable], cuda: bool, graphs: bool = True, runs: int = 15, seconds: float = 1.0) -> tuple[list[float], int]:
    """us a call of `calls` (one an input set) in turn, one value a run; and the calls of a run."""
    for call in calls:
        call()
    if not cuda:
        times = []
        for _ in range(min(runs, 3)):
            begin = time.perf_counter()
            for call in calls:
                call()
            times.append(1e6 * (time.perf_counter() - begin) / len(calls))
        return times, len(calls)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def measured(run: Callable, count: int) -> float:
        start.record()
        run()
        end.record()
        end.synchronize()
        return 1e3 * start.elapsed_time(end) / count

    def round_() -> None:
        for call in calls:
            call()

    torch.cuda.synchronize()
    one = measured(round_, len(calls))
    # A graph of 1 ms or more: a replay's own start does not show.
    rounds = max(1, min(50, math.ceil(1000 / max(one * len(calls), 1e-3))))
    count = rounds * len(calls)
    if graphs:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(rounds):
                round_()
        run = graph.replay
    else:
        def run() -> None:
            for _ in range(rounds):
                round_()
    run()
    once = measured(run, count) * count * 1e-6
    return [measured(run, count) for _ in range(max(3, min(runs, int(seconds / max(once, 1e-6)))))], count


def sets_for(bytes_: float) -> int:
    """Input sets that together are three times the L2."""
    return max(1, min(SETS, math.ceil(3 * L2 / max(bytes_, 1))))


def ceilings() -> dict[str, tuple[str, list[float]]]:
    """A GPU's, measured here and now: copy GB/s (read and written), matmul TFLOP/s in bf16 and in FP8 with a scale a row."""
    n, big = 8192, 1 << 30
    a, b = torch.empty(big, dtype=torch.uint8, device="cuda").random_(), torch.empty(big, dtype=torch.uint8, device="cuda")
    found = {"copy": ("GB/s", [2 * big / us * 1e-3 for us in time_op([lambda: b.copy_(a)], True)[0]])}
    x, y = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in "xy")
    found["bf16"] = ("TFLOP/s", [2 * n**3 / us * 1e-6 for us in time_op([lambda: x @ y], True)[0]])
    q, w, one = x.to(torch.float8_e4m3fn), y.to(torch.float8_e4m3fn).t(), torch.ones(n, 1, device="cuda")
    product = lambda: torch._scaled_mm(q, w, scale_a=one, scale_b=one.t(), out_dtype=torch.bfloat16)  # noqa: E731
    found["fp8"] = ("TFLOP/s", [2 * n**3 / us * 1e-6 for us in time_op([product], True)[0]])
    return found
