"""Attention by features in compiled code, which computes in fp32."""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from subquad.ops.native import interface
from subquad.ops.native.interface import pointer, rows, with_contiguous_rows
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
    call = _described(query, key, value, of_query, of_key, feature_bias, key_bias, block, lag, passes=1)
    out, lse = outputs
    interface.run("feature_forward", interface.FeatureForward(call.sizes, call.inputs, rows(out), pointer(lse)))


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
    call = _described(query, key, value, of_query, of_key, feature_bias, key_bias, block, lag, passes=3)
    of_bias = grads[3]  # of all key heads; a bias that they share gets the sum
    shared = key_bias is not None and key_bias.shape[1] < key.shape[1]
    of_bias = query.new_empty(key.shape[:3]) if shared else of_bias
    grad_out = None if grad_out is None else with_contiguous_rows(grad_out)
    out, lse = with_contiguous_rows(out), lse.contiguous()
    grad_lse = None if grad_lse is None else grad_lse.contiguous()
    interface.run(
        "feature_backward",
        interface.FeatureBackward(
            call.sizes,
            call.inputs,
            rows(out),
            interface.Rows() if grad_out is None else rows(grad_out),
            *(rows(x) for x in grads[:3]),
            pointer(lse),
            pointer(grad_lse),
            None if key_bias is None else pointer(of_bias),
        ),
    )
    if shared:
        grads[3].copy_(of_bias.sum(1, keepdim=True))


class _Call(NamedTuple):
    """A call's axes and inputs, and the tensors that hold these."""

    sizes: interface.Sizes
    inputs: interface.FeatureInputs
    held: tuple[Tensor | None, ...]


def _described(
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
) -> _Call:
    shapes = [None if x is None else x.shape for x in (query, key, value, of_query, of_key)]
    work = products(*shapes, block, lag)
    (B, H, N, D), (_, G, M, C) = query.shape, key.shape
    R = D if of_query is None else of_query.shape[1]
    sizes = interface.Sizes(B, H, G, N, M, D, value.shape[3], R, C, 0, 0, interface.threads(passes * work))
    if block < 0 or lag < 0 or (block > 0 and N != M):
        raise ValueError(f"feature_attention: a pattern of {(block, lag)} does not go with {N} queries and {M} keys")
    interface.check(
        "feature_attention",
        value=(value, query.dtype, (B, G, M, value.shape[3])),
        key=(key, query.dtype, (B, G, M, C)),
    )
    sides = [with_contiguous_rows(x) for x in (query, key, value)]
    maps = [_whole_rows(of_query), _whole_rows(of_key)]
    maps += [None if x is None else x.contiguous() for x in (feature_bias, key_bias)]
    between = (_between(x, axis) for x, axis in zip((*maps, key_bias), (0, 0, 0, 0, 1), strict=True))
    inputs = interface.FeatureInputs(*(rows(x) for x in sides), *(pointer(x) for x in maps), *between, block, lag)
    return _Call(sizes, inputs, (*sides, *maps))


def _whole_rows(of_side: Tensor | None) -> Tensor | None:
    """Rows of whole vectors, filled up with zeros."""
    return None if of_side is None else F.pad(of_side, (0, -of_side.shape[2] % PITCH)).contiguous()


def _between(x: Tensor | None, axis: int) -> int:
    """Elements from one of the axis to the next, of a contiguous tensor; 0 where one serves all."""
    return 0 if x is None or x.shape[axis] == 1 else x.shape[axis + 1 :].numel()
