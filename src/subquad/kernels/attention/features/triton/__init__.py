"""Attention by features in Triton: states of units of the sequence (`states`), reads, and their gradients."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from subquad.kernels.attention.features.op import (
    check_pattern,
    feature_attention,
    features_backward,
    features_forward,
    learned,
)
from subquad.kernels.attention.features.triton.chunk_slopes import slopes_within_chunks
from subquad.kernels.attention.features.triton.chunks import read_within_chunks
from subquad.kernels.attention.features.triton.reads import ReadIndex, read, slopes_of_keys, slopes_of_queries
from subquad.kernels.attention.features.triton.states import SEGMENT, Side, States, chunk_of, state_of_all, update
from subquad.kernels.triton import WIDEST, refusal_of


@feature_attention.refusal("triton")
def refusal(x: Any) -> str | None:
    """The reason why the kernels cannot take this call; None if they can."""
    maps = (
        x.of_query if learned(x.of_query) or learned(x.feature_bias) else None,
        x.of_key if learned(x.of_key) else None,
    )
    for projection in maps:  # the kernels get exponents, which `run` makes
        if projection is not None and projection.shape[1] > WIDEST:
            features = projection.shape[1]
            return f"a learned map makes {features} features, and the kernels take exponents of at most {WIDEST}"
    return refusal_of(x.query, x.key, x.value)


@features_forward.on("triton")
def forward(outputs: tuple[Tensor, Tensor, Tensor], inputs: Any) -> None:
    """The Triton backend of `feature_attention`: (out, lse)."""
    out, lse, _ = outputs  # the residual of lse is for backends whose backward pass reads it
    queries, keys = _sides(inputs)
    if inputs.lag > 1:  # the first queries see no key
        out.zero_()
        lse.fill_(-torch.inf)
    for states, index in _readers(keys, queries, inputs, reverse=False):
        read(out, lse, queries, states, index)
        if inputs.block and not inputs.lag:
            read_within_chunks(out, lse, queries, keys, index)


@features_backward.on("triton")
def backward(grads: tuple[Tensor, Tensor, Tensor, Tensor], inputs: Any) -> None:
    """Gradients of query, key, value and key_bias; first for each query head."""
    grad_query, grad_key, grad_value, grad_bias = grads
    queries, keys = _sides(inputs)
    queries = queries.weighed(*_slopes_of_outputs(inputs))
    H, G, causal = inputs.query.shape[1], inputs.key.shape[1], inputs.block > 0 and not inputs.lag
    of_key, of_value = (x if H == G else _of_heads(x, H) for x in (grad_key, grad_value))
    of_bias = _of_heads(grad_key[..., :1], H).squeeze(-1)
    if inputs.lag > 1:  # the first queries see no key, and the last keys no query
        for x in (grad_query, of_key, of_value, of_bias):
            x.zero_()
    for states, index in _readers(keys, queries, inputs, reverse=False):
        of_x, of_y = (_buffer(queries, index) for _ in range(2))
        if causal:
            slopes_within_chunks(of_x, of_y, of_value, queries, keys, index)
            _gather(of_key, of_y, keys.projection, index, add=False)
            _gather(of_bias, of_y.sum(-1, dtype=torch.float32), None, index, add=False)
        slopes_of_queries(of_x, queries, states, index, add=causal)
        _gather(grad_query, of_x, queries.projection, index, add=False)
    for states, index in _readers(queries, keys, inputs, reverse=True):
        of_y = _buffer(queries, index)
        slopes_of_keys(of_y, of_value, keys, states, index, add=causal)
        _gather(of_key, of_y, keys.projection, index, add=causal)
        _gather(of_bias, of_y.sum(-1, dtype=torch.float32), None, index, add=causal)
    if H != G:
        for grad, of_heads in ((grad_key, of_key), (grad_value, of_value)):
            grad.copy_(of_heads.unflatten(1, (G, -1)).sum(2))
    if inputs.key_bias is not None:
        of_bias = of_bias.unflatten(1, (G, -1)).sum(2)
        grad_bias.copy_(of_bias if grad_bias.shape[1] == G else of_bias.sum(1, keepdim=True))


def _of_heads(x: Tensor, H: int) -> Tensor:
    """Space for as many heads, in fp32."""
    return x.new_empty(x.shape[0], H, *x.shape[2:], dtype=torch.float32)


def _buffer(queries: Side, index: ReadIndex) -> Tensor:
    """Space for slopes of exponents of these places, in the kind of numbers that are multiplied."""
    B, H = queries.rows.shape[:2]
    return queries.payload.new_empty(B, H, index.slots * index.unit, queries.features)


def _gather(grad: Tensor, slopes: Tensor, projection: Tensor | None, index: ReadIndex, *, add: bool) -> None:
    """Slopes of exponents of these places, times the projection, to the gradient of the rows."""
    begin, end = max(0, index.first), min(grad.shape[2], index.first + slopes.shape[2])
    if begin >= end:
        return
    slopes = slopes[:, :, begin - index.first : end - index.first]
    if projection is not None:
        slopes = slopes @ projection.repeat_interleave(
            slopes.shape[1] // len(projection) if len(projection) > 1 else 1, 0
        ).to(slopes.dtype)
    if add:
        grad[:, :, begin:end].add_(slopes)
    else:
        grad[:, :, begin:end].copy_(slopes)


def _sides(inputs: Any) -> tuple[Side, Side]:
    check_pattern(inputs)
    queries = Side.made(inputs.query, inputs.of_query, inputs.feature_bias, None, inputs.query)
    return queries, Side.made(inputs.key, inputs.of_key, None, inputs.key_bias, inputs.value)


def _readers(side: Side, others: Side, inputs: Any, *, reverse: bool) -> Iterator[tuple[States, ReadIndex]]:
    """States of a side's tokens, and which tokens of the others read them: a segment of the sequence at a time.

    Under a pattern, states are those of the tokens before each unit, or behind it: slot s of units [first, …) is read
    by unit first + s, or by the unit that is lag − 1 units further from the tokens of the state.
    """
    tokens = others.rows.shape[2]
    if inputs.block == 0:
        states = state_of_all(side)
        for first in range(0, tokens, SEGMENT):
            yield states, ReadIndex(first, SEGMENT if tokens > SEGMENT else tokens, 1)
        return
    unit, further = (inputs.block, inputs.lag - 1) if inputs.lag else (chunk_of(inputs.value), 0)
    count = -(-tokens // unit)
    slots = min(count, max(1, SEGMENT // unit))
    states = States.none(side, slots)
    starts = range(0, count, slots) if slots else ()
    for first in reversed(starts) if reverse else starts:
        update(states, side, first, unit, reverse=reverse)
        yield states, ReadIndex((first - further if reverse else first + further) * unit, unit, slots)


def _slopes_of_outputs(inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """−lse, dO and a = dlse − dO·O of the queries; −∞ and 0 for those that see no key, or that nobody reads."""
    out, lse, _ = inputs.outputs
    grad_out, grad_lse, _ = inputs.grads
    sees = lse != -torch.inf
    weight = torch.zeros_like(lse) if grad_lse is None else torch.where(sees, grad_lse, 0.0)
    read = weight != 0
    if grad_out is not None:
        weight = torch.where(sees, weight - (grad_out * out).sum(-1), 0.0)
        read = read | (weight != 0) | (sees & (grad_out != 0).any(-1))
    else:
        grad_out = torch.zeros_like(out)
    weight = torch.where(lse.isnan() & read, torch.nan, weight)
    shift = torch.where(read, -lse, -torch.inf).contiguous()
    return shift, grad_out.to(inputs.value.dtype), weight.contiguous()
