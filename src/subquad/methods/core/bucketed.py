"""Methods that choose which queries meet which keys, in buckets, and attend exactly inside them."""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from subquad.kernels.attention.pairs.op import attend_pairs
from subquad.kernels.attention.tail.op import attend_with_tail
from subquad.kernels.attention.tail.reference import cells_and_exact_pairs
from subquad.kernels.selection.balanced import balanced_buckets, fixed_size, same_label_buckets
from subquad.kernels.selection.cells.op import cells_of_keys
from subquad.kernels.selection.hash_functions import Hashed, HashFunctions, hashed
from subquad.kernels.tokens.slots import Buckets
from subquad.masks import Mask
from subquad.methods.core.call import Attention
from subquad.methods.core.exact import prepare_exact
from subquad.methods.core.method import Call, Method, Partial, Traits
from subquad.methods.core.residual import Residual


def attend_inside(
    query: Tensor, key: Tensor, value: Tensor, buckets: Buckets | tuple[Buckets, ...], call: Call, **more: Any
) -> tuple[Tensor, Tensor]:
    """Attention inside buckets with the options of a call; `more` are further arguments of `attend_pairs`."""
    options: dict[str, Any] = {"scale": call.scale, "dropout_p": call.dropout_p, **more}
    return attend_pairs(query, key, value, buckets, call.mask, **options)


def attend_with_cells(
    query: Tensor, key: Tensor, value: Tensor, buckets: Buckets, cells: int, call: Call
) -> tuple[Tensor, Tensor]:
    """Attention of each query to the keys of its one bucket, and to the other keys as `cells` centroids."""
    return attend_with_tail(*_of_tail(query, key, value, buckets, cells, call), **_sizes(buckets, cells, call))


def residual_in_cells(query: Tensor, key: Tensor, value: Tensor, buckets: Buckets, cells: int, call: Call) -> Residual:
    """The two parts of `attend_with_cells`, for a sum."""
    tail = _of_tail(query, key, value, buckets, cells, call)
    of_cells, exact = cells_and_exact_pairs(*tail, **_sizes(buckets, cells, call))
    return Residual(of_cells.partial, of_cells.of_query, of_cells.of_key, by_features=False, exact=(exact,))


def _of_tail(query: Tensor, key: Tensor, value: Tensor, buckets: Buckets, cells: int, call: Call) -> tuple[Tensor, ...]:
    with torch.no_grad():
        cell = cells_of_keys(key, call.mask.key_padding(key.shape[2]), cells=cells, seed=call.seed)
    return query, key, value, buckets.labels(query.shape[2]), cell, buckets.keys


def _sizes(buckets: Buckets, cells: int, call: Call) -> dict[str, Any]:
    _, _, C, K = buckets.keys.shape
    return {"clusters": C, "topk": K, "cells": cells, "scale": call.scale, "dropout_p": call.dropout_p}


@dataclass(frozen=True)
class StepByPosition:
    """Prepares steps of one query, for a method whose pairs depend on positions alone and are the same in all heads.

    A step is exact attention to the keys that the query meets: all others count as padding. So the kernel for few
    queries runs it, and the layers of a forward pass list the pairs once.
    """

    method: Any

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Attention | None:
        """Prepare the attention of tensors like these; None if tokens are packed."""
        if call.mask.ids:
            return None
        N, M = query.shape[2], key.shape[2]
        met = self.method.clamped_to(N, M).meetings(query[:, :1], key[:, :1], call)
        visible = torch.stack([buckets.multiplicity(N, M, call.mask)[:, 0, 0] for buckets in met]).sum(0) > 0
        return prepare_exact(query, key, value, call.under(Mask.padding(keys=visible)))


class Bucketed(Method):
    """A method that defines `meetings` instead of `attend`. A key counts as often as it meets a query.

    In a sum with others, a key counts once, by the product of query and key: only the choice is the method's.
    """

    weighs: ClassVar[bool] = False  # whether it adds terms of its own to the logits of the pairs
    pairs_once: ClassVar[bool] = False  # whether no pair meets twice

    @property
    def summarises(self) -> bool:
        """True if the keys outside of a query's buckets count too, as summaries."""
        return False

    def meetings(self, query: Tensor, key: Tensor, call: Call) -> tuple[Buckets, ...]:
        """Pairs of queries and keys that meet."""
        raise NotImplementedError(f"{type(self).__name__} defines no meetings")

    def follow(self, query: Tensor, key: Tensor, call: Call) -> None:
        """In training, let what the choice is made by follow the tokens, where it learns without a gradient."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        """Attend inside the buckets."""
        return attend_inside(query, key, value, self.meetings(query, key, call), call)


class LearnsHashes(Bucketed):
    """A method whose hash functions H_Q and H_K are learned: its scores are theirs."""

    buckets: int
    hash: str
    hidden: int
    seed: int

    def make_learned(self, heads: int, kv_heads: int, head_dim: int, max_length: int | None) -> nn.Module:
        """The initial hash functions."""
        buckets, size = self.buckets, getattr(self, "bucket_size", 0)
        if buckets == 0:
            if max_length is None:
                raise ValueError(
                    f"{self.name!r}: buckets=0 needs the longest input, to count the buckets: bind(max_length=…), "
                    "or max_length=… of sq.nn.MultiheadAttention or sq.hf.swap"
                )
            buckets = math.ceil(max_length / size)
        return HashFunctions(heads, kv_heads, head_dim, buckets, kind=self.hash, hidden=self.hidden, seed=self.seed)

    def hashes(self, query: Tensor, key: Tensor, call: Call) -> tuple[Hashed, Hashed]:
        """The hash functions of queries and keys, not yet evaluated."""
        return hashed(query, key, call.learned, call.scale)

    def scores(self, query: Tensor, key: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """The scores of each token in each bucket, as tensors."""
        of_query, of_key = self.hashes(query, key, call)
        scores = of_query.scores()
        return scores, scores if of_key is of_query else of_key.scores()


class HashedBuckets(Bucketed):
    """A method that defines `scores`, those of each token in each bucket, by which the buckets are filled."""

    buckets: int  # 0: as many as `bucket_size` asks for
    bucket_size: int  # queries, and keys, of a bucket before `enlarge`; 0: N/B
    enlarge: float
    merge: str  # how often a key counts that shares several buckets with a query: "multiplicity", or once, "union"
    selection: str  # "balanced" buckets of one size, or each token in the bucket that it scores highest, "argmax"

    shared_traits: ClassVar[Traits] = Traits(
        family="buckets",
        causal="values-only",
        dropout="attention weights in each bucket",
        subquadratic=False,
        exact_limit={"buckets": 1},
        example={"buckets": 4},
        complexity="O(N·(B + 2N/B)·D) time with B buckets, O(N·(B + S)·D) with a bucket size of S",
        source="Sun et al. 2022",
    )

    def check(self) -> None:
        """Raise ValueError if neither setting determines the number of buckets."""
        if self.buckets == self.bucket_size == 0:
            raise ValueError(f"{self.name!r}: buckets=0 takes their number from bucket_size, which is 0 too")

    def describe(self) -> Traits:
        """The traits with buckets of a constant size, or with argmax buckets."""
        traits = type(self).traits
        if self.selection == "argmax":
            return replace(traits, subquadratic=False, causal="strict", cross=False, exact_limit={"buckets": 1})
        if self.bucket_size == 0:
            return traits
        limit: dict[str, int | str] = {"buckets": 1, "bucket_size": "M"}
        return replace(traits, subquadratic=self.merge == "multiplicity", exact_limit=limit)

    @property
    def fixed_size(self) -> int:
        """Tokens of a bucket if `bucket_size` sets it, in an item that has enough."""
        return fixed_size(self.bucket_size, self.enlarge)

    def refuses(self, mask: Mask, *, cross: bool = False, **asked: bool) -> str | None:
        """The reason why the method refuses a call: causal hashes are tied, so queries and keys must be equal."""
        if not (mask.is_causal and cross):
            return super().refuses(mask, cross=cross, **asked)
        return (
            f"{self.name!r} ties the hashes of queries and keys under a causal mask, so they must be the same tokens: "
            "it takes no cross-attention and no step on a cache there (generate with use_cache=False)"
        )

    def scores(
        self, query: Tensor, key: Tensor, call: Call
    ) -> tuple[Float[Tensor, "B H N C"], Float[Tensor, "B H M C"]]:
        """The scores of each query and each key in each bucket; one score for both if `ties`."""
        raise NotImplementedError(f"{type(self).__name__} defines no scores")

    def hashes(self, query: Tensor, key: Tensor, call: Call) -> tuple[Hashed | Tensor, Hashed | Tensor]:
        """The scores, or what they are computed from, for an op that does both."""
        return self.scores(query, key, call)

    def ties(self, call: Call) -> bool:
        """True if queries and keys have one score: under a causal mask, and for argmax buckets."""
        return call.mask.is_causal or self.selection == "argmax"

    def meetings(self, query: Tensor, key: Tensor, call: Call) -> tuple[Buckets, ...]:
        """Pairs of queries and keys that meet: in each bucket those that score highest."""
        with torch.no_grad():
            if self.selection == "argmax":
                scores, _ = self.scores(query, key, call)
                return same_label_buckets(scores.argmax(-1), scores.shape[3], call.mask)
            of_query, of_key = self.hashes(query, key, call)
            return balanced_buckets(of_query, of_key, call.mask, enlarge=self.enlarge, size=self.bucket_size)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        """Attend inside the buckets, and merge."""
        union = self.merge == "union"
        return attend_inside(query, key, value, self.meetings(query, key, call), call, union=union)
