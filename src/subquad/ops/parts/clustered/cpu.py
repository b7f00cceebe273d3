"""Clustered and improved clustered attention in compiled code, in fp32, bf16 or fp16."""

from typing import Any

import torch
from torch import Tensor

from subquad.ops.native import interface
from subquad.ops.parts.clustered.op import clustered_attention, clustered_backward, clustered_forward
from subquad.randomness import orthogonal

SAVED = (
    "order",
    "offsets",
    "top",
    "centroids",
    "rest",
    "lse",
    "mass",
)  # what forwards gives besides `out`, in its order


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
    inputs = _inputs("clustered_forward", query, key, value, query_real, key_real, clusters, topk, scale)
    out, *saved = outputs
    interface.run(
        "clustered_forward",
        inputs=inputs,
        bits=bits,
        iterations=iterations,
        planes=orthogonal(seed, bits, query.shape[3], like=interface.FLOAT32),
        out=out,
        saved=dict(zip(SAVED, saved, strict=True)),
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
    inputs = _inputs("clustered_backward", query, key, value, query_real, key_real, clusters, topk, scale)
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
    saved = order, offsets, top, centroids, rest, lse, mass
    interface.run(
        "clustered_backward",
        inputs=inputs,
        saved={name: x.contiguous() for name, x in zip(SAVED, saved, strict=True)},
        grad_out=grad_out,
        **dict(zip(("grad_query", "grad_key", "grad_value"), grads, strict=True)),
    )


def _inputs(
    op: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_real: Tensor | None,
    key_real: Tensor | None,
    clusters: int,
    topk: int,
    scale: float,
) -> dict[str, Any]:
    """What both directions read, checked."""
    (B, H, N, D), (_, G, M, E) = query.shape, value.shape
    interface.check(
        op,
        key=(key, query.dtype, (B, G, M, D)),
        value=(value, query.dtype, (B, G, M, E)),
        query_real=(query_real, torch.bool, (B, N)),
        key_real=(key_real, torch.bool, (B, M)),
    )
    work = B * H * (clusters * M + N * topk) * (D + E)
    return (
        {"B": B, "H": H, "G": G, "N": N, "M": M, "D": D, "E": E, "clusters": clusters, "topk": topk}
        | {"query": query, "key": key, "value": value, "query_real": query_real, "key_real": key_real}
        | {"scale": scale, "dtype": query.dtype, "threads": interface.threads(work)}
    )
