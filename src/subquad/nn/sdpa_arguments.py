"""The arguments of `scaled_dot_product_attention`, as those of a method."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.masks import Mask
from subquad.masks.sdpa import IsBias
from subquad.methods.core.halves import future_leak
from subquad.methods.core.method import Method

ENTRY_POINTS = (
    "call sq.attention or sq.nn.MultiheadAttention in a layer of your own, or use sq.nn.swap for layers of torch or "
    "timm and sq.hf.swap for transformers models"
)
Prepared = tuple[Any, ...]  # what `Method.run` takes


def mask_and_bias(
    method: Method,
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    named: str = "`attn_mask`",
) -> tuple[Mask, Tensor | None]:
    """`attn_mask` and `is_causal` as a mask and a bias: `Mask.from_sdpa` where it understands them.

    Other patterns become a dense mask, and other numbers a bias, if the method supports them. Errors as `from_sdpa`,
    and ValueError for a mask that does not broadcast to the attention of this query (B,H,N,D) and key (B,G,M,D).
    Messages call the mask `named`, as the caller does.
    """
    attn_mask = _of_all_keys(attn_mask, query, key)
    try:
        return Mask.from_sdpa(attn_mask, is_causal, batch=query.shape[0]), None
    except ValueError as error:
        if attn_mask is None or is_causal:
            raise
        whole = attn_mask[(None,) * (4 - attn_mask.ndim)]
        if attn_mask.dtype == torch.bool and method.traits.dense_mask:
            return Mask.dense(whole), None
        if attn_mask.is_floating_point() and method.traits.bias:
            return Mask(), whole
        if isinstance(error, IsBias):
            raise ValueError(
                f"{named} contains floats that are added to the logits (other numbers than 0 and −inf, or a gradient "
                f"is required), which {method.name!r} does not support; give a bool mask, or use method='full'"
            ) from error
        raise


def _of_all_keys(attn_mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """The mask with all M keys, which SDPA broadcasts from a last axis of 1; ValueError if it does not broadcast."""
    if not isinstance(attn_mask, Tensor) or not 2 <= attn_mask.ndim <= 4 or not query.ndim == key.ndim == 4:
        return attn_mask  # None, or what others refuse
    sizes = (*query.shape[:3], key.shape[2])
    if any(have not in (1, size) for have, size in zip(attn_mask.shape, sizes[-attn_mask.ndim :], strict=True)):
        raise ValueError(f"`attn_mask` is {tuple(attn_mask.shape)}, which does not broadcast to attention of {sizes}")
    return attn_mask.expand(*attn_mask.shape[:-1], sizes[-1])


def prepare_sdpa(
    method: Method,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Prepared:
    """Check a call of SDPA as `Method.prepare` does, and return what `Method.run` takes.

    Raises:
        TypeError, ValueError: the method cannot take the call, in one line with the reason.
    """
    if dropout_p:
        raise ValueError(
            f"dropout_p={dropout_p}: what a method drops is not what SDPA drops; call eval(), or set the model's "
            "attention dropout to 0"
        )
    if query.is_nested or key.is_nested or value.is_nested:
        raise ValueError("nested tensors: sq.attention accepts them, but a call of SDPA has no padded form here")
    if query.shape[2:3] != key.shape[2:3] and method.traits.mixes_queries:
        raise ValueError(
            f"{method.name!r} mixes queries, and the queries of cross-attention may come from a causal decoder: the "
            "output at one position would depend on later ones"
        )
    mask, bias = mask_and_bias(method, query, key, attn_mask, is_causal)
    if mask.is_causal and method.traits.leaks_in_training and torch.is_grad_enabled() and query.requires_grad:
        raise ValueError(future_leak(method))
    if not (method.traits.cross or mask.is_causal):
        raise ValueError(
            f"{method.name!r} is for self-attention, and a call of SDPA without a causal mask may be "
            f"cross-attention; {ENTRY_POINTS}"
        )
    return method.prepare(query, key, value, mask=mask, bias=bias, scale=scale, enable_gqa=enable_gqa)


def run_exactly(*args: Any, **kwargs: Any) -> Tensor:
    """SDPA itself, called from here so that `sq.intercept` takes it for one of subquad's own calls, which it leaves."""
    return F.scaled_dot_product_attention(*args, **kwargs)
