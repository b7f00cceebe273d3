"""Exact attention with its log-sum-exp, by torch's own kernel."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from subquad.kernels.attention.blockwise.partial import fused_partial
from subquad.kernels.attention.softmax import visible_logsumexp, visible_softmax
from subquad.kernels.precision import upcast
from subquad.kernels.tokens.heads import repeat_heads
from subquad.kernels.tokens.padding import cleared


def exact_partial(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M E"],
    valid: Bool[Tensor, "B M"] | None,
    *,
    causal: bool,
    offset: int,
    scale: float,
    valid_queries: Bool[Tensor, "B N"] | None = None,
) -> tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]]:
    """Exact attention and its log-sum-exp in fp32 (fp64 for fp64 inputs): out_i = Σ_j e^{scale·q_i·k_j − lse_i} v_j.

    Args:
        valid: the keys that there are; None: all.
        causal: query i meets the keys up to i + `offset`.
        valid_queries: the queries that there are; None: all. Others meet no key.

    A query that meets no key has out 0 and lse −∞. Keys and values that a query does not meet change nothing.
    """
    N, M = query.shape[2], key.shape[2]
    query, key, value = cleared(query, valid_queries), cleared(key, valid), cleared(value, valid)
    if valid_queries is not None:
        present = valid_queries[:, None]
        out, lse = exact_partial(query, key, value, valid, causal=causal, offset=offset, scale=scale)
        return out.masked_fill(~present[..., None], 0.0), lse.masked_fill(~present, -torch.inf)
    if causal and not (key.isfinite().all() and value.isfinite().all()):
        return pair_by_pair(query, key, value, valid, offset=offset, scale=scale)
    if valid is None and (not causal or offset == 0):
        return fused_partial(query, key, value, None, causal=causal, scale=scale)
    allowed = torch.ones(1, 1, 1, M, dtype=torch.bool, device=query.device) if valid is None else valid[:, None, None]
    if causal:
        allowed = allowed & torch.ones(N, M, dtype=torch.bool, device=query.device).tril(offset)
    return fused_partial(query, key, value, allowed, scale=scale)


def pair_by_pair(
    query: Tensor, key: Tensor, value: Tensor, valid: Tensor | None, *, offset: int, scale: float
) -> tuple[Tensor, Tensor]:
    """`exact_partial` under a causal mask for numbers that are not finite, without products in which 0·∞ is NaN."""
    H, N, M = query.shape[1], query.shape[2], key.shape[2]
    query, key, value = upcast(query, repeat_heads(key, H), repeat_heads(value, H))
    allowed = torch.ones(N, M, dtype=torch.bool, device=query.device).tril(offset)[None, None]
    allowed = allowed if valid is None else allowed & valid[:, None, None]
    logits = query @ key.mT * scale
    weights = visible_softmax(logits, allowed)
    rows = [
        torch.where(allowed[:, :, i, :, None], weights[:, :, i, :, None] * value, 0.0).sum(2, keepdim=True)
        for i in range(N)
    ]
    return torch.cat(rows, 2), visible_logsumexp(logits, allowed)
