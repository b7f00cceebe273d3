"""Clustered and improved clustered attention in compiled code, in fp32, bf16 or fp16."""

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
def forward(
    outputs: tuple[Tensor, ...],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_real: Tensor | None,
    key_real: Tensor | None,
    clusters: int,
    topk: int,
    bits: int,
    iterations: int,
    scale: float,
    seed: int,
) -> None:
    """The output, and all that `Saved` holds, in its order."""
    _check("clustered_forward", query, key, value, query_real, key_real)
    query, key, value = (with_contiguous_rows(x) for x in (query, key, value))
    query_real, key_real = (None if x is None else x.contiguous() for x in (query_real, key_real))
    planes = orthogonal(seed, bits, query.shape[3], like=interface.FLOAT32)
    out, *saved = outputs
    interface.run(
        "forward",
        interface.Forward(
            interface.sizes(query, key, value, clusters=clusters, topk=topk, iterations=iterations),
            *(rows(x) for x in (query, key, value, out)),
            pointer(query_real),
            pointer(key_real),
            pointer(planes),
            bits,
            scale,
            interface.Saved(*(pointer(x) for x in saved)),
        ),
    )


@clustered_backward.on("cpu")
def backward(
    grads: tuple[Tensor, Tensor, Tensor],
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_real: Tensor | None,
    key_real: Tensor | None,
    order: Tensor,
    offsets: Tensor,
    top: Tensor,
    centroids: Tensor,
    rest: Tensor,
    lse: Tensor,
    mass: Tensor,
    clusters: int,
    topk: int,
    scale: float,
) -> None:
    """Gradients of query, key and value.

    Raises:
        ValueError: `order`, `offsets` and `top` hold numbers that the forward pass cannot have made.
    """
    _check("clustered_backward", query, key, value, query_real, key_real)
    (B, H, N, D), E, C = query.shape, value.shape[3], clusters
    interface.check(
        "clustered_backward",
        grad_out=(grad_out, query.dtype, (B, H, N, E)),
        order=(order, torch.int32, (B, H, N)),
        offsets=(offsets, torch.int32, (B, H, C + 1)),
        top=(top, torch.int32, (B, H, C, topk)),
        centroids=(centroids, torch.float32, (B, H, C, D)),
        rest=(rest, torch.float32, (B, H, C, E)),
        lse=(lse, torch.float32, (B, H, C)),
        mass=(mass, torch.float32, (B, H, C)),
    )
    grad_out, query, key, value = (with_contiguous_rows(x) for x in (grad_out, query, key, value))
    query_real, key_real = (None if x is None else x.contiguous() for x in (query_real, key_real))
    saved = [x.contiguous() for x in (order, offsets, top, centroids, rest, lse, mass)]
    interface.run(
        "backward",
        interface.Backward(
            interface.sizes(query, key, value, clusters=clusters, topk=topk, iterations=0),
            *(rows(x) for x in (query, key, value, grad_out, *grads)),
            pointer(query_real),
            pointer(key_real),
            scale,
            interface.Saved(*(pointer(x) for x in saved)),
        ),
    )


def _check(
    op: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_real: Tensor | None,
    key_real: Tensor | None,
) -> None:
    (B, _, N, D), (_, G, M, E) = query.shape, value.shape
    interface.check(
        op,
        key=(key, query.dtype, (B, G, M, D)),
        value=(value, query.dtype, (B, G, M, E)),
        query_real=(query_real, torch.bool, (B, N)),
        key_real=(key_real, torch.bool, (B, M)),
    )
