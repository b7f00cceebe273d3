"""Attention inside balanced buckets of a fixed size, whose queries and keys are split over ranks.

A bucket's queries stay where they are. Its keys are few, and travel:

    scores    of each rank's candidates, as queries and as keys, for the choice of each bucket      2·C·K
    rows      the keys and values that buckets take, added up over the ranks                      C·K·(D + E)

A query meets the keys of its own rank where they are, and those of other ranks as the rows that came.
"""

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from subquad.distributed.rows import combine_together, summed
from subquad.distributed.selection.top import Candidates, Taken, candidates, choosing, taken
from subquad.distributed.token_split import TokenSplit
from subquad.kernels.attention.pairs.op import attend_pairs
from subquad.kernels.attention.softmax import merge_partials
from subquad.kernels.precision import upcast
from subquad.kernels.selection.balanced import filled_buckets
from subquad.kernels.selection.hash_functions import Hashed
from subquad.kernels.tokens.slots import vectors_at
from subquad.masks import Mask

Partial = tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]]


def attend_balanced_of_ranks(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M E"],
    scores: tuple[Tensor | Hashed, Tensor | Hashed],
    mask: Mask,
    split: TokenSplit,
    *,
    size: int,
    scale: float,
    union: bool,
) -> Partial:
    """Attention of this rank's queries in the buckets of `balanced_buckets` over all ranks, each of `size` tokens."""
    queries = candidates(scores[0], size, mask.query_padding(query.shape[2]), odds=True)
    keys = candidates(scores[1], size, mask.key_padding(key.shape[2]), odds=True)
    of_queries, of_keys = _chosen(queries, keys, size, split)
    of_rows, rows = _rows(key, value, keys.tokens, of_keys, split)

    query_slots = torch.where(of_queries.mine, queries.tokens, query.shape[2])
    key_slots = torch.where(of_keys.mine, keys.tokens, key.shape[2])
    local = filled_buckets(query_slots, queries.best, key_slots, mask)
    visible = of_keys.filled & ((of_keys.rank < split.rank) if mask.is_causal else (of_keys.rank != split.rank))
    elsewhere = torch.where(visible, of_rows, rows.shape[2])
    others = tuple(replace(each, keys=elsewhere) for each in local[:2])
    options: dict[str, Any] = {"scale": scale, "union": union}
    of_local = attend_pairs(query, key, value, local, mask, **options)
    (query,) = upcast(query)
    keys_present, values_present = rows.split([key.shape[3], value.shape[3]], dim=-1)
    return merge_partials([of_local, attend_pairs(query, keys_present, values_present, others, Mask(), **options)])


def _chosen(queries: Candidates, keys: Candidates, size: int, split: TokenSplit) -> tuple[Taken, Taken]:
    """The candidates of all ranks that buckets take, as queries and as keys."""
    sides = [(queries.scores, split.lengths), (keys.scores, split.key_lengths)]
    choices = combine_together([choosing(scores, size, lengths) for scores, lengths in sides], split.group)
    of_queries, of_keys = (taken(slots, scores, split.rank) for slots, (scores, _) in zip(choices, sides, strict=True))
    return of_queries, of_keys


def _rows(
    key: Tensor, value: Tensor, candidates: Int64[Tensor, "B H C k"], chosen: Taken, split: TokenSplit
) -> tuple[Int64[Tensor, "B H C K"], Float[Tensor, "B H S F"]]:
    """For each slot the number of its key among the rows; and these, the keys and values of all slots, C·K.

    A token that several buckets take has several rows, of which all their slots name the first.
    """
    rows = torch.cat(upcast(vectors_at(key, candidates), vectors_at(value, candidates)), dim=-1)
    number = _first_slots(candidates, chosen, key.shape[2]).to(rows.dtype)  # less than 2²⁴, so that fp32 holds it
    local = torch.cat([chosen.in_slots(rows), number.unsqueeze(-1)], dim=-1)
    (combined,) = combine_together([summed(local)], split.group)
    return combined[..., -1].detach().long(), combined[..., :-1].flatten(2, 3)


def _first_slots(candidates: Int64[Tensor, "B H C k"], chosen: Taken, M: int) -> Int64[Tensor, "B H C K"]:
    """For each slot with a token of this rank the first one, c·K + i, with the same token; 0 for the others."""
    none = chosen.candidate == candidates.shape[3]
    token = candidates.gather(3, chosen.candidate.masked_fill(none, 0)).masked_fill(none, M).flatten(2)
    slots = torch.arange(token.shape[2], device=token.device).expand_as(token)
    first = slots.new_full((*token.shape[:2], M + 1), token.shape[2]).scatter_reduce(2, token, slots, "amin")
    return first.gather(2, token).view_as(none).masked_fill(none, 0)
