"""Attention by features in Triton: states of units of the sequence (`states`), reads, and their gradients."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from subquad.ops.parts.features.op import check_pattern, feature_attention, features_backward, features_forward
from subquad.ops.parts.features.triton.reads import read
from subquad.ops.parts.features.triton.slopes import slopes_of_keys, slopes_of_queries
from subquad.ops.parts.features.triton.states import CHUNK, SEGMENT, Side, States, state_of_all, update
from subquad.ops.triton import refusal_of

Places = tuple[int, int, int]


@feature_attention.refusal("triton")
def refusal(query: Tensor, key: Tensor, value: Tensor, **_: object) -> str | None:
    """Why the kernels cannot take this call; None where they can."""
    return refusal_of(query, key, value)


@features_forward.on("triton")
def forward(outputs: tuple[Tensor, Tensor], given: Any) -> None:
    """The Triton backend of `feature_attention`: (out, lse)."""
    out, lse = outputs
    queries, keys = _sides(given)
    if given.block == 0:
        N = queries.rows.shape[2]
        return read(out, lse, queries, keys, state_of_all(keys), (0, N, 1), False)
    if given.lag > 1:  # the first queries see no key
        out.zero_()
        lse.fill_(-torch.inf)
    for states, places in _states_in_order(keys, given, reverse=False):
        read(out, lse, queries, keys, states, places, given.lag == 0)


@features_backward.on("triton")
def backward(grads: tuple[Tensor, Tensor, Tensor, Tensor], given: Any) -> None:
    """Gradients of query, key, value and key_bias."""
    grad_query, grad_key, grad_value, grad_bias = grads
    queries, keys = _sides(given)
    queries = queries.weighed(*_slopes_of_outputs(given))
    (B, H, _, _), (_, G, M, _) = queries.rows.shape, keys.rows.shape
    shared = H != G
    of_keys = [
        x.new_empty(B, H, M, x.shape[3], dtype=torch.float32) if shared else x for x in (grad_key, grad_value)
    ]
    of_bias = grad_query.new_empty(B, H, M, dtype=torch.float32)
    parts = of_keys[0], of_keys[1], of_bias
    if given.block == 0:
        slopes_of_queries(grad_query, queries, keys, state_of_all(keys), (0, queries.rows.shape[2], 1), False)
        slopes_of_keys(parts, queries, keys, state_of_all(queries), (0, M, 1), False)
    else:
        if given.lag > 1:
            for x in (grad_query, *parts):
                x.zero_()
        for states, places in _states_in_order(keys, given, reverse=False):
            slopes_of_queries(grad_query, queries, keys, states, places, given.lag == 0)
        for states, places in _states_in_order(queries, given, reverse=True):
            slopes_of_keys(parts, queries, keys, states, places, given.lag == 0)
    if shared:
        for grad, of_heads in zip((grad_key, grad_value), of_keys, strict=True):
            grad.copy_(of_heads.unflatten(1, (G, -1)).sum(2))
    if given.key_bias is not None:
        of_groups = of_bias.unflatten(1, (G, -1)).sum(2)
        grad_bias.copy_(of_groups if grad_bias.shape[1] == G else of_groups.sum(1, keepdim=True))


def _sides(given: Any) -> tuple[Side, Side]:
    check_pattern(given)
    queries = Side.made(given.query, given.of_query, given.feature_bias, None, given.query)
    return queries, Side.made(given.key, given.of_key, None, given.key_bias, given.value)


def _states_in_order(side: Side, given: Any, *, reverse: bool) -> Iterator[tuple[States, Places]]:
    """The states of the tokens before each unit, or behind it, a segment of the sequence at a time.

    And which tokens of the other side read them: slot s of units [first, …) those of unit first + s, or of the unit that
    is lag − 1 units further from the tokens of the state.
    """
    tokens = side.rows.shape[2]
    unit, further = (given.block, given.lag - 1) if given.lag else (CHUNK, 0)
    units = -(-tokens // unit)
    slots = min(units, max(1, SEGMENT // unit))
    states = States.none(side, slots)
    starts = range(0, units, slots) if slots else ()
    for first in reversed(starts) if reverse else starts:
        update(states, side, first, unit, reverse=reverse)
        yield states, ((first - further if reverse else first + further) * unit, unit, slots)


def _slopes_of_outputs(given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """−lse, dO and a = dlse − dO·O of all queries; −∞ and 0 for those that see no key, or whose results nobody reads."""
    out, lse = given.outputs
    grad_out, grad_lse = given.grads
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
    return shift, grad_out.to(given.value.dtype), weight.contiguous()
