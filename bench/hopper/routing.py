# SPDX-License-Identifier: Apache-2.0
"""How even the routing of a step is: rows an expert gets, counted in the model's own forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch


@contextmanager
def counting(impl: str, model: torch.nn.Module, top_k: int) -> Iterator[list[torch.Tensor]]:
    """Collects each MoE layer's rows an expert, int64 [E], of the forwards inside (eager ones: a graph's are not seen)."""
    counts: list[torch.Tensor] = []

    def count(ids: torch.Tensor, experts: int) -> None:
        if not (ids.is_cuda and torch.cuda.is_current_stream_capturing()):
            counts.append(torch.bincount(ids.flatten().long(), minlength=experts))

    if impl == "plugin":
        from deepseek_v41_plugin.kernels.registry import OPS

        op = OPS["moe_route"]
        before = dict(op._chosen)
        for kind in ("cpu", "cuda"):
            try:
                chosen = op.choose(torch.device(kind))
            except Exception:  # noqa: BLE001  not on this machine
                continue

            def route(*args, chosen=chosen, **kwargs):
                found = chosen.fn(*args, **kwargs)
                count(found[0], args[1].shape[0])
                return found

            op._chosen[kind] = replace(chosen, fn=route)
        try:
            yield counts
        finally:
            op._chosen.clear()
            op._chosen.update(before)
        return

    def seen(_module, _inputs, output) -> None:
        logits = output[0] if isinstance(output, tuple) else output
        # The score is monotonic in the logit and dummy biases are zero.
        count(logits.float().topk(top_k).indices, logits.shape[-1])

    gates = [m for m in model.modules() if type(m).__name__ == "GateLinear"]
    hooks = [gate.register_forward_hook(seen) for gate in gates]
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()


def evenness(counts: list[torch.Tensor]) -> dict:
    """most: the busiest expert's rows over the mean, the worst layer's; used: the fewest experts used in a layer.

    For R rows drawn evenly, most is about 1 + 3 sqrt(E / (R k)).
    """
    counts = [c for c in counts if c.sum()]  # behind a decoder cut a chunk may leave a layer without rows
    if not counts:
        return {"most": "not counted", "used": ""}
    return {
        "most": f"{max(float(c.max() / c.float().mean()) for c in counts):.2f}",
        "used": min(int((c > 0).sum()) for c in counts),
    }
