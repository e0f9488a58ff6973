# SPDX-License-Identifier: Apache-2.0
"""What each op is timed on: V4.1's shapes, or small ones on a CPU.  A new op is one function here:

    @case("my_op", rows=(1, 64, 8192))
    def my_op(make, rows):
        x = make.normal(rows, make.D)
        return Work((x, make.norm), bytes=4 * x.numel(), rowwise=(0,))

`make` draws fresh inputs at each call.  What is larger than the L2 by itself (all experts, a pool of pages) comes from
`make.once`: the input sets share it and take other parts of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from .timing import L2, Work

REAL = dict(D=5120, H=64, d=512, rope=64, E=384, k=6, F=2304, G=8, R=1024, iH=32, id=128, topk=512, K=2048, size=8, window=128)
SMALL = dict(D=128, H=4, d=64, rope=16, E=8, k=2, F=64, G=2, R=32, iH=4, id=32, topk=4, K=4, size=2, window=8)


@dataclass
class Case:
    """An op's shapes: variants of rows; `small` rows stand for them on a CPU."""

    op: str
    build: Callable
    rows: tuple[int, ...]
    variants: dict[str, tuple]
    small: tuple[int, ...] = (5,)


CASES: list[Case] = []


def case(op: str, rows: tuple[int, ...], variants: dict[str, tuple] | None = None, small: tuple[int, ...] = (5,)):
    def add(build: Callable) -> Callable:
        CASES.append(Case(op, build, rows, variants or {"": ()}, small))
        return build

    return add


@dataclass
class Make:
    """Sizes by name (make.D, ...), and fresh random tensors."""

    device: str
    small: bool
    seed: int = 0
    kept: dict = field(default_factory=dict)

    def __post_init__(self):
        self.sizes = SMALL if self.small else REAL
        self.generator = torch.Generator(self.device).manual_seed(self.seed)

    def __getattr__(self, name: str) -> int:
        try:
            return self.__dict__["sizes"][name]
        except KeyError:
            raise AttributeError(name) from None

    def normal(self, *shape: int, dtype=torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, device=self.device, generator=self.generator) * scale).to(dtype)

    def integers(self, low: int, high: int, *shape: int, dtype=torch.int64) -> torch.Tensor:
        return torch.randint(low, high, shape, device=self.device, generator=self.generator, dtype=dtype)

    def once(self, key, build: Callable):
        if key not in self.kept:
            self.kept[key] = build()
        return self.kept[key]

    def e4m3(self, *shape: int) -> torch.Tensor:
        return self.normal(*shape).to(torch.float8_e4m3fn)

    def fp8(self, outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
        """E4M3 [o, i] under E8M0 bytes of 32 x 32 that differ by a few octaves, as weights' do."""
        raw = self.integers(0, 1 << 8, outputs, inputs, dtype=torch.uint8)
        # Largest exponents, so that a block's scale is that of its largest value; neither NaN nor a subnormal.
        raw = raw & 0x87 | (0x48 + (raw & 0x30) % 0x30)
        return raw.view(torch.float8_e4m3fn), self.integers(112, 115, -(-outputs // 32), -(-inputs // 32), dtype=torch.uint8)

    def freq(self) -> torch.Tensor:
        n = self.rope // 2
        return 160000.0 ** (-torch.arange(n, device=self.device, dtype=torch.float64) / n)

    def pool(self, record, blocks: int, states: int) -> torch.Tensor:
        """Pages [blocks, states, width] of real records, drawn from 4096 encoded rows."""
        rows = record.encode(self.normal(4096, record.dim, dtype=torch.float32))
        pages = torch.empty(blocks, states, record.width, dtype=torch.uint8, device=self.device)
        for part in pages.split(max(1, (1 << 27) // (states * record.width))):
            part.copy_(rows[self.integers(0, 4096, len(part), states)])
        return pages

    def table(self, requests: int, blocks: int, pool: int) -> torch.Tensor:
        """Block table int32 [R, n] of a pool: disjoint if it suffices, in random order."""
        if requests * blocks <= pool:
            return torch.randperm(pool, device=self.device, generator=self.generator)[: requests * blocks].view(requests, blocks).int()
        return self.integers(0, pool, requests, blocks, dtype=torch.int32)


TOKENS = (1, 8, 64, 256, 8192)
# o, i of the dense FP8 Linears at tensor parallel 1: wq_a|wkv, wq_b, indexer wq_b, wo_b, shared w1|w3, shared w2, draft main_proj.
LINEARS = {"wqa_wkv": (1792, 5120), "wq_b": (32768, 1280), "iwq_b": (4096, 1280), "wo_b": (5120, 8192), "w13": (4608, 5120),
           "w2": (5120, 2304), "main": (5120, 15360)}


def _shape(make: Make, outputs: int, inputs: int) -> tuple[int, int]:
    return (64, 128) if make.small else (outputs, inputs)


@case("quantize_rows", TOKENS)
def quantize_rows(make, rows):
    x = make.normal(rows, make.D)
    return Work((x,), bytes=3 * x.numel(), rowwise=(0,))


@case("norm_rows", TOKENS)
def norm_rows(make, rows):
    x = make.normal(rows, make.D)
    return Work((x, make.normal(make.D), 1e-20), bytes=5 * x.numel(), rowwise=(0,))


@case("swiglu_rows", TOKENS)
def swiglu_rows(make, rows):
    x = make.normal(rows, 2 * make.F)
    return Work((x, 10.0), bytes=2.5 * x.numel(), rowwise=(0,))


@case("row_linear", TOKENS, LINEARS)
def row_linear(make, rows, outputs, inputs):
    from deepseek_v41_plugin.kernels.formats.rowfp8 import row_quantize
    from deepseek_v41_plugin.kernels.linear import row_weight

    outputs, inputs = _shape(make, outputs, inputs)
    weight, scale = make.fp8(outputs, inputs)
    one = row_weight(weight, scale)
    x = make.normal(rows, inputs)
    moved = outputs * inputs + rows * (inputs + 2 * outputs)
    return Work((row_quantize(x), one), moved, 2 * rows * outputs * inputs, "fp8", rowwise=(0,), extra={"fp8": (x, weight, scale)})


@case("fp8_linear", (64, 8192), {"wo_b": LINEARS["wo_b"]})
def fp8_linear(make, rows, outputs, inputs):
    outputs, inputs = _shape(make, outputs, inputs)
    x = make.normal(rows, inputs)
    return Work((x, *make.fp8(outputs, inputs)), outputs * inputs + 2 * rows * (inputs + outputs), 2 * rows * outputs * inputs, "fp8", rowwise=(0,))


@case("group_linear", TOKENS)
def group_linear(make, rows):
    from deepseek_v41_plugin.kernels.linear import pack_group

    groups, inner, depth = make.G, make.R, 128 if make.small else 4096
    weight, scale = make.fp8(groups * inner, depth)
    weight = weight if make.small else pack_group(weight)
    o = make.normal(rows, groups, depth)
    return Work((o, weight, scale), groups * inner * depth + 2 * rows * groups * (depth + inner), 2 * rows * groups * inner * depth, rowwise=(0,))


@case("wide_linear", TOKENS, {"router": (384, 5120), "head": (129280, 5120), "compressor": (512, 5120)})
def wide_linear(make, rows, outputs, inputs):
    outputs, inputs = _shape(make, outputs, inputs)
    rows = min(rows, 256) if outputs > 100000 else rows
    x, weight = make.normal(rows, inputs), make.normal(outputs, inputs, scale=inputs**-0.5)
    return Work((x, weight), 2 * outputs * inputs + rows * (2 * inputs + 4 * outputs), 2 * rows * outputs * inputs, rowwise=(0,))


@case("moe_route", TOKENS)
def moe_route(make, rows):
    x, weight = make.normal(rows, make.D), make.normal(make.E, make.D, scale=make.D**-0.5)
    bias = torch.zeros(make.E, device=make.device)
    return Work((x, weight, bias, make.k, 1.5), 2 * (x.numel() + weight.numel()) + 12 * rows * make.k, 2 * rows * weight.numel(), rowwise=(0,))


@case("moe_experts", (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192))
def moe_experts(make, rows):
    from deepseek_v41_plugin.kernels.moe import spread_ok
    from deepseek_v41_plugin.kernels.moe.reference import pick

    def weights():
        found = []
        for outputs, inputs in ((2 * make.F, make.D), (make.D, make.F)):
            found.append(make.integers(0, 256, make.E, outputs, inputs // 2, dtype=torch.uint8))
            found.append(make.integers(117, 121, make.E, outputs, inputs // 32, dtype=torch.uint8))
        return found

    held = make.once("experts", weights)
    narrow = make.once("narrow", lambda: spread_ok(held[1]) and spread_ok(held[3]))
    x, logits = make.normal(rows, make.D), make.normal(rows, make.E, dtype=torch.float32)
    ids, share = pick(logits, torch.zeros(make.E, device=make.device), make.k, 1.5, 1.0)
    used = len(ids.unique())
    moved = used * sum(w[0].numel() for w in held) + rows * make.D * 6
    return Work((x, ids, share, *held, 10.0), moved, 6 * rows * make.k * make.D * make.F, "fp8", kwargs={"narrow": narrow}, rowwise=(0, 1, 2),
                extra={"logits": logits, "experts": used})


def _format(name: str, make: Make):
    from deepseek_v41_plugin.kernels.formats.records import cache_format

    return cache_format(name, make.d, make.rope, make.id)


ATTEND = {"auto-decode": ("auto", False), "v4-decode": ("fp8_ds_mla", False), "auto-prefill": ("auto", True), "v4-prefill": ("fp8_ds_mla", True)}


@case("attend", (1, 8, 64, 256, 384, 8192), ATTEND)
def attend(make, rows, fmt, prefill):
    from deepseek_v41_plugin.kernels.paging import Paged

    if not make.small and prefill != (rows > 384):
        return None  # a decode step is of up to 384 rows (64 requests of 6), a prefill step of 8192
    records, states = _format(fmt, make), 8 if make.small else 64
    requests, context = (1 if prefill else rows), 64 if make.small else 32768
    blocks = context // states
    pools = make.once(("attend", fmt), lambda: [make.pool(r, 40 if make.small else 20000, states) for r in (records.window, records.compressed)])
    pages = [Paged(pool, make.table(requests, blocks, len(pool)), states) for pool in pools]
    req = torch.arange(rows, device=make.device) if not prefill else torch.zeros(rows, dtype=torch.int64, device=make.device)
    high = context - 1 - (torch.arange(rows, device=make.device).flip(0) if prefill else torch.zeros_like(req))
    # Rows of one request choose among the rows before them; distinct, ascending.
    seen = context - rows if prefill else context
    step = seen // make.topk
    chosen = (torch.arange(make.topk, device=make.device) * step + make.integers(0, step, rows, make.topk)).int()
    q, sink = make.normal(rows, make.H, make.d), make.normal(make.H, dtype=torch.float32)
    args = (q, high, make.freq(), sink, make.d**-0.5, pages[0], high - make.window + 1, high, make.window, records.window,
            pages[1], chosen, records.compressed, req)
    seen = make.window + make.topk
    read = rows * (make.window * records.window.width + make.topk * records.compressed.width)
    if prefill:  # rows of a request share what they read: each record once
        read = min(read, context * (records.window.width + records.compressed.width))
    return Work(args, read + 4 * q.numel(), 4 * rows * make.H * make.d * seen, rowwise=(0, 1, 6, 7, 11, 13))


def _select(kind: str, per: int, context: int, fmt: str = "auto") -> tuple:
    return kind, per, context, fmt


SELECT = {
    "plain-128K": _select("plain", 1, 131072), "plain-128K-x6": _select("plain", 6, 131072), "plain-512K": _select("plain", 1, 524288),
    "source-128K": _select("source", 1, 131072), "reader-128K": _select("reader", 1, 131072), "reader-512K": _select("reader", 1, 524288),
    "reader-128K-x6": _select("reader", 6, 131072), "plain-128K-v4": _select("plain", 1, 131072, "fp8_ds_mla"),
    "prefill-128K": _select("plain", 2048, 131072),
}


@case("index_select", (1, 8, 64), SELECT, small=(2,))
def index_select(make, requests, kind, per, context, fmt):
    from deepseek_v41_plugin.kernels.paging import Paged

    if not make.small and requests > 1 and (per > 64 or requests * context > 64 * 131072):
        return None
    context, per, states = (64, min(per, 3), 8) if make.small else (context, per, 64)
    record, blocks = _format(fmt, make).index, context // states
    # A pool beyond the L2, of which each input set takes other blocks: a single request's keys would stay there.
    many = blocks * requests if make.small else max(blocks * requests, -(-3 * L2 // (states * record.width)))
    pool = make.once(("select", fmt, many), lambda: make.pool(record, many, states))
    rows = requests * per
    positions = (context - per + torch.arange(per, device=make.device)).repeat(requests)
    req = torch.arange(requests, device=make.device).repeat_interleave(per)
    first = torch.arange(requests + 1, device=make.device) * per
    candidates, allowed, keys = None, None, requests * context
    if kind != "plain":
        candidates = (make.K, make.size)
    if kind == "reader":
        step = max(1, context // make.size // make.K)
        allowed = (torch.arange(make.K, device=make.device) * step + make.integers(0, step, rows, make.K)).int()
        keys = min(rows * make.K * make.size, keys)
    q, weights = make.normal(rows, make.iH, make.id), make.normal(rows, make.iH, dtype=torch.float32, scale=make.iH**-0.5)
    seen = rows * (make.K * make.size if kind == "reader" else context)
    pages = Paged(pool, make.table(requests, blocks, len(pool)), states)
    args = (q, weights, positions, make.freq(), req, first, pages, record, 1, make.topk, context)
    kwargs = {"candidates": candidates, "allowed": allowed, "most_rows": per}
    return Work(args, keys * record.width + 4 * rows * make.topk, 2 * seen * make.iH * make.id, kwargs=kwargs)


def _mhc(make: Make, rows: int):
    from deepseek_v41_plugin.kernels.mhc import MixerWeights, prepare

    fn = make.normal(24, 4 * make.D, dtype=torch.float32, scale=(4 * make.D) ** -0.5)
    mixer = MixerWeights(fn, make.normal(24, dtype=torch.float32), make.normal(3, dtype=torch.float32), 20, 1e-6, 1e-20, prepare(fn))
    return mixer, make.normal(rows, 4, make.D), make.normal(rows, 4, dtype=torch.float32).sigmoid(), make.normal(make.D)


def _out(make: Make, rows: int):
    comb = make.normal(rows, 4, 4, dtype=torch.float32).softmax(-1)
    return make.normal(rows, make.D), make.normal(rows, 4, dtype=torch.float32).sigmoid() * 2, comb


@case("mhc_enter", TOKENS)
def mhc_enter(make, rows):
    mixer, stream, pre, norm = _mhc(make, rows)
    return Work((stream, pre, mixer, norm, 1e-20), 2 * stream.numel() + 3 * rows * make.D + 4 * mixer.fn.numel(), 2 * rows * mixer.fn.numel() * 3,
                kwargs={"quantize": False}, rowwise=(0, 1))


@case("mhc_turn", TOKENS)
def mhc_turn(make, rows):
    mixer, stream, pre, norm = _mhc(make, rows)
    moved = 4 * stream.numel() + 5 * rows * make.D + 4 * mixer.fn.numel()
    return Work((stream, *_out(make, rows), pre, mixer, norm, 1e-20), moved, 2 * rows * mixer.fn.numel() * 3, kwargs={"quantize": False},
                rowwise=(0, 1, 2, 3, 4))


@case("mhc_leave", TOKENS)
def mhc_leave(make, rows):
    stream = make.normal(rows, 4, make.D)
    return Work((stream, *_out(make, rows)), 4 * stream.numel() + 2 * rows * make.D, rowwise=(0, 1, 2, 3))


@case("mhc_last", TOKENS)
def mhc_last(make, rows):
    _, stream, pre, norm = _mhc(make, rows)
    return Work((stream, *_out(make, rows), pre, norm, 1e-20), 2 * stream.numel() + 4 * rows * make.D, rowwise=(0, 1, 2, 3, 4))


RECORDS = {"window": ("auto", "window", 1), "global-r2": ("auto", "compressed", 2), "index": ("auto", "index", 1), "v4": ("fp8_ds_mla", "window", 1),
           "v4-index": ("fp8_ds_mla", "index", 1)}


@case("latent_write_record", TOKENS, RECORDS)
def latent_write_record(make, rows, fmt, which, ratio):
    record, states = getattr(_format(fmt, make), which), 8 if make.small else 64
    blocks = -(-rows // states) + 2
    cache = torch.zeros(blocks, states // ratio, record.width, dtype=torch.uint8, device=make.device)
    positions = torch.arange(rows, device=make.device) + 1000
    slots = torch.arange(rows, device=make.device) + states
    x = make.normal(rows, record.dim)
    args = (x, make.normal(record.dim), 1e-20, positions, make.freq(), slots, cache, record, ratio, states)
    return Work(args, 4 * x.numel() + rows * record.width / ratio, written=(6,))


@case("latent_pair_latents", TOKENS)
def latent_pair_latents(make, rows):
    per = 1 if rows <= 256 else rows
    requests = rows // per
    state, ring = make.normal(rows, 2 * make.d, dtype=torch.float32), make.normal(requests + 1, 8, 2 * make.d, dtype=torch.float32)
    positions = 1001 + torch.arange(per, device=make.device).repeat(requests)
    req = torch.arange(requests, device=make.device).repeat_interleave(per)
    first = torch.arange(requests + 1, device=make.device) * per
    table = torch.arange(1, requests + 1, device=make.device, dtype=torch.int32)[:, None]
    return Work((state, positions, req, first, ring, table), 4 * (state.numel() * 1.5 + min(rows, 8 * requests) * 4 * make.d), written=(4,))


@case("engram_gate", (1, 64, 8192))
def engram_gate(make, rows):
    stream, key = make.normal(rows, 4, make.D), make.normal(rows, 4, make.D)
    args = (stream, key, make.normal(rows, make.D), make.normal(4, make.D), make.normal(4, make.D), 1e-20)
    return Work(args, 6 * stream.numel() + 2 * rows * make.D, rowwise=(0, 1, 2))


@case("verification_trim", (8, 64, 256))
def verification_trim(make, requests):
    drafts = torch.full((requests,), 5, device=make.device)
    budget, base = 3 * requests, torch.ones_like(drafts)
    return Work((torch.rand(requests, 5, device=make.device), drafts, base, budget, requests + budget, requests + budget), 200 * requests)
