"""Clustered and improved clustered attention in compiled code, in fp32, bf16 or fp16."""

from typing import Any

import torch
from torch import Tensor

from subquad.ops.native import interface
from subquad.ops.native.interface import pointer, rows, with_contiguous_rows
from subquad.ops.parts.clustered.op import clustered_attention, clustered_backward, clustered_forward
from subquad.randomness import orthogonal


@clustered_attention.refusal("cpu")
def refusal(query: Tensor, *_: object, dropout_p: float = 0.0, wants_lse: bool = False, **__: object) -> str | None:
    """Why the compiled kernels cannot take this call; None where they can."""
    if dropout_p > 0:
        return f"dropout_p={dropout_p}, and the kernels have no dropout"
    if wants_lse:
        return "the kernels give no log-sum-exp of a query"
    return interface.refusal(query)


@clustered_forward.on("cpu")
def forward(outputs: tuple[Tensor, ...], x: Any) -> None:
    """The output, and all that `Saved` holds, in its order."""
    (query, key, value), masks = _inputs("clustered_forward", x)
    planes = orthogonal(x.seed, x.bits, query.shape[3], like=interface.FLOAT32)
    out, *saved = outputs
    interface.run(
        "forward",
        interface.Forward(
            interface.sizes(query, key, value, clusters=x.clusters, topk=x.topk, iterations=x.iterations),
            *(rows(t) for t in (query, key, value, out)),
            *(pointer(t) for t in masks),
            pointer(planes),
            x.bits,
            x.scale,
            interface.Saved(*(pointer(t) for t in saved)),
        ),
    )


@clustered_backward.on("cpu")
def backward(grads: tuple[Tensor, Tensor, Tensor], x: Any) -> None:
    """Gradients of query, key and value.

    Raises:
        ValueError: order, offsets and top hold numbers that the forward pass cannot have made.
    """
    (query, key, value), masks = _inputs("clustered_backward", x)
    (B, H, N, D), E, C, grad_out = query.shape, value.shape[3], x.clusters, x.grads[0]
    grad_out = torch.zeros_like(x.outputs[0]) if grad_out is None else grad_out
    order, offsets, top, centroids, rest, lse, mass = x.outputs[1:]
    interface.check(
        "clustered_backward",
        grad_out=(grad_out, query.dtype, (B, H, N, E)),
        order=(order, torch.int32, (B, H, N)),
        offsets=(offsets, torch.int32, (B, H, C + 1)),
        top=(top, torch.int32, (B, H, C, x.topk)),
        centroids=(centroids, torch.float32, (B, H, C, D)),
        rest=(rest, torch.float32, (B, H, C, E)),
        lse=(lse, torch.float32, (B, H, C)),
        mass=(mass, torch.float32, (B, H, C)),
    )
    grad_out, saved = with_contiguous_rows(grad_out), [t.contiguous() for t in x.outputs[1:]]
    interface.run(
        "backward",
        interface.Backward(
            interface.sizes(query, key, value, clusters=C, topk=x.topk, iterations=0),
            *(rows(t) for t in (query, key, value, grad_out, *grads)),
            *(pointer(t) for t in masks),
            x.scale,
            interface.Saved(*(pointer(t) for t in saved)),
        ),
    )


def _inputs(op: str, x: Any) -> tuple[list[Tensor], list[Tensor | None]]:
    """Query, key and value, and what is real of queries and keys, as the kernels read them."""
    (B, _, N, D), (_, G, M, E), dtype = x.query.shape, x.value.shape, x.query.dtype
    interface.check(
        op,
        key=(x.key, dtype, (B, G, M, D)),
        value=(x.value, dtype, (B, G, M, E)),
        query_real=(x.query_real, torch.bool, (B, N)),
        key_real=(x.key_real, torch.bool, (B, M)),
    )
    masks = [None if t is None else t.contiguous() for t in (x.query_real, x.key_real)]
    return [with_contiguous_rows(t) for t in (x.query, x.key, x.value)], masks
