"""Hashed buckets over ranks: buckets hold tokens of all ranks, of which few enough travel."""

import torch
from torch import Tensor

from subquad.distributed.attention.pairs import attend_balanced_of_ranks
from subquad.distributed.attention.scored_tail import attend_with_scored_tail
from subquad.distributed.strategies import Strategy, register
from subquad.distributed.token_split import TokenSplit
from subquad.distributed.tokens.global_index import global_indices
from subquad.kernels.selection.hash_functions import Hashed
from subquad.methods.core.bucketed import HashedBuckets
from subquad.methods.core.call import Call, Partial
from subquad.methods.lha import LearnedHash
from subquad.methods.lha_tail import LearnedHashTail
from subquad.methods.lsh import RandomHash

Scores = tuple[Tensor | Hashed, Tensor | Hashed]


def fixed_buckets(method: HashedBuckets) -> bool:
    """True if neither the number nor the size of the buckets grows with the length."""
    return method.buckets > 0 and method.bucket_size > 0 and method.selection == "balanced"


@torch.no_grad()
def random_scores(method: RandomHash, query: Tensor, key: Tensor, call: Call, split: TokenSplit) -> Scores:
    """The scores of this rank's tokens; random numbers go by the place among the real tokens of all ranks."""
    if method.hash != "random":
        return method.scores(query, key, call)
    queries, keys = global_indices(call.mask, query, key, split)
    return method.scores(query, key, call, before=(queries.before, keys.before))


def attend_learned(
    method: LearnedHash, query: Tensor, key: Tensor, value: Tensor, call: Call, split: TokenSplit
) -> Partial:
    """Attend inside the buckets of learned hash functions."""
    with torch.no_grad():
        scores = method.hashes(query, key, call)
    return _attend_inside(method, query, key, value, scores, call, split)


def attend_random(
    method: RandomHash, query: Tensor, key: Tensor, value: Tensor, call: Call, split: TokenSplit
) -> Partial:
    """Attend inside the buckets of random hash functions; with a tail, to one bucket and to the centroids together."""
    scores = random_scores(method, query, key, call, split)
    if method.tail == 0:
        return _attend_inside(method, query, key, value, scores, call, split)
    sizes = {"topk": method.fixed_size, "cells": method.tail}
    return attend_with_scored_tail(
        query, key, value, scores, call.mask, split, **sizes, seed=call.seed, scale=call.scale
    )


def attend_learned_with_tail(
    method: LearnedHashTail, query: Tensor, key: Tensor, value: Tensor, call: Call, split: TokenSplit
) -> Partial:
    """Attend to the keys of each query's bucket and to the centroids of the others."""
    with torch.no_grad():
        scores = method.hashes(query, key, call)
    sizes = {"topk": method.keys, "cells": method.cells}
    return attend_with_scored_tail(
        query, key, value, scores, call.mask, split, **sizes, seed=call.seed, scale=call.scale
    )


def _attend_inside(
    method: HashedBuckets,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scores: Scores,
    call: Call,
    split: TokenSplit,
) -> Partial:
    size, union = method.fixed_size, method.merge == "union"
    return attend_balanced_of_ranks(
        query, key, value, scores, call.mask, split, size=size, scale=call.scale, union=union
    )


NEEDS = "both `buckets` and `bucket_size`, and selection='balanced'"
register(LearnedHash, Strategy(kind="partials", attend=attend_learned, fits=fixed_buckets, needs=NEEDS))
register(RandomHash, Strategy(kind="partials", attend=attend_random, fits=fixed_buckets, needs=NEEDS))
register(LearnedHashTail, Strategy(kind="partials", attend=attend_learned_with_tail))
