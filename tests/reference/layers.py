# SPDX-License-Identifier: Apache-2.0
"""What every layer has: norms, the hyper-connection mix, linears and the MoE (facts 2.1, 3, 5)."""

import torch

from . import formats


def top_lowest_first(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the k best along the last dimension; among equals the lower index wins."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :k]


class Ops:
    """The arithmetic shared by the sublayers, bound to one checkpoint's weights."""

    def __init__(self, config, weights, activation_quant: bool):
        self.c, self.w, self.activation_quant = config, weights, activation_quant

    def rms(self, x: torch.Tensor) -> torch.Tensor:
        """Reciprocal root mean square over the last dimension, kept as size 1."""
        return (x.square().mean(-1, keepdim=True) + self.c.rms_norm_eps).rsqrt()

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * self.rms(x) * self.w.plain(f"{name}.weight")

    def quant(self, x: torch.Tensor) -> torch.Tensor:
        return formats.quant_fp8(x) if self.activation_quant else x

    def linear(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, in] through an fp8 or mxfp4 weight: the input is quantised."""
        return self.quant(x) @ self.w.matrix(prefix).T

    def project(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, in] through a BF16 weight: nothing is quantised."""
        return x @ self.w.matrix(prefix).T

    # -- hyper-connections ------------------------------------------------------------------

    def mix(self, X: torch.Tensor, prefix: str):
        """Mixes predicted from the stream ``X`` [T, hc, D] by one sublayer's parameters.

        Returns pre [T, hc] (for the NEXT sublayer), post [T, hc], comb [T, hc, hc].
        """
        hc, eps = self.c.hc_mult, self.c.hc_eps
        fn, base, scale = (self.w.plain(f"{prefix}_{part}") for part in ("fn", "base", "scale"))
        f = X.flatten(1)
        m = (f @ fn.T) * self.rms(f)
        pre = torch.sigmoid(m[:, :hc] * scale[0] + base[:hc]) + eps
        post = 2 * torch.sigmoid(m[:, hc : 2 * hc] * scale[1] + base[hc : 2 * hc])
        comb = (m[:, 2 * hc :] * scale[2] + base[2 * hc :]).view(-1, hc, hc)
        return pre, post, sinkhorn(comb, self.c.hc_sinkhorn_iters, eps)

    def collapse(self, X: torch.Tensor, pre: torch.Tensor, name: str) -> torch.Tensor:
        """The copies of ``X`` weighted by ``pre`` and normed: a sublayer's input [T, D]."""
        return self.norm((pre[..., None] * X).sum(1), name)

    @staticmethod
    def spread(X, y, post, comb) -> torch.Tensor:
        """``X'[j] = post[j] y + sum_i comb[i, j] X[i]``."""
        return post[..., None] * y[:, None] + torch.einsum("tij,tid->tjd", comb, X)

    def block(self, X, pre, prefix: str, attend, k: int, note: dict | None = None):
        """Attention and MoE sublayers of one layer; returns the next (X, pre).

        ``attend`` maps [T, D] to [T, D]; ``k`` experts a token; ``note`` collects
        ``stream_mid`` and ``experts``.
        """
        note = {} if note is None else note
        next_pre, post, comb = self.mix(X, f"{prefix}.hc_attn")
        y = attend(self.collapse(X, pre, f"{prefix}.attn_norm"))
        X, pre = self.spread(X, y, post, comb), next_pre
        note["stream_mid"] = X
        next_pre, post, comb = self.mix(X, f"{prefix}.hc_ffn")
        h = self.collapse(X, pre, f"{prefix}.ffn_norm")
        y, note["experts"] = self.moe(h, f"{prefix}.ffn", k)
        return self.spread(X, y, post, comb), next_pre

    # -- mixture of experts -----------------------------------------------------------------

    def moe(self, x: torch.Tensor, prefix: str, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``x`` [T, D]; returns the output [T, D] and the chosen experts [T, k]."""
        index, weight = self.route(x, f"{prefix}.gate", k)
        y = self.expert(f"{prefix}.shared_experts", x, None)
        for e in index.unique().tolist():
            token, slot = (index == e).nonzero(as_tuple=True)
            out = self.expert(f"{prefix}.experts.{e}", x[token], weight[token, slot])
            y = y.index_add(0, token, out)
        return y, index

    def route(self, x: torch.Tensor, gate: str, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts [T, k] chosen with the bias, and their weights [T, k] without it."""
        logits = self.project(gate, x) / self.c.gate_temp
        s = torch.logaddexp(logits, torch.zeros_like(logits)).sqrt()
        index = top_lowest_first(s + self.w.plain(f"{gate}.bias"), k)
        weight = s.gather(1, index)
        if self.c.norm_topk_prob:
            weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)
        return index, weight * self.c.routed_scaling_factor

    def expert(self, prefix: str, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """SwiGLU with clamps; the routing weight [T] enters before w2 and its quantiser."""
        limit = self.c.swiglu_limit
        gate = self.linear(f"{prefix}.w1", x).clamp(max=limit)
        up = self.linear(f"{prefix}.w3", x).clamp(-limit, limit)
        h = torch.nn.functional.silu(gate) * up
        return self.linear(f"{prefix}.w2", h if weight is None else h * weight[:, None])


def sinkhorn(comb: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """Softmax over rows, then alternate normalisation; the first half-step is the softmax."""
    comb = comb.softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb
