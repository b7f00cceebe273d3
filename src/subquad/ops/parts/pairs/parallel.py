"""Attention inside balanced buckets of a fixed size, whose queries and keys are split over ranks.

A bucket's queries stay where they are. Its keys are few, so each rank sends its candidates, by one exchange:

    scores    of its candidates, as queries and as keys: those of all ranks say which of them a bucket takes    2·C·K
    rows      the keys and values of the candidates                                                       C·K·(D + E)

A query meets the keys of its own rank where they are, and those of other ranks as the rows that came.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from subquad.masks import Mask
from subquad.ops.choose.balanced import filled_buckets
from subquad.ops.choose.top.parallel import Candidates, Taken, candidates, taken
from subquad.ops.hash_functions import Hashed
from subquad.ops.parts.pairs.op import attend_pairs
from subquad.ops.precision import wide
from subquad.ops.slots import vectors_at
from subquad.ops.softmax import merge_partials
from subquad.parallel import Sequence
from subquad.parallel.collectives import gather_columns
from subquad.parallel.shares import spans

Partial = tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]]


class Rows(NamedTuple):
    """The candidates of all ranks as the keys of a sequence of their own: C buckets of W slots, one after the other.

    Attributes:
        key: the keys.
        value: the values.
        number: the number of each slot's key; one number for a token that is a candidate of several buckets.
    """

    key: Float[Tensor, "B H S D"]
    value: Float[Tensor, "B H S E"]
    number: Int64[Tensor, "B H C W"]


def attend_balanced_of_ranks(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M E"],
    scores: tuple[Tensor | Hashed, Tensor | Hashed],
    mask: Mask,
    of: Sequence,
    *,
    size: int,
    scale: float,
    union: bool,
) -> Partial:
    """Attention of this rank's queries in the buckets of `balanced_buckets` over all ranks, each of `size` tokens."""
    queries = candidates(scores[0], size, mask.query_padding(query.shape[2]), odds=True)
    keys = candidates(scores[1], size, mask.key_padding(key.shape[2]), odds=True)
    of_queries, of_keys, rows = _exchanged(key, value, queries, keys, size, of)

    query_slots = torch.where(of_queries.own, queries.tokens, query.shape[2])
    key_slots = torch.where(of_keys.own, keys.tokens, key.shape[2])
    own = filled_buckets(query_slots, queries.best, key_slots, mask)
    elsewhere = _slots_elsewhere(of_keys, rows, size, of, causal=mask.is_causal)
    others = tuple(replace(each, keys=elsewhere) for each in own[:2])
    how: dict[str, Any] = {"scale": scale, "union": union}
    of_own = attend_pairs(query, key, value, own, mask, **how)
    (query,) = wide(query)
    return merge_partials([of_own, attend_pairs(query, rows.key, rows.value, others, Mask(), **how)])


def _exchanged(
    key: Tensor, value: Tensor, queries: Candidates, keys: Candidates, size: int, of: Sequence
) -> tuple[Taken, Taken, Rows]:
    """Which candidates of all ranks are taken, as queries and as keys, and the rows of those that are keys."""
    D, width = key.shape[3], key.shape[3] + value.shape[3]
    rows = torch.cat(wide(vectors_at(key, keys.tokens), vectors_at(value, keys.tokens)), dim=-1)
    places = _first_places(keys.tokens, key.shape[2]).to(rows.dtype)  # fewer than 2²⁴, so that fp32 holds them
    of_ranks = [(min(size, n), min(size, m)) for n, m in zip(of.lengths, of.key_lengths, strict=True)]
    widths = [[n, m, m, m * width] for n, m in of_ranks]
    every = gather_columns([queries.scores, keys.scores, places, rows.flatten(3)], widths, of.group)
    of_queries, of_keys = (taken([part[side].detach() for part in every], size, of.rank) for side in (0, 1))
    number = _numbers([part[2].detach().long() for part in every])
    rows = torch.cat([part[3].unflatten(3, (-1, width)) for part in every], dim=3).flatten(2, 3)
    return of_queries, of_keys, Rows(rows[..., :D], rows[..., D:], number)


def _first_places(tokens: Int64[Tensor, "B H C k"], M: int) -> Int64[Tensor, "B H C k"]:
    """The first place, c·k + i, of each token."""
    flat = tokens.flatten(2)
    places = torch.arange(flat.shape[2], device=flat.device).expand_as(flat)
    first = places.new_full((*flat.shape[:2], M + 1), flat.shape[2]).scatter_reduce(2, flat, places, "amin")
    return first.gather(2, flat).view_as(tokens)


def _numbers(places: list[Int64[Tensor, "B H C _"]]) -> Int64[Tensor, "B H C W"]:
    """Places among the candidates of each rank as places among those of all."""
    width, before, found = sum(each.shape[3] for each in places), 0, []
    for each in places:
        k = each.shape[3]
        found.append(each // k * width + before + each % k)
        before += k
    return torch.cat(found, dim=3)


def _slots_elsewhere(chosen: Taken, rows: Rows, size: int, of: Sequence, *, causal: bool) -> Int64[Tensor, "B H C K"]:
    """The keys of other ranks in each bucket, or under a causal mask those of the ranks before, as slots of rows."""
    own = spans(min(size, m) for m in of.key_lengths)[of.rank]
    seen = chosen.place < own.start
    seen = seen if causal else seen | (chosen.place >= own.stop)
    return torch.where(chosen.there & seen, rows.number.gather(3, chosen.place), rows.key.shape[2])
