"""Attention by features in compiled code: one op a direction. The gradient is itself not differentiable.

Exponents are made tile by tile and never exist for the whole sequence. Only where a projection itself is learned
they are made here, by PyTorch, which has its gradient.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from subquad.ops.native import interface
from subquad.ops.native.interface import pointer, rows, token_major, with_contiguous_rows

PITCH = 16  # of the projections' rows, as in feature_state.hpp
TILE = 64  # as there


def refusal(query: Tensor) -> str | None:
    """Why the compiled kernels cannot take this call; None where they can."""
    if query.dtype in (torch.bfloat16, torch.float16):
        return f"the dtype is {query.dtype}, and attention by features takes fp32"
    return interface.refusal(query)


def feature_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    of_query: Tensor | None,
    of_key: Tensor | None,
    feature_bias: Tensor | None,
    key_bias: Tensor | None,
    causal: bool,
    lagged: tuple[int, int] | None,
) -> tuple[Tensor, Tensor]:
    """As `subquad.ops.feature_attention.feature_attention`."""
    if _learned(of_query) or _learned(feature_bias):
        query = query if of_query is None else query @ of_query.mT
        query = query if feature_bias is None else query + feature_bias.unsqueeze(-2)
        of_query = feature_bias = None
    if of_key is not None and _learned(of_key):
        key, of_key = key @ of_key.mT, None
    block, lag = (int(causal), 0) if lagged is None else lagged
    return _forward(query, key, value, of_query, of_key, feature_bias, key_bias, block, lag)


def _learned(x: Tensor | None) -> bool:
    return x is not None and x.requires_grad and torch.is_grad_enabled()


@torch.library.custom_op("subquad::feature_attention_forward", mutates_args=(), device_types="cpu")
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    of_query: Tensor | None,
    of_key: Tensor | None,
    feature_bias: Tensor | None,
    key_bias: Tensor | None,
    block: int,
    lag: int,
) -> tuple[Tensor, Tensor]:
    """(out, lse). block 0: every query sees every key; lag 0: causal."""
    call = _described(query, key, value, of_query, of_key, feature_bias, key_bias, block, lag, passes=1)
    out, lse = _outputs(query, value)
    interface.run("feature_forward", interface.FeatureForward(call.sizes, call.inputs, rows(out), pointer(lse)))
    return out, lse


@_forward.register_fake
def _(query, key, value, *_):  # type: ignore[no-untyped-def]
    return _outputs(query, value)


def _outputs(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    return token_major(query, value.shape[3]), query.new_empty(query.shape[:3])


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
    products = _products(*shapes, block, lag)  # type: ignore[call-arg]
    (B, H, N, D), (_, G, M, C) = query.shape, key.shape
    R = D if of_query is None else of_query.shape[1]
    sizes = interface.Sizes(B, H, G, N, M, D, value.shape[3], R, C, 0, 0, interface.threads(passes * products))
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


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    *tensors, ctx.block, ctx.lag = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)  # often nobody differentiates lse


def _differentiate(ctx, grad_out, grad_lse):  # type: ignore[no-untyped-def]
    saved = ctx.saved_tensors  # once: activation checkpointing computes them when they are asked for
    key_bias = saved[6]
    if grad_out is None and grad_lse is None:
        return (None,) * 9
    *of_inputs, of_bias = _backward(grad_out, grad_lse, *saved, ctx.block, ctx.lag)
    return *of_inputs, None, None, None, None if key_bias is None else of_bias, None, None


_forward.register_autograd(_differentiate, setup_context=_save)


@torch.library.custom_op("subquad::feature_attention_backward", mutates_args=(), device_types="cpu")
def _backward(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and key_bias; the last is empty where there is no bias."""
    call = _described(query, key, value, of_query, of_key, feature_bias, key_bias, block, lag, passes=3)
    *grads, _ = _gradients(query, key, value, None)
    of_bias = query.new_empty(0 if key_bias is None else key.shape[:3])
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
            *(rows(x) for x in grads),
            pointer(lse),
            pointer(grad_lse),
            None if key_bias is None else pointer(of_bias),
        ),
    )
    if key_bias is not None and key_bias.shape[1] < of_bias.shape[1]:
        of_bias = of_bias.sum(1, keepdim=True)
    return *grads, of_bias  # type: ignore[return-value]


@_backward.register_fake
def _(grad_out, grad_lse, query, key, value, of_query, of_key, feature_bias, key_bias, *_):  # type: ignore[no-untyped-def]
    return _gradients(query, key, value, key_bias)


def _gradients(query: Tensor, key: Tensor, value: Tensor, key_bias: Tensor | None) -> tuple[Tensor, ...]:
    of_bias = query.new_empty(0 if key_bias is None else key_bias.shape)
    return *(token_major(x, x.shape[3]) for x in (query, key, value)), of_bias


interface.not_differentiable(_backward, "attention by features")


def _products(query, key, value, of_query, of_key, block, lag) -> int:  # type: ignore[no-untyped-def]
    """Multiplications of the forward pass, by shapes: exponents, states, reads, and pairs of half a tile."""
    (B, H, N, D), (_, G, M, C), (*_, E) = query, key, value
    R = D if of_query is None else of_query[1]
    queries, keys = E + (0 if of_query is None else D), E + (0 if of_key is None else C)
    pairs = B * H * N * TILE // 2 * (R + E) if block and not lag else 0
    return R * (B * H * N * queries + B * G * M * keys) + pairs


@register_flop_formula([torch.ops.subquad.feature_attention_forward])
def _forward_flops(query, key, value, of_query, of_key, feature_bias, key_bias, block, lag, **_):  # type: ignore[no-untyped-def]
    """Operations of the products, as torch's `FlopCounterMode` counts them."""
    return 2 * _products(query, key, value, of_query, of_key, block, lag)


@register_flop_formula([torch.ops.subquad.feature_attention_backward])
def _backward_flops(grad_out, grad_lse, query, key, value, of_query, of_key, bias, key_bias, out, lse, block, lag, **_):  # type: ignore[no-untyped-def]
    """The exponents and states again, of both sides; the gradients of exponents, values and rows."""
    (B, H, N, D), (_, G, M, C), (*_, E) = query, key, value
    R = D if of_query is None else of_query[1]
    queries = 2 * E + (0 if of_query is None else 3 * D)
    keys = 3 * E + (0 if of_key is None else 3 * C)
    pairs = B * H * N * TILE * 3 * (R + E) if block and not lag else 0
    return 2 * (R * (B * H * N * queries + B * G * M * keys) + pairs)
