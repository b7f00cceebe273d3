"""Attention by features in compiled code, which computes in fp32."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from subquad.ops.native import interface
from subquad.ops.parts.features.op import feature_attention, features_backward, features_forward, products
from subquad.ops.precision import wide

PITCH = 16  # of the projections' rows, as in feature_state.hpp


@feature_attention.refusal("cpu")
def refusal(query: Tensor, *_: object, **__: object) -> str | None:
    """Why the compiled kernels cannot take this call; None where they can."""
    return interface.refusal(query)


@features_forward.on("cpu")
def forward(
    outputs: tuple[Tensor, Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    of_query: Tensor | None,
    of_key: Tensor | None,
    feature_bias: Tensor | None,
    key_bias: Tensor | None,
    block: int,
    lag: int,
) -> None:
    """As `feature_attention`: (out, lse)."""
    query, key, value = wide(query, key, value)
    inputs = _inputs(query, key, value, of_query, of_key, feature_bias, key_bias, block, lag, passes=1)
    out, lse = outputs
    interface.run("feature_forward", inputs=inputs, out=out, lse=lse)


@features_backward.on("cpu")
def backward(
    grads: tuple[Tensor, Tensor, Tensor, Tensor],
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    of_query: Tensor | None,
    of_key: Tensor | None,
    feature_bias: Tensor | None,
    key_bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    block: int,
    lag: int,
) -> None:
    """Gradients of query, key, value and key_bias; the last is empty where there is no bias."""
    query, key, value = wide(query, key, value)
    inputs = _inputs(query, key, value, of_query, of_key, feature_bias, key_bias, block, lag, passes=3)
    *of_inputs, of_bias = grads
    shared = key_bias is not None and key_bias.shape[1] < key.shape[1]  # a bias that heads share gets the sum of theirs
    of_heads = query.new_empty(key.shape[:3]) if shared else of_bias
    interface.run(
        "feature_backward",
        inputs=inputs,
        out=out,
        grad_out=grad_out,
        lse=lse,
        grad_lse=grad_lse,
        **dict(zip(("grad_query", "grad_key", "grad_value"), of_inputs, strict=True)),
        grad_key_bias=None if key_bias is None else of_heads,
    )
    if shared:
        of_bias.copy_(of_heads.sum(1, keepdim=True))


def _inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    of_query: Tensor | None,
    of_key: Tensor | None,
    feature_bias: Tensor | None,
    key_bias: Tensor | None,
    block: int,
    lag: int,
    *,
    passes: int,
) -> dict[str, Any]:
    """What both directions read, checked."""
    shapes = [None if x is None else x.shape for x in (query, key, value, of_query, of_key)]
    work = products(*shapes, block, lag)
    (B, H, N, D), (_, G, M, C), E = query.shape, key.shape, value.shape[3]
    if block < 0 or lag < 0 or (block > 0 and N != M):
        raise ValueError(f"feature_attention: a pattern of {(block, lag)} does not go with {N} queries and {M} keys")
    interface.check(
        "feature_attention",
        value=(value, query.dtype, (B, G, M, E)),
        key=(key, query.dtype, (B, G, M, C)),
    )
    of_query, of_key = _whole_rows(of_query), _whole_rows(of_key)
    R = D if of_query is None else of_query.shape[1]
    return (
        {"B": B, "H": H, "G": G, "N": N, "M": M, "E": E, "features": R, "query_width": D, "key_width": C}
        | {"query": query, "key": key, "value": value, "key_bias": key_bias}
        | {"of_query": of_query, "of_key": of_key, "feature_bias": feature_bias}
        | {"of_query_head": _between(of_query, 0), "of_key_head": _between(of_key, 0)}
        | {"feature_bias_head": _between(feature_bias, 0)}
        | {"key_bias_batch": _between(key_bias, 0), "key_bias_head": _between(key_bias, 1)}
        | {"block": block, "lag": lag, "threads": interface.threads(passes * work)}
    )


def _whole_rows(of_side: Tensor | None) -> Tensor | None:
    """Rows of whole vectors, filled up with zeros."""
    return None if of_side is None else F.pad(of_side, (0, -of_side.shape[2] % PITCH)).contiguous()


def _between(x: Tensor | None, axis: int) -> int:
    """Elements from one of the axis to the next, of a contiguous tensor; 0 where one serves all."""
    return 0 if x is None or x.shape[axis] == 1 else x.shape[axis + 1 :].numel()
