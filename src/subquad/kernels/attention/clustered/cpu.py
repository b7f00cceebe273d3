"""Clustered and improved clustered attention in compiled code, in fp32, bf16 or fp16."""

from typing import Any

import torch
from torch import Tensor

from subquad.core.randomness import orthogonal
from subquad.kernels.attention.clustered.centroids import attend_and_list, lists_of
from subquad.kernels.attention.clustered.op import clustered_attention, clustered_backward, clustered_forward
from subquad.kernels.native import interface

# The outputs of the forward pass between `out` and the queries' log-sum-exp, in its order.
SAVED = ("order", "offsets", "top", "centroids", "rest", "lse", "mass", "residual")


@clustered_attention.refusal("cpu")
def refusal(x: Any) -> str | None:
    """The reason why the compiled kernels cannot take this call; None if they can."""
    if x.dropout_p > 0:
        return f"dropout_p={x.dropout_p}, and the kernels have no dropout"
    return interface.refusal(x.query)


@attend_and_list.refusal("cpu")
def refusal_of_few(x: Any) -> str | None:
    """The reason why the compiled kernels cannot take these queries; None if they can."""
    return interface.refusal(x.query)


@lists_of("cpu")
def numbers(top: Tensor, valid: Tensor | None, keys: int) -> Tensor:
    """Keys by their ranks among the real ones; where there are fewer, any numbers follow."""
    top = top.long()
    if valid is None:
        return top
    count = valid.sum(1)[:, None, None, None]
    positions = (~valid).byte().argsort(dim=1, stable=True)
    tokens = positions[:, None, None].expand(*top.shape[:3], keys).gather(3, top.clamp(max=keys - 1))
    return torch.where(torch.arange(top.shape[3], device=top.device) < count, tokens, keys)


@clustered_forward.on("cpu")
def forward(outputs: tuple[Tensor, ...], x: Any) -> None:
    """The output, all that the backward pass needs, and the log-sum-exp.

    Raises:
        ValueError: a label of a query that is not padding is not the number of a cluster.
    """
    out, *saved, lse = outputs
    planes = orthogonal(x.seed, x.bits, x.query.shape[3], like=interface.FLOAT32) if x.labels is None else None
    interface.run(
        "clustered_forward",
        inputs=_inputs("clustered_forward", x),
        bits=x.bits,
        iterations=x.iterations,
        planes=planes,
        labels=x.labels,
        out=out,
        saved=dict(zip(SAVED, saved, strict=True)),
        query_lse=lse if x.wants_lse else None,
    )


@clustered_backward.on("cpu")
def backward(grads: tuple[Tensor, Tensor, Tensor], x: Any) -> None:
    """Gradients of query, key and value.

    Raises:
        ValueError: order, offsets and top hold numbers that the forward pass cannot have made.
    """
    inputs, (_, *lists, _), (grad_out, *_, grad_lse) = _inputs("clustered_backward", x), x.outputs, x.grads
    grad_lse = grad_lse if x.wants_lse else None  # compilers hand on the gradient of the empty one
    (B, H, N, D), E, C = x.query.shape, x.value.shape[3], x.clusters
    saved = dict(zip(SAVED, lists, strict=True))
    shapes = (B, H, N), (B, H, C + 1), (B, H, C, x.topk), (B, H, C, D), (B, H, C, E), *[(B, H, C)] * 3
    dtypes = [torch.int32] * 3 + [torch.float32] * 5
    fitting = {name: (saved[name], *expected) for name, *expected in zip(SAVED, dtypes, shapes, strict=True)}
    interface.check(
        "clustered_backward",
        grad_out=(grad_out, x.query.dtype, (B, H, N, E)),
        grad_lse=(grad_lse, torch.float32, (B, H, N)),
        **fitting,
    )
    interface.run(
        "clustered_backward",
        inputs=inputs,
        saved={name: each.contiguous() for name, each in saved.items()},
        grad_out=grad_out,
        grad_lse=grad_lse,
        **dict(zip(("grad_query", "grad_key", "grad_value"), grads, strict=True)),
    )


def _inputs(op: str, x: Any) -> dict[str, Any]:
    """The checked inputs of the forward and backward kernels."""
    (B, H, N, D), (_, G, M, E), dtype = x.query.shape, x.value.shape, x.query.dtype
    interface.check(
        op,
        (H, G),
        key=(x.key, dtype, (B, G, M, D)),
        value=(x.value, dtype, (B, G, M, E)),
        query_valid=(x.query_valid, torch.bool, (B, N)),
        key_valid=(x.key_valid, torch.bool, (B, M)),
        labels=(x.labels, torch.int64, (B, H, N)),
    )
    cost = B * H * (x.clusters * M + N * x.topk) * (D + E)
    return (
        {"B": B, "H": H, "G": G, "N": N, "M": M, "D": D, "E": E, "clusters": x.clusters, "topk": x.topk}
        | {"query": x.query, "key": x.key, "value": x.value, "query_valid": x.query_valid, "key_valid": x.key_valid}
        | {"scale": x.scale, "dtype": dtype, "threads": interface.threads(cost)}
    )
