"""Attention by features in compiled code, which computes in fp32."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.attention.features.op import (
    check_pattern,
    feature_attention,
    features_backward,
    features_forward,
    products,
)
from subquad.kernels.native import interface
from subquad.kernels.operators import shapes_of
from subquad.kernels.precision import upcast

PITCH = 16  # of the projections' rows, as in feature_state.hpp


@feature_attention.refusal("cpu")
def refusal(x: Any) -> str | None:
    """The reason why the compiled kernels cannot take this call; None if they can."""
    return interface.refusal(x.query)


@features_forward.on("cpu")
def forward(outputs: tuple[Tensor, Tensor, Tensor], x: Any) -> None:
    """The CPU backend of `feature_attention`: (out, lse), and the residual of lse."""
    out, lse, residual = outputs
    interface.run("feature_forward", inputs=_inputs(x, passes=1), out=out, lse=lse, residual=residual)


@features_backward.on("cpu")
def backward(grads: tuple[Tensor, Tensor, Tensor, Tensor], x: Any) -> None:
    """Gradients of query, key, value and key_bias."""
    *of_inputs, of_bias = grads
    grad_out, grad_lse, _ = x.grads
    # The kernel gives each key head its own; a bias that they share gets the sum.
    shared = x.key_bias is not None and x.key_bias.shape[1] < x.key.shape[1]
    of_heads = of_bias.new_empty(x.key.shape[:3]) if shared else of_bias
    interface.run(
        "feature_backward",
        inputs=_inputs(x, passes=3),
        **dict(zip(("out", "lse", "residual"), x.outputs, strict=True)),
        grad_out=grad_out,
        grad_lse=grad_lse,
        **dict(zip(("grad_query", "grad_key", "grad_value"), of_inputs, strict=True)),
        grad_key_bias=None if x.key_bias is None else of_heads,
    )
    if shared:
        of_bias.copy_(of_heads.sum(1, keepdim=True))


def _inputs(x: Any, *, passes: int) -> dict[str, Any]:
    """The checked inputs of the forward and backward kernels."""
    query, key, value = upcast(x.query, x.key, x.value)
    (B, H, N, D), (_, G, M, C), E = query.shape, key.shape, value.shape[3]
    check_pattern(x)
    R = D if x.of_query is None else x.of_query.shape[1]
    of_keys = (B, G, M, R if x.of_key is None else C)
    of_values = value, query.dtype, (B, G, M, E)
    interface.check("feature_attention", (H, G), value=of_values, key=(key, query.dtype, of_keys))
    for name, heads, *widths in (("of_query", H, R, D), ("of_key", G, R, C), ("feature_bias", H, R)):
        each = getattr(x, name)
        if each is not None:  # one serves all heads
            shape = (heads if len(each) > 1 else 1, *widths)
            interface.check("feature_attention", **{name: (each, each.dtype, shape)})
    if x.key_bias is not None:  # of each item, one serves all heads
        shape = (B, G if x.key_bias.shape[1] > 1 else 1, M)
        interface.check("feature_attention", key_bias=(x.key_bias, x.key_bias.dtype, shape))
    of_query, of_key = _whole_rows(x.of_query), _whole_rows(x.of_key)
    return (
        {"B": B, "H": H, "G": G, "N": N, "M": M, "E": E, "features": R, "query_width": D, "key_width": C}
        | {"query": query, "key": key, "value": value, "key_bias": x.key_bias}
        | {"of_query": of_query, "of_key": of_key, "feature_bias": x.feature_bias}
        | {"of_query_head": _between(of_query, 0), "of_key_head": _between(of_key, 0)}
        | {"feature_bias_head": _between(x.feature_bias, 0)}
        | {"key_bias_batch": _between(x.key_bias, 0), "key_bias_head": _between(x.key_bias, 1)}
        | {"block": x.block, "lag": x.lag, "threads": interface.threads(passes * products(shapes_of(x)))}
    )


def _whole_rows(of_side: Tensor | None) -> Tensor | None:
    """Rows of whole vectors, filled up with zeros."""
    return None if of_side is None else F.pad(of_side, (0, -of_side.shape[2] % PITCH)).contiguous()


def _between(x: Tensor | None, axis: int) -> int:
    """Elements from one of the axis to the next, of a contiguous tensor; 0 where one serves all."""
    return 0 if x is None or x.shape[axis] == 1 else x.shape[axis + 1 :].numel()
