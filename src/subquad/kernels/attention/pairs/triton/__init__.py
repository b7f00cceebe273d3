"""Attention inside buckets on GPUs: partials of the slots of each block, which are merged for each query.

Backward, gradients are computed slot by slot too and summed for each token. Both keep one vector in fp32 for each slot
in memory: with buckets that share few tokens that is about as much as one fp32 copy of the queries, or of the keys.
"""

from typing import Any

import torch
from torch import Tensor

from subquad.kernels.attention.pairs.op import attend_pairs, pairs_backward, pairs_forward
from subquad.kernels.attention.pairs.triton.attend import attend_blocks
from subquad.kernels.attention.pairs.triton.bucket_sets import sets_of, slot_index
from subquad.kernels.attention.pairs.triton.combine import merge_slots, sum_slots
from subquad.kernels.attention.pairs.triton.differentiate import differentiate_keys, differentiate_queries
from subquad.kernels.attention.pairs.triton.single import attend_single, differentiate_single, is_single
from subquad.kernels.triton import refusal_of
from subquad.kernels.triton.launch import rows, strides

MOST_HIDDEN = 1 << 31  # pairs of a head in `hidden`


@attend_pairs.refusal("triton")
def refusal(x: Any) -> str | None:
    """The reason why the kernels cannot take this call; None if they can."""
    if x.of_distance is not None:
        return "the kernels add nothing to the logits by distance"
    if x.dropout_p > 0:
        return f"dropout_p={x.dropout_p}, and the kernels have no dropout"
    if x.shown is not None:
        return "the kernels count all pairs of a block, and `shown` names some"
    if x.by_features:
        return "by_features=True, and the kernels' logits are products"
    if x.union:
        return "union=True, and the kernels count a key as often as it shares a bucket with the query"
    if x.hidden is not None and x.hidden.shape[2] * x.hidden.shape[3] >= MOST_HIDDEN:
        return f"`hidden` has {x.hidden.shape[2]:,} rows of {x.hidden.shape[3]:,} keys, too many for offsets of 32 bits"
    return refusal_of(x.query, x.key, x.value)


@pairs_forward.on("triton")
def forward(outputs: tuple[Tensor, Tensor, Tensor], x: Any) -> None:
    """The Triton backend of `attend_pairs`: (out, lse)."""
    out, lse, _ = outputs  # the residual of lse is for backends whose backward pass reads it
    at = slot_index(x.queries, x.query.shape[2])
    slots = at.order.shape
    partials, lses = lse.new_empty(*slots, x.value.shape[3]), lse.new_empty(slots)
    for each in sets_of(x):
        (attend_single if is_single(each) else attend_blocks)(x, each, partials, lses)
    merge_slots(partials, lses, at, out, lse)


@pairs_backward.on("triton")
def backward(grads: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], x: Any) -> None:
    """Gradients of query, key, value and key_bias."""
    of_query, of_key, of_value, of_bias, _ = grads
    (_, _, N, D), (_, _, M, E), inputs = x.query.shape, x.value.shape, _inputs_of(x)
    of_queries, of_keys = slot_index(x.queries, N), slot_index(x.keys, M)
    parts = of_query.new_empty(*of_queries.order.shape, D)
    keys, values = (of_key.new_empty(*of_keys.order.shape, width) for width in (D, E))
    biases = None if x.key_bias is None else of_bias.new_empty(*of_keys.order.shape, 1)
    for each in sets_of(x):
        if is_single(each):
            differentiate_single(x, each, inputs, parts, keys, values, biases)
        else:
            differentiate_queries(x, each, inputs, parts)
            differentiate_keys(x, each, inputs, keys, values, biases)
    sum_slots(parts, of_queries, of_query)
    sum_slots(keys, of_keys, of_key)
    sum_slots(values, of_keys, of_value)
    if biases is not None:
        sum_slots(biases, of_keys, of_bias[..., None])


def _inputs_of(x: Any) -> dict[str, Any]:
    """The gradient of the output in the values' dtype, and lse and δ = dout·out − dlse, as arguments of a kernel."""
    (grad, of_lse, _), (out, lse, _) = x.grads, x.outputs
    grad = torch.zeros_like(out) if grad is None else grad
    delta = (grad * out).sum(-1)
    delta = delta if of_lse is None else delta - of_lse
    grad = rows(grad.to(x.value.dtype))
    return {"grad": grad, **strides("grad", grad), "lse": lse.contiguous(), "delta": delta.contiguous()}
