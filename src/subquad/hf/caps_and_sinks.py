"""Exact attention with what some models add to the softmax: capped logits and sinks.

    logits_ij = c · tanh(scale · q_i·k_j / c)          "softcap", Gemma 2
    weights_ij = e^{logits_ij} / (e^{s_h} + Σ_j e^{logits_ij})          sinks s_h of each head, GPT-OSS

SDPA has neither. For a few queries without a gradient, such as steps on a cache, this library's kernel computes them:
sinks are a factor of the outputs, σ(lse_i − s_h). Otherwise this computes the logits, for a block of queries after the
other: memory is O(BLOCK·M) per head.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from subquad.kernels.attention.steps.op import attend_few
from subquad.kernels.tensors import differentiated
from subquad.kernels.tokens.heads import repeat_heads
from subquad.masks import Mask
from subquad.methods.core.call import Call
from subquad.methods.core.exact import few_arguments

BLOCK = 512  # queries at a time


def attend_with_caps_and_sinks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Exact attention with capped logits, sinks (H,), or both; 0 where a query sees no key. (B,H,N,D) in and out."""
    call = Call(mask, None, query.shape[-1] ** -0.5 if scale is None else scale, dropout_p, seed=0)
    one_dtype = query.dtype == key.dtype == value.dtype  # under autocast, rotary positions widen queries and keys alone
    few = few_arguments(query, key, value, call) if one_dtype else None
    partial = None
    if few is not None and not differentiated(*(() if sinks is None else (sinks,))):
        check_sinks(sinks, query.shape[1])
        partial = attend_few.if_taken(*few[0], softcap=softcap, **few[1])
    if partial is not None:
        out, lse = partial
        if sinks is None:
            return out
        shares = (lse - sinks.to(lse.dtype).view(-1, 1)).sigmoid().masked_fill(lse.isneginf(), 0.0)
        return out * shares[..., None].to(out.dtype)
    return torch.cat([out for out, _ in _blocks(query, key, value, mask, scale, softcap, sinks, dropout_p)], 2)


def attend_with_weights(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask, *, scale: float | None = None, dropout_p: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Exact attention, and its weights (B,H,N,M); both 0 where a query sees no key."""
    outputs, weights = zip(*_blocks(query, key, value, mask, scale, None, None, dropout_p), strict=True)
    return torch.cat(outputs, 2), torch.cat(weights, 2)


def check_sinks(sinks: Tensor | None, heads: int) -> None:
    """Raise ValueError if there is another number of sinks than of heads."""
    if sinks is not None and sinks.numel() != heads:
        raise ValueError(
            f"sinks are {tuple(sinks.shape)}, but there are {heads} heads; subquad supports one sink per head"
        )


def _blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    dropout_p: float,
) -> Iterator[tuple[Tensor, Tensor]]:
    """The outputs and the weights of one block of queries after the other."""
    B, H, N, D = query.shape
    check_sinks(sinks, H)
    scale = D**-0.5 if scale is None else scale
    key, value = repeat_heads(key, H), repeat_heads(value, H)
    visible = mask.visible(N, key.shape[2], query.device)
    upcast = torch.promote_types(query.dtype, torch.float32)
    for start in range(0, N, BLOCK):
        rows = slice(start, start + BLOCK)
        logits = (query[:, :, rows] @ key.mT * scale).to(upcast)
        if softcap is not None:
            logits = (logits / softcap).tanh() * softcap
        if visible is not None:
            allowed = visible if visible.shape[2] == 1 else visible[:, :, rows]
            logits = logits.masked_fill(~allowed, torch.finfo(logits.dtype).min)
        if sinks is not None:
            of_head = sinks.to(upcast).view(1, H, 1, 1).expand(B, H, logits.shape[2], 1)
            weights = torch.cat([logits, of_head], -1).softmax(-1)[..., :-1]
        else:
            weights = logits.softmax(-1)
        if visible is not None:
            weights = weights.masked_fill(~allowed.any(-1, keepdim=True), 0.0)
        weights = torch.nn.functional.dropout(weights.to(value.dtype), dropout_p)
        yield weights @ value, weights
