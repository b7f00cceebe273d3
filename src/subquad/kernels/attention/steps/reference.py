"""Exact attention of a few queries, in plain PyTorch."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from subquad.kernels.attention.softmax import logsumexp, visible_softmax
from subquad.kernels.precision import upcast
from subquad.kernels.tokens.heads import repeat_heads
from subquad.kernels.tokens.padding import cleared


def attend_few(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M E"],
    valid: Bool[Tensor, "B M"] | None,
    *,
    causal: bool,
    offset: int,
    scale: float,
    offsets: Int[Tensor, "B"] | None = None,
    window: int | None = None,
    softcap: float | None = None,
    valid_queries: Bool[Tensor, "B N"] | None = None,
) -> tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]]:
    """Exact attention of a few queries to any number of keys, and its log-sum-exp in fp32 (fp64 for fp64 inputs).

    Query i of item b is at position i + `offset` + `offsets[b]` among the keys.

    Args:
        valid: the keys that there are; None: all.
        causal: a query meets the keys up to its position.
        window: how far a query sees to each side; with `causal` back. None: however far.
        softcap: c: the logits are c·tanh(scale·q·k / c).
        valid_queries: the queries that there are; None: all. Others meet no key.

    A query that meets no key has out 0 and lse −∞. Keys and values that a query does not meet change nothing.
    """
    dtype, allowed = query.dtype, visible_keys(query, key, valid, causal, offset, offsets, window, valid_queries)
    query, key, value = cleared(query, valid_queries), cleared(key, valid), cleared(value, valid)
    query, key, value = upcast(query, *(repeat_heads(x, query.shape[1]) for x in (key, value)))
    if key.shape[2] == 0:
        out = query.new_zeros(*query.shape[:3], value.shape[3])
        return out.to(dtype), torch.full_like(out[..., 0] if value.shape[3] else query[..., 0], -torch.inf)
    logits = query @ key.mT * scale
    if softcap is not None:
        logits = (logits / softcap).tanh() * softcap
    weights = visible_softmax(logits, allowed)
    if allowed is None or allowed.shape[2] == 1:
        if allowed is not None:
            value = value.masked_fill(~allowed[:, :, 0, :, None], 0.0)
        out = weights @ value
    else:  # 0·∞ is NaN: each query has the values that it meets
        rows = allowed.unbind(2)
        outs = [weights[:, :, i, None] @ value.masked_fill(~row[..., None], 0.0) for i, row in enumerate(rows)]
        out = torch.cat(outs, 2)
    return out.to(dtype), logsumexp(logits if allowed is None else logits.masked_fill(~allowed, -torch.inf))


def visible_keys(
    query: Tensor,
    key: Tensor,
    valid: Tensor | None,
    causal: bool,
    offset: int,
    offsets: Tensor | None,
    window: int | None,
    valid_queries: Tensor | None,
) -> Tensor | None:
    """The keys that each query meets: a bool that broadcasts to (B,H,N,M), or None if each meets all."""
    N, M, device = query.shape[2], key.shape[2], query.device
    allowed = None if valid is None else valid[:, None, None]
    if causal or window is not None:
        first = torch.zeros(1, dtype=torch.long, device=device) if offsets is None else offsets
        at = first[:, None, None, None] + torch.arange(N, device=device)[:, None] + offset
        ahead = torch.arange(M, device=device) - at
        pattern = ahead <= (0 if causal or window is None else window)
        pattern = pattern if window is None else pattern & (ahead >= -window)
        allowed = pattern if allowed is None else allowed & pattern
    if valid_queries is not None:
        present = valid_queries[:, None, :, None]
        allowed = present.expand(-1, -1, -1, M) if allowed is None else allowed & present
    return allowed
