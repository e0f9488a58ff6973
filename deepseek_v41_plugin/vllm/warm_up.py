# SPDX-License-Identifier: Apache-2.0
"""Steps of all kinds before the first request, so that no kernel is compiled while one waits.

A Triton kernel is compiled for each of a few ranges of rows, rows a request and sequence lengths; see the tables in
`kernels`.  Graphs are warmed by the host as it captures them.  These steps run eagerly, on the null block alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.forward_context import set_forward_context
from vllm.v1.worker.gpu.cudagraph_utils import prepare_inputs_to_capture

from ..model.bounded import Bounds

if TYPE_CHECKING:
    from .state import DeepseekV41ModelState

# Rows of a step, dense where attention's splits change from one number to the next.
ROWS = (
    1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 17, 20, 24, 28, 33, 40, 48, 56, 65, 80, 96, 112, 129, 160, 192, 224, 257, 320, 400, 513, 700, 1025,
    2049, 4097, 8193, 16385,
)
# Sequence lengths: below the rows that are chosen, within one list of the top-k, and in several.
LENGTHS = (1, 2_000, 12_000, 50_000, 200_000, 1_000_000)
# Rows that meet every length: a few of each range.
ALL_LENGTHS = (1, 2, 8, 65, 2049)
# Rows of a product that is not joined to another, behind the decoder's cut, and of the output head.
PRODUCT_ROWS = (1, 17, 33, 65)


def up_to(values: tuple[int, ...], most: int) -> list[int]:
    """Those below `most`, and `most` itself."""
    return [value for value in values if value < most] + [most]


@torch.inference_mode()
def warm_up(state: DeepseekV41ModelState, input_buffers, block_tables, attn_groups, kv_cache_config) -> int:
    """Run them; returns how many.  All ranks run the same ones."""
    config, model, ran = state.vllm_config, state.model, 0
    lengths = up_to(LENGTHS, state.max_model_len)
    dp = config.parallel_config.data_parallel_size
    for rows in up_to(ROWS, state.max_num_tokens):
        across = torch.full((dp,), rows, dtype=torch.int32) if dp > 1 else None
        inputs = {"input_ids": input_buffers.input_ids[:rows], "positions": input_buffers.positions[:rows]}
        if model.ngram_size > 1:
            inputs["memory"] = model.standing_memory(rows)
        for requests in sorted({min(n, state.max_num_reqs) for n in (1, -(-rows // 6), rows)}):
            metadata, slots = prepare_inputs_to_capture(
                requests, rows, state, input_buffers, block_tables, attn_groups, kv_cache_config, full_cudagraph=False,
            )
            for length in lengths if rows in ALL_LENGTHS else lengths[-1:]:
                for group in metadata.values():
                    group.context = [length] * requests
                with set_forward_context(metadata, config, num_tokens=rows, num_tokens_across_dp=across, slot_mapping=slots):
                    model(**inputs)
                    ran += 1
        if rows in PRODUCT_ROWS:
            cut = Bounds(decoder_from=torch.zeros(requests, dtype=torch.int64, device=state.device), dropped=[0] * requests)
            for group in metadata.values():
                group.plan.bounds = cut
            with set_forward_context(metadata, config, num_tokens=rows, num_tokens_across_dp=across, slot_mapping=slots):
                hidden = model(**inputs)
            model.compute_logits(hidden[0] if model.features else hidden)
            ran += 1
    if state.device.type == "cuda":  # the host takes what is free now for what its graphs left
        torch.cuda.synchronize(state.device)
        torch.cuda.empty_cache()
    return ran
