# SPDX-License-Identifier: Apache-2.0
"""vLLM 0.33.0's own kernels beside ours, through its own layers where it has one: what runs is what its model would run.

HOSTS[op]: (label, start); start(make, works) -> (one call an input set, compare(wanted, rows) -> error or None).
None: not comparable here, since the host's layout of a cache or its split of the work differs; only the time counts.

Humming is what 0.33.0 prefers on SM90 for the experts and the MXFP8 Linears.  It is a package of its own
(humming-kernels); where it is missing vLLM takes Marlin without a word, so `host-humming*` cells then are errors, on purpose.
"""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import torch

from .timing import error

Started = tuple[list[Callable], Callable]


def uncompared(wanted, rows):
    return None


def _against(first: Callable, take=lambda out: out) -> Callable:
    """Compares the first input set's output, its first rows, with the reference's."""

    def compare(wanted, rows: int) -> float:
        return error((take(first())[:rows],), (take(wanted[0]),))

    return compare


def _config(make, moe: str, linear: str):
    """A VllmConfig of the timed model with these backends, and one process as the whole world."""

    def build():
        from vllm.config import set_current_vllm_config
        from vllm.distributed import parallel_state
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.worker import workspace

        from .model import write_model

        folder = make.once("host-folder", lambda: tempfile.mkdtemp())
        if not (Path(folder) / "config.json").exists():
            write_model(Path(folder), small=False)
        config = EngineArgs(
            model=folder, load_format="dummy", language_model_only=True, max_model_len=16384, max_num_batched_tokens=8192,
            moe_backend=moe, linear_backend=linear, enforce_eager=True,
        ).create_engine_config()
        with set_current_vllm_config(config):
            if not torch.distributed.is_initialized():
                with socket.socket() as s:
                    s.bind(("127.0.0.1", 0))
                    address = f"tcp://127.0.0.1:{s.getsockname()[1]}"
                parallel_state.init_distributed_environment(1, 0, address, 0)
                parallel_state.initialize_model_parallel()
            if not workspace.is_workspace_manager_initialized():
                workspace.init_workspace_manager(torch.device("cuda"))
        return config

    return make.once(("host-config", moe, linear), build)


@contextmanager
def _building(config):
    """Layers are made in bf16 on the GPU."""
    from vllm.config import set_current_vllm_config

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with set_current_vllm_config(config), torch.device("cuda"):
            yield
    finally:
        torch.set_default_dtype(before)


def _load(parameter: torch.nn.Parameter, tensor: torch.Tensor) -> None:
    """Bytes into a parameter of the same shape, whatever its one-byte type."""
    if parameter.shape != tensor.shape:
        raise ValueError(f"the host's parameter is {tuple(parameter.shape)}, ours {tuple(tensor.shape)}")
    parameter.data.view(torch.uint8).copy_(tensor.view(torch.uint8))


def _process(layer: torch.nn.Module) -> list[str]:
    """The host's own preparation after loading; names of what it will run."""
    names = []
    for module in layer.modules():
        method = getattr(module, "quant_method", None)
        if hasattr(method, "process_weights_after_loading"):
            method.process_weights_after_loading(module)
            names.append(str(getattr(method, "mxfp4_backend", None) or getattr(method, "kernel", None) or type(method).__name__))
    return names


def experts(backend: str, a16: bool) -> Callable[..., Started]:
    """The routed experts with the host's routing from logits (a few us that ours does not have in this cell)."""

    def start(make, works) -> Started:
        from vllm.forward_context import set_forward_context
        from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory

        config = _config(make, backend, "auto")

        def build():
            with _building(config):
                layer = FusedMoEFactory(
                    num_experts=make.E, top_k=make.k, hidden_size=make.D, intermediate_size=make.F, params_dtype=torch.bfloat16,
                    renormalize=True,
                    quant_config=config.quant_config, prefix=f"model.layers.1.ffn.experts.{backend}{a16}", scoring_func="sqrtsoftplus",
                    routed_scaling_factor=1.5, e_score_correction_bias=torch.zeros(make.E, dtype=torch.float32), swiglu_limit=10.0,
                    router_logits_dtype=torch.float32, ckpt_names=("w1", "w2", "w3"),
                )
                routed = next(m for m in layer.modules() if hasattr(m, "w13_weight"))
                for name, tensor in zip(("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale"), works[0].args[3:7], strict=True):
                    _load(getattr(routed, name), tensor)
                if a16:
                    routed.quant_method.activation_key = None  # Humming's own default: bf16 activations
                print(f"host experts: {', '.join(_process(layer))}", flush=True)
            return layer

        layer = make.once(("host-experts", backend, a16), build)

        def call(work):
            def run():
                with set_forward_context(None, config, num_tokens=len(work.args[0])):
                    return layer(work.args[0], work.extra["logits"])

            return run

        calls = [call(work) for work in works]
        return calls, _against(calls[0])

    return start


def linear(backend: str) -> Callable[..., Started]:
    """The dense MXFP8 Linear, a layer an input set: bf16 in, quantised inside where the kernel wants it (ours gets FP8 rows)."""

    def start(make, works) -> Started:
        from vllm.model_executor.layers.linear import ReplicatedLinear

        config, layers = _config(make, "auto", backend), []
        for index, work in enumerate(works):
            _, weight, scale = work.extra["fp8"]
            with _building(config):
                layer = ReplicatedLinear(
                    weight.shape[1], weight.shape[0], bias=False, params_dtype=torch.bfloat16, quant_config=config.quant_config,
                    prefix=f"model.layers.1.attn.wo_b.{index}",
                )
                _load(layer.weight, weight)
                _load(layer.weight_scale_inv if hasattr(layer, "weight_scale_inv") else layer.weight_scale, scale)
                names = _process(layer)
                if not index:
                    print(f"host linear: {', '.join(names)}", flush=True)
            layers.append(layer)
        calls = [lambda layer=layer, x=work.extra["fp8"][0]: layer(x)[0] for layer, work in zip(layers, works, strict=True)]
        return calls, _against(calls[0])

    return start


def flash_mla(make, works) -> Started:
    """FlashMLA's sparse decode over the same records' sizes; RoPE and its inverse are other kernels of the host's and not in this time.

    Its 584-byte pages keep scales behind all rows of a page, ours beside each row: the values read differ, the bytes do not.
    """
    from vllm.third_party.flashmla.flash_mla_interface import flash_mla_with_kvcache, get_mla_metadata

    from deepseek_v41_plugin.kernels.paging import slots_of

    calls = []
    for work in works:
        q, _, _, sink, scale, window, _, high, count, _, compressed, chosen, _, req = work.args
        seen = high[:, None] - torch.arange(count - 1, -1, -1, device=q.device)
        near = slots_of(window.block_table, req, seen, window.states).int()[:, None]
        far = slots_of(compressed.block_table, req, chosen.long(), compressed.states).int()[:, None]
        lengths = [torch.full((len(q),), x.shape[-1], dtype=torch.int32, device=q.device) for x in (near, far)]
        # One plan for all calls of an input set, as for all layers of a step: the first call makes it.
        given = dict(
            q=q[:, None], k_cache=window.cache[:, :, None], block_table=None, cache_seqlens=None, head_dim_v=512,
            tile_scheduler_metadata=get_mla_metadata()[0], softmax_scale=scale, is_fp8_kvcache=True, indices=near, attn_sink=sink,
            extra_k_cache=compressed.cache[:, :, None], extra_indices_in_kvcache=far, topk_length=lengths[0],
            extra_topk_length=lengths[1], out=torch.empty_like(q)[:, None],
        )
        calls.append(lambda given=given: flash_mla_with_kvcache(**given))
    return calls, uncompared


def paged_logits(make, works) -> Started:
    """DeepGEMM's FP8 logits of all keys, without the top-k behind them: less than the host's whole indexer costs.

    Rows of a request are rows by themselves, as 0.33.0 flattens drafts.
    """
    from vllm.utils.deep_gemm import fp8_fp4_paged_mqa_logits, get_paged_mqa_logits_metadata

    calls = []
    for work in works:
        q, weights, positions, _, req, _, keys, record, *_ = work.args
        if record.width != 132:
            raise ValueError("the host keeps FP8 index keys of 132 bytes: see the v4 variants")
        context = int(positions.max()) + 1
        lengths, table = (positions[:, None] + 1).int(), keys.block_table[req].contiguous()
        plan = get_paged_mqa_logits_metadata(lengths, keys.states, torch.cuda.get_device_properties(0).multi_processor_count)
        values = q.to(torch.float8_e4m3fn)[:, None].contiguous()
        calls.append(lambda v=values, w=weights, k=keys.cache[:, :, None], n=lengths, t=table, p=plan, c=context: fp8_fp4_paged_mqa_logits(
            (v, None), k, w, n, t, p, c))
    return calls, uncompared


def mhc(make, works) -> Started:
    """TileLang's fused post and pre; the stream that comes out is compared."""
    from vllm.model_executor.kernels.mhc.tilelang import mhc_fused_post_pre_delayed_tilelang

    calls = []
    for work in works:
        stream, y, post, comb, pre, mixer, norm, eps = work.args
        given = (y, stream, post[..., None].contiguous(), comb, mixer.fn, mixer.scale, mixer.base, mixer.norm_eps, mixer.mix_eps,
                 mixer.mix_eps, 2.0, mixer.iterations, pre, norm, eps)
        calls.append(lambda given=given: mhc_fused_post_pre_delayed_tilelang(*given))
    return calls, _against(calls[0], lambda out: out[0])


HOSTS = {
    "moe_experts": (
        ("humming-w4a8", experts("humming", False)), ("humming-w4a16", experts("humming", True)), ("marlin-w4a16", experts("marlin", False)),
    ),
    "row_linear": (("humming", linear("humming")), ("marlin", linear("marlin")), ("auto", linear("auto"))),
    "attend": (("flashmla", flash_mla),),
    "index_select": (("deepgemm-logits", paged_logits),),
    "mhc_turn": (("tilelang", mhc),),
}
