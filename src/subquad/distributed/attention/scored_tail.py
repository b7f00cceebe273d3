"""Attention with a tail over ranks, where scores choose each bucket's exact keys.

A query is in the bucket that it scores highest; a bucket takes the K keys of all ranks that score highest in it.
Queries stay where they are. These are sent, in addition to the exchanges of the cells (`selection.clusters`):

    scores     of each rank's candidates, for the choice of each bucket                             C·K
    means      sums of each rank's queries in a bucket, and how many there are                       C·(D + 1)
    cells      what the mean query sees of each cell of a rank's keys: partials, which merge         C·X·(D + E + 1)
    rows       the keys and values that buckets take, added up over the ranks                        C·K·(D + E)

Scores and sums go with the moments of the keys, before the k-means of the cells, the others together behind it.
"""

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from subquad.distributed.attention.merging import merging
from subquad.distributed.rows import combine_together, summed
from subquad.distributed.selection.clusters import ClusterSettings, clusters_by_moments
from subquad.distributed.selection.moments_of_ranks import Tokens, moments_as_rows, whole_of
from subquad.distributed.selection.top import candidates, choosing, taken
from subquad.distributed.token_split import TokenSplit
from subquad.kernels.attention.partial_rows import as_partial
from subquad.kernels.attention.tail.key_cells import as_tail, visible_cells
from subquad.kernels.attention.tail.reference import attend_to_keys_and_cells
from subquad.kernels.precision import upcast
from subquad.kernels.selection.cells.op import ITERATIONS_OF_KEYS
from subquad.kernels.selection.cells.reference import BITS
from subquad.kernels.selection.group_means import group_mean, group_sizes
from subquad.kernels.selection.hash_functions import Hashed
from subquad.kernels.selection.top.op import top_and_best
from subquad.kernels.tokens.padding import cleared_inputs
from subquad.kernels.tokens.slots import vectors_at
from subquad.masks import Mask

Partial = tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]]


def attend_with_scored_tail(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M E"],
    scores: tuple[Tensor | Hashed, Tensor | Hashed],
    mask: Mask,
    split: TokenSplit,
    *,
    topk: int,
    cells: int,
    seed: int,
    scale: float,
) -> Partial:
    """`attend_with_tail` of this rank's queries over the keys of all ranks, with the buckets of `best_bucket`."""
    query, key, value = cleared_inputs(query, key, value, mask)
    valid_keys, C = mask.key_padding(key.shape[2]), scores[0].shape[3]
    labels = _best(scores[0], mask.query_padding(query.shape[2]))
    chosen = candidates(scores[1], topk, valid_keys, odds=False)
    tokens, settings = Tokens(key, valid_keys), ClusterSettings(cells, BITS, ITERATIONS_OF_KEYS, seed)
    query, key, value = upcast(query, key, value)
    sums = _sums(query, labels, C)
    contributions = [moments_as_rows(tokens), summed(sums), choosing(chosen.scores, topk, split.key_lengths)]
    moments, sums, slots = combine_together(contributions, split.group)
    means, of_keys = sums[..., :-1] / sums[..., -1:].clamp(min=1), taken(slots, chosen.scores, split.rank)
    cell = clusters_by_moments(tokens, whole_of(moments, tokens, split), split, settings)

    local = torch.where(of_keys.mine, chosen.tokens, key.shape[2])
    visible = visible_cells(means, key, value, local, cell, cells, scale)
    rows = torch.cat([vectors_at(key, chosen.tokens), vectors_at(value, chosen.tokens)], dim=-1)
    both, rows = combine_together([merging(*visible), summed(of_keys.in_slots(rows))], split.group)
    tail = as_tail(means, *as_partial(both), scale)
    numbers = torch.arange(rows[0, 0, ..., 0].numel(), device=rows.device).view(rows.shape[2:4])
    lists = torch.where(of_keys.filled, numbers, numbers.numel())
    keys, values = rows.flatten(2, 3).split([key.shape[3], value.shape[3]], dim=-1)
    return attend_to_keys_and_cells(query, keys, values, lists, tail, labels, scale=scale)


@torch.no_grad()
def _best(of_query: Tensor | Hashed, valid: Bool[Tensor, "B N"] | None) -> Int64[Tensor, "B H N"]:
    """The bucket that each query scores highest; as many as there are buckets for padding."""
    B, _, _, C = of_query.shape
    none = torch.zeros(B, dtype=torch.int64, device=of_query.device)
    _, labels = top_and_best(of_query, none, 1, valid, odds=False)
    return labels if valid is None else torch.where(valid[:, None], labels, C)


def _sums(query: Float[Tensor, "B H N D"], labels: Int64[Tensor, "B H N"], C: int) -> Float[Tensor, "B H C F"]:
    """The sum of the queries in each bucket, and in one more column how many there are."""
    sizes = group_sizes(labels, C)[..., None].to(query.dtype)
    return torch.cat([group_mean(query, labels, C) * sizes, sizes], dim=-1)
