# SPDX-License-Identifier: Apache-2.0
"""Each kernel's share of a step: torch's profiler over whole steps, kernels grouped by family."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable

import torch

# First match wins: ours by their whole names, then the host's (Marlin, FlashMLA, DeepGEMM, TileLang, CUTLASS, torch).
# The experts' rows between their products go through a `_quantize` too, which counts as the Linears'.
FAMILIES = tuple((name, re.compile(pattern, re.IGNORECASE)) for name, pattern in (
    ("experts", r"^(gate_up|down|reduce|_prepare)$"),
    ("routing", r"^_route$"),
    ("mhc", r"^(_sums|_finish|_leave|_last)$"),
    ("indexer", r"^(_query|_scores|_(first|second)_level)$"),
    ("attention", r"^(_attend|_combine)$"),
    ("kv records", r"^(_write|_pairs)$"),
    ("fp8 linear", r"^(_group|_dequantize|_skinny|_quantize)$"),
    ("norm, rope, swiglu", r"^(_norm|_swiglu)$"),
    ("copies", r"^memcpy|^memset|copy_kernel|CatArray|index_put|fillfunctor"),
    ("engram", r"engram|ngram"),
    ("experts", r"marlin.*moe|moe_wna16|fused_moe|grouped_gemm|humming|_experts|experts_|expert_(gate|up|down)|gate_up_kernel|down_kernel"),
    ("routing", r"topk_?gating|moe_align|moe_sum|count_and_sort|route|router|permute|expert_offsets|_group_kernel|sqrtsoftplus"),
    ("mhc", r"mhc|hc_|sinkhorn|hyper_?conn"),
    ("indexer", r"mqa_logits|indexer|index_|radix|topk|candidate|deepselect|top_k|_select|block_scores"),
    ("attention", r"flash_?mla|sparse_attn|sparse_mla|splitkv|attend|attention|combine_kernel|mla|flash_fwd|dequant.*gather|gather.*cache"),
    ("kv records", r"record|compress|latent|insert_k|k_cache|kv_cache|concat_and_cache|ring|store_k"),
    ("fp8 linear", r"marlin|mxfp8|fp8.*gemm|scaled_mm|row_linear|group_linear|skinny|cutlass.*e4m3|e4m3.*gemm|deep_?gemm|quant"),
    ("norm, rope, swiglu", r"rms_?norm|layer_?norm|rope|rotary|silu|swiglu|act_and_mul"),
    ("other matmul", r"gemm|nvjet|cublas|cutlass|splitk|gemv|matmul|^aten::(mm|bmm|addmm|einsum)|wide_linear"),
    ("sampling, drafts", r"sampl|softmax|argmax|gumbel|logprob|rejection|markov|draft|post_update|prepare_|combine_sampled|expand_idx|temperature"),
    ("torch element-wise", r"elementwise|reduce_kernel|index|scatter|gather|sort|scan|arange|aten::|at::native"),
))


def family(kernel: str) -> str:
    return next((name for name, pattern in FAMILIES if pattern.search(kernel)), "other")


def short(kernel: str) -> str:
    """A C++ name without its return type, arguments and template."""
    name = re.sub(r"^(void|int|float)\s+", "", kernel)
    return re.split(r"[<(]", name)[0].split("::")[-1][:60] or kernel[:60]


def profile(run: Callable[[], None], steps: int, cuda: bool) -> list[dict]:
    """Rows of family, kernel, calls and us a step, share in percent of all device time; `run` makes `steps` steps.

    On a CPU the operators take the kernels' place.
    """
    from torch.profiler import ProfilerActivity

    activities = [ProfilerActivity.CUDA] if cuda else [ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler:
        run()
        if cuda:
            torch.cuda.synchronize()
    found: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])
    for event in profiler.key_averages():
        us = event.self_device_time_total if cuda else event.self_cpu_time_total
        if us:
            entry = found[family(event.key), short(event.key)]
            entry[0] += event.count
            entry[1] += us
    whole = sum(us for _, us in found.values())
    rows = [
        {"family": group, "kernel": kernel, "calls": f"{calls / steps:.1f}", "us": f"{us / steps:.2f}", "percent": f"{100 * us / whole:.2f}"}
        for (group, kernel), (calls, us) in found.items()
    ]
    return sorted(rows, key=lambda row: -float(row["us"]))


def table(rows: list[dict], kernels: int = 14) -> str:
    """Families by share, then the longest kernels."""
    groups: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for row in rows:
        for i, name in enumerate(("calls", "us", "percent")):
            groups[row["family"]][i] += float(row[name])
    lines = [f"    {sum(us for _, us, _ in groups.values()):.0f} us of kernels a step"]
    for name, (calls, us, percent) in sorted(groups.items(), key=lambda item: -item[1][1]):
        lines.append(f"    {percent:5.1f} %  {us:9.1f} us  {calls:6.1f} calls  {name}")
    lines.append("    the longest:")
    for row in rows[:kernels]:
        lines.append(f"    {float(row['percent']):5.1f} %  {float(row['us']):9.1f} us  {row['calls']:>6s} calls  {row['kernel']} ({row['family']})")
    return "\n".join(lines)
