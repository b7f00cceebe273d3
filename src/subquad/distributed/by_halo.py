"""Attention to near keys of a sequence that is split over ranks: each gets the keys around its own.

Methods of the kind "halo" go by distances alone. Those of the kind "places" also use positions of tokens in their item,
and some of its tokens may see all and be seen by all:

    keys of one item      [ g g . . . . | . . . . . . | . . . . . . ]        g: seen by all
    those of rank 1         g g     . . | . . . . . . | . .                  the g, and the keys around its own

A rank attends to what is in its halo by the method itself, with the places moved, and merges this with the keys that
all see and that are outside of it. The rows of queries that see all are merged from what they find on each rank.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int64
from torch import Tensor

from subquad.distributed.attention.merging import merge_of_ranks
from subquad.distributed.collectives import gather
from subquad.distributed.halo import Halo
from subquad.distributed.halo_masks import run_with_halo
from subquad.distributed.shares import spans
from subquad.distributed.strategies import Strategy, always
from subquad.distributed.token_split import TokenSplit
from subquad.kernels.attention.softmax import merge_partials, visible_logsumexp, visible_softmax
from subquad.kernels.precision import upcast
from subquad.kernels.selection.pattern_positions import Item
from subquad.kernels.tokens.heads import repeat_heads
from subquad.kernels.tokens.padding import cleared_inputs
from subquad.kernels.tokens.slots import taken
from subquad.masks import Mask
from subquad.methods.core.call import Call, Partial
from subquad.methods.core.method import Method

M = TypeVar("M", bound=Method)
Reach = Callable[[M, int, Mask], tuple[int, int]]  # of a number of tokens: how many a query sees before and behind it
GloballyVisible = Callable[[M, Item, bool], Tensor | None]  # places of tokens that all see, under a causal mask or not


def by_distance(reach: Reach[M], *, fits: Callable[[M], bool] = always, loss_reads_tokens: bool = True) -> Strategy[M]:
    """The strategy of methods whose queries see the keys within `reach`, by their distances alone."""
    attend = partial(attend_near_keys, reach=reach, globally_visible=None)
    return Strategy(kind="halo", attend=attend, fits=fits, loss_reads_tokens=loss_reads_tokens)


def by_position(
    reach: Reach[M], globally_visible: GloballyVisible[M], *, fits: Callable[[M], bool] = always
) -> Strategy[M]:
    """The strategy of methods that use the positions of tokens in their item, some of which all queries may see."""
    return Strategy(
        kind="places", attend=partial(attend_near_keys, reach=reach, globally_visible=globally_visible), fits=fits
    )


def attend_near_keys(
    method: M,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    call: Call,
    split: TokenSplit,
    *,
    reach: Reach[M],
    globally_visible: GloballyVisible[M] | None,
) -> Partial:
    """The partial of this rank's queries."""
    mask, sides = call.mask, reach(method, split.tokens, call.mask)
    halo = Halo.around(split, *sides)
    if globally_visible is None and not mask.ids and min(split.lengths) >= 2 * sum(sides):  # most see their rank alone
        return run_with_halo(method, query, key, value, call, halo, sides)
    sent = [(key, 2), (value, 2)]
    valid = mask.key_padding(key.shape[2])
    sent += [] if valid is None else [(valid, 1)]
    sent += [(ids, 1) for ids in mask.ids]
    item, common = None, None
    if globally_visible is not None:
        query, key, value = cleared_inputs(query, key, value, mask)
        item = item_of_ranks(mask, query.shape[2], split, query.device)
        common = Common.from_tokens(
            globally_visible(method, item, mask.is_causal), query, key, value, item, call, split
        )
    around, rows = halo.exchange(sent, [] if common is None else common.rows)
    inner = Mask(is_causal=mask.is_causal, span=mask.span, keys=() if valid is None else (around[2],))
    if mask.ids:
        inner = replace(inner, ids=tuple(around[-len(mask.ids) :]))
        return _with_segments(method, query, around, call.under(inner), mask.query_padding(query.shape[2]), halo)
    queries = mask.query_padding(query.shape[2])
    inner = replace(inner, offset=halo.before, queries=() if queries is None else (queries,))
    inside = call.under(inner)
    if item is not None:
        inside = replace(inside, item=item.from_key(halo.needed[split.rank].start))
    if common is None:
        return method.attend_partial(query, around[0], around[1], inside)
    near = method.attend_partial(query, around[0], around[1], replace(inside, wants_lse=True))
    return common.added(near, query, key, value, rows, halo, call)


def _with_segments(
    method: Method, query: Tensor, around: list[Tensor], call: Call, valid: Tensor | None, halo: Halo
) -> Partial:
    """Packed segments: the keys around this rank's own have queries too, which are padding."""
    local = slice(halo.before, halo.before + query.shape[2])
    sides = (local.start, around[0].shape[2] - local.stop)
    assert valid is not None, "a negative id is padding"
    mask = call.mask & Mask(queries=(F.pad(valid, sides),))
    query = F.pad(query, (0, 0, *sides))
    out, lse = method.attend_partial(query, around[0], around[1], call.under(mask))
    return out[:, :, local], None if lse is None else lse[:, :, local]


def segments_rise(ids: Int64[Tensor, "B N"], split: TokenSplit) -> bool:
    """True if the tokens of each segment are adjacent and the ids rise, on all ranks together.

    Elsewhere near tokens of a segment may be far apart.
    """
    before = F.pad(ids, (1, 0), value=-1)
    most = before.cummax(1).values[:, :-1]
    rise = ((ids < 0) | (ids == before[:, :-1]) | (ids > most)).all(1)
    first = torch.where(ids >= 0, ids, torch.iinfo(ids.dtype).max).amin(1)
    message = torch.stack([rise.to(ids.dtype), ids[:, 0], first, ids.amax(1), ids[:, -1]])
    every = torch.stack(gather(message, [message.shape] * split.ranks, split.group))
    rises, starts, firsts, largest, ends = every.unbind(1)
    good = rises.bool().all(0)
    most, last = largest[0], ends[0]
    for rank in range(1, split.ranks):
        goes_on = (starts[rank] == last) & (starts[rank] == firsts[rank])
        good = good & (goes_on | (firsts[rank] > most))
        most, last = most.maximum(largest[rank]), ends[rank]
    return bool(good.all())


def item_of_ranks(mask: Mask, N: int, split: TokenSplit, device: torch.device) -> Item:
    """The starts and lengths of the items of all ranks' tokens; one exchange if there is padding."""
    sides = [valid for valid in (mask.key_padding(N), mask.query_padding(N)) if valid is not None]
    if not sides:
        first, length = (torch.full((1, 1), n, device=device) for n in (0, split.tokens))
        return Item(first, length, split.tokens)
    valid = torch.stack(sides).any(0) if len(sides) == 2 else torch.ones_like(sides[0])
    position = torch.arange(N, device=device) + spans(split.lengths)[split.rank].start
    first, end = torch.where(valid, position, split.tokens).amin(1), torch.where(valid, position + 1, 0).amax(1)
    message = torch.stack([first, end])
    every = torch.stack(gather(message, [message.shape] * split.ranks, split.group))
    first, end = every[:, 0].amin(0)[:, None], every[:, 1].amax(0)[:, None]
    return Item(first, (end - first).clamp(min=0), split.tokens)


@dataclass(frozen=True)
class Common:
    """The tokens of each item that all queries see, and which see all keys unless the mask is causal.

    Attributes:
        positions: their positions among the tokens of all ranks; −1 for none.
        rows: this rank's keys, values, validity of keys and queries at these positions; 0 if another rank has them.
        split: the split of the tokens over the ranks.
    """

    positions: Int64[Tensor, "B S"]
    rows: list[Tensor]

    split: TokenSplit

    @staticmethod
    def from_tokens(
        tokens: Tensor | None, query: Tensor, key: Tensor, value: Tensor, item: Item, call: Call, split: TokenSplit
    ) -> Common | None:
        """Those at these places of each item; None if there are none."""
        causal, N = call.mask.is_causal, query.shape[2]
        if tokens is None:
            return None
        inside = (tokens >= 0) & (tokens < item.length)
        positions = torch.where(inside, item.first + tokens, -1).expand(len(query), -1)
        at = positions - spans(split.lengths)[split.rank].start
        here = (positions >= 0) & (at >= 0) & (at < N)
        at = at.clamp(0, N - 1)
        valid = call.mask.key_padding(N)
        rows = [taken(x, at).masked_fill(~here[:, None, :, None], 0.0) for x in (key, value)]
        rows.append(here if valid is None else here & valid.gather(1, at))
        if not causal:
            rows.append(taken(query, at).masked_fill(~here[:, None, :, None], 0.0))
        return Common(positions, rows, split)

    def added(
        self,
        near: Partial,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rows: Many[Many[Tensor]],
        halo: Halo,
        call: Call,
    ) -> Partial:
        """The partial with the keys that all see outside of the halo, and the rows of queries that see all."""
        causal = call.mask.is_causal
        keys, values = (torch.stack(list(parts)).sum(0) for parts in rows[:2])
        needed = halo.needed[self.split.rank]
        outside = (self.positions < needed.start) | (self.positions >= needed.stop) & (not causal)
        valid = torch.stack(list(rows[2])).any(0)
        far = _exact(query, keys, values, valid & outside, call)
        assert near[1] is not None
        out, lse = merge_partials([(upcast(near[0])[0], near[1]), far])
        if not causal:
            of_rank = _exact(torch.stack(list(rows[3])).sum(0), key, value, call.mask.key_padding(key.shape[2]), call)
            out, lse = self._with_rows(out, lse, *of_rank)
        padding = call.mask.query_padding(query.shape[2])
        if padding is None:
            return out, lse
        return out.masked_fill(~padding[:, None, :, None], 0.0), lse.masked_fill(~padding[:, None], -torch.inf)

    def _with_rows(self, out: Tensor, lse: Tensor, row_out: Tensor, row_lse: Tensor) -> tuple[Tensor, Tensor]:
        """The partial with the rows of queries that see all keys, merged from their partials on all ranks."""
        split = self.split
        rows, of_rows = merge_of_ranks(row_out, row_lse, split)
        local = torch.arange(out.shape[2], device=out.device) + spans(split.lengths)[split.rank].start
        same = local[:, None] == self.positions[:, None]
        slot, sees_all = same.int().argmax(-1), same.any(-1)[:, None]
        out = torch.where(sees_all[..., None], taken(rows, slot), out)
        return out, torch.where(sees_all, taken(of_rows.unsqueeze(-1), slot).squeeze(-1), lse)


def _exact(
    query: Tensor, key: Tensor, value: Tensor, valid: Bool[Tensor, "B M"] | None, call: Call
) -> tuple[Tensor, Tensor]:
    """Exact attention to these keys, in fp32 or better: either few keys or few queries."""
    query, key, value = upcast(query, *(repeat_heads(x, query.shape[1]) for x in (key, value)))
    logits, visible = query @ key.mT * call.scale, None if valid is None else valid[:, None, None]
    return visible_softmax(logits, visible) @ value, visible_logsumexp(logits, visible)
