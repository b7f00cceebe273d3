"""Learned feature maps of a split sequence: near keys from the neighbouring ranks, sinks from all, the others in sums.

One exchange: to each other rank a rank sends the keys and values at its border that may be near there, its share of
the sinks, and R·(E + 1) sums over its keys that are in no block near that rank's queries (`tokens.neighbourhood`).
"""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from subquad.distributed.attention.feature_attention import attend_features_of_ranks
from subquad.distributed.collectives import add
from subquad.distributed.strategies import Strategy, register
from subquad.distributed.token_split import TokenSplit
from subquad.distributed.tokens.global_index import GlobalIndex, global_indices
from subquad.distributed.tokens.neighbourhood import Neighbourhood, are_sinks, ends_present
from subquad.kernels.attention.features.far_keys import far, near_keys
from subquad.kernels.attention.features.key_sums import attend_sums, left_behind, of_no_keys
from subquad.kernels.attention.partial_rows import merged
from subquad.kernels.attention.softmax import merge_partials, visible_logsumexp, visible_softmax
from subquad.kernels.precision import upcast
from subquad.kernels.tokens.heads import repeat_heads
from subquad.kernels.tokens.positions import ValidIndex, placed
from subquad.kernels.tokens.slots import rows_at, taken
from subquad.masks import Mask
from subquad.methods.core.call import Call
from subquad.methods.learned_feature_map import LearnedFeatureMap

Partial = tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]]


def attend(
    method: LearnedFeatureMap, query: Tensor, key: Tensor, value: Tensor, call: Call, split: TokenSplit
) -> Partial:
    """Near keys, sinks and the sums over the others."""
    query, key, value = upcast(query, key, value)
    return (_with_near if method.window else _without_near)(method, query, key, value, call, split)


def _without_near(
    method: LearnedFeatureMap, query: Tensor, key: Tensor, value: Tensor, call: Call, split: TokenSplit
) -> Partial:
    causal = call.mask.is_causal
    of_query, of_key = method.maps(query, key, call)
    if method.sinks == 0:
        return attend_features_of_ranks(of_query, of_key, value, call.mask, split=split)
    _, side = global_indices(call.mask, query, key, split)
    ends = add(side.ends(torch.cat([key, value], dim=3), method.sinks), split.group)
    bias = torch.zeros_like(side.valid, dtype=key.dtype)
    bias = bias.masked_fill(are_sinks(side.index, side, method.sinks, causal), -torch.inf)[:, None]
    number = side.index if causal else None
    present = ends_present(side, method.sinks)
    exact = _attend_sinks(query, ends.split([key.shape[3], value.shape[3]], dim=3), present, number, call.scale)
    linear = attend_features_of_ranks(of_query, of_key, value, call.mask, key_bias=bias, split=split)
    return merge_partials([exact, linear])


def _with_near(
    method: LearnedFeatureMap, query: Tensor, key: Tensor, value: Tensor, call: Call, split: TokenSplit
) -> Partial:
    causal, w, B = call.mask.is_causal, method.window, query.shape[0]
    side, valid_keys = _sides(query, key, call, split)
    block = torch.full((B,), w, device=key.device)
    lines = Neighbourhood(side, split, block, w)
    of_query, of_key = method.maps(query, key, call)
    hidden = ~valid_keys | are_sinks(side.index, side, method.sinks, causal)
    rows = torch.cat([key, value, valid_keys[:, None, :, None].expand(*key.shape[:3], 1).to(key.dtype)], dim=3)
    flagged = of_key.masked_fill(hidden[:, None, :, None], -torch.inf)
    left = lines.sums_for_others(flagged, value, _summed, merged, causal)
    none = of_no_keys(value.new_zeros(*key.shape[:2], of_key.shape[3], value.shape[3] + 1))
    edges, ends, sums = lines.exchange(rows, side.ends(rows, method.sinks), left, none, causal)

    widths = [key.shape[3], value.shape[3], 1]
    line = rows_at(torch.cat([rows, *edges], dim=2), lines.slots())
    line_key, line_value, flag = line.split(widths, dim=3)
    shown = (flag[:, 0, :, 0].detach() > 0) & ~are_sinks(lines.numbers(), side, method.sinks, causal)
    length, positions = lines.length, lines.line_positions()
    beside = placed(query, torch.where(side.valid, positions, length), length + 1)[:, :, :length]
    blocks = ValidIndex.from_mask(None, B, length, key.device)
    slots = near_keys(blocks, length // w, w, 0, causal)
    parts = [method.exact(beside, line_key, line_value, slots, shown, call, Mask(is_causal=causal))]
    line_query, line_of_key = method.maps(beside, line_key, call)
    parts += far(line_query, line_of_key, line_value, ~shown, w, causal)
    out, lse = merge_partials(parts)
    near = taken(out, positions), taken(lse[..., None], positions)[..., 0]

    others = [near, attend_sums(of_query, [each for each in sums if each is not None])]
    if method.sinks:
        sink_key, sink_value, present = ends.split(widths, dim=3)
        visible = (present[:, 0, :, 0].detach() > 0) & ends_present(side, method.sinks)
        number = side.index if causal else None
        others.append(_attend_sinks(query, (sink_key, sink_value), visible, number, call.scale))
    return merge_partials(others)


def _summed(key: Tensor, value: Tensor, shown: Tensor) -> Tensor:
    bias = torch.zeros_like(shown, dtype=key.dtype).masked_fill(~shown, -torch.inf)[:, None]
    return left_behind(key, value, None, bias)


def _sides(query: Tensor, key: Tensor, call: Call, split: TokenSplit) -> tuple[GlobalIndex, Bool[Tensor, "B N"]]:
    """The tokens that are real as query or as key, which blocks count, and which of them are real keys."""
    mask, (B, _, N, _) = call.mask, query.shape
    sides = [mask.query_padding(N), mask.key_padding(N)]
    every = torch.ones(B, N, dtype=torch.bool, device=query.device)
    valid = every if sides[1] is None else sides[1]
    either = Mask() if sides[0] is None or sides[1] is None else Mask.padding(sides[0] | sides[1])
    return global_indices(either, query, key, split)[0], valid


def _attend_sinks(
    query: Tensor, ends: Any, visible: Bool[Tensor, "B S"], number: Int64[Tensor, "#B N"] | None, scale: float
) -> Partial:
    """Exact attention to the sinks; under a causal mask, given by the numbers of the queries, to the first ones."""
    key, value = (repeat_heads(x, query.shape[1]) for x in ends)
    allowed = visible[:, None, None, :]
    if number is not None:
        sinks = visible.shape[1] // 2
        sink = torch.arange(2 * sinks, device=query.device)
        allowed = allowed & (sink < sinks) & (sink <= number[:, None, :, None])
    logits = query @ key.mT * scale
    return visible_softmax(logits, allowed) @ value, visible_logsumexp(logits, allowed.expand_as(logits))


register(LearnedFeatureMap, Strategy(kind="partials", attend=attend))
