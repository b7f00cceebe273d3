"""The op `attend_and_list`: exact attention of a few queries, and the keys that each gives the largest weights."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from subquad.core.versions import sym_min
from subquad.kernels.attention.clustered.op import clustered_forward
from subquad.kernels.attention.softmax import hide, visible_logsumexp, visible_softmax
from subquad.kernels.dispatch import Op
from subquad.kernels.tokens.heads import repeat_heads

# backend -> the lists of top keys that it saves, as numbers of keys: (top, real keys, how many keys) → (B,H,C,K)
_NUMBERS: dict[str, Callable[[Tensor, Tensor | None, int], Tensor]] = {}


def lists_of(backend: str) -> Callable[[Callable[[Tensor, Tensor | None, int], Tensor]], None]:
    """Register how to read the lists of top keys of a backend."""
    return lambda read: _NUMBERS.update({backend: read})


@Op
def attend_and_list(
    query: Float[Tensor, "B H C D"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M E"],
    valid: Bool[Tensor, "B M"] | None,
    *,
    topk: int,
    scale: float,
) -> tuple[Float[Tensor, "B H C E"], Float[Tensor, "B H C"], Int64[Tensor, "B H C K"]]:
    """(out, lse) of each query over all real keys, and the `topk` of these with the largest logits.

    They come ascending, then M where there are fewer; of equal ones those in front. The gradient flows through out and
    lse. This is `clustered_attention` in which each query is a cluster of its own.
    """
    logits = query @ repeat_heads(key, query.shape[1]).mT * scale
    visible = None if valid is None else valid[:, None, None, :]
    top = _largest(hide(logits.detach(), visible), valid, topk)
    values = repeat_heads(value, query.shape[1])
    return visible_softmax(logits, visible) @ values, visible_logsumexp(logits, visible), top


def _largest(logits: Tensor, valid: Tensor | None, topk: int) -> Int64[Tensor, "B H C K"]:
    M = logits.shape[3]
    top = logits.sort(dim=-1, descending=True, stable=True).indices[..., :topk]
    if valid is not None:
        top = torch.where(valid[:, None, None].expand_as(logits).gather(3, top), top, M)
    return top.sort(dim=-1).values


@attend_and_list.compiled
def run(backend: str, x: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Run on a compiled backend."""
    (B, H, C, _), M = x.query.shape, x.key.shape[2]
    labels = torch.arange(C, device=x.query.device).expand(B, H, C).contiguous()
    settings = C, sym_min(x.topk, M), 1, 0, x.scale, 0, True
    out, _, _, top, *_, lse = clustered_forward.run(backend, x.query, x.key, x.value, None, x.valid, labels, *settings)
    return out, lse, _NUMBERS[backend](top, x.valid, M)
