"""Measure how evenly a hash fills its buckets without balancing, with each token in its highest-scoring bucket.

Sun, Yang, Yoo 2022, "Sparse Attention with Learning-to-Hash", section 3.2 and appendix H:

    s_b = #queries + #keys of bucket b,   E = (N + M)/B its expected value (2N/B in self-attention)
    size-imbalanced:  s_b > 2E or s_b < E/2
    ratio-imbalanced: #queries/#keys > 2 or < 1/2

The paper does not state which buckets its percentages cover, and its histogram leaves out buckets without queries or
without keys, so both are here: over all B buckets, and over those that are not empty (sizes) or that have both queries
and keys (ratios).
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from subquad.methods import BoundMethod, Method
from subquad.tools.measure.hooks import asked, scores


@dataclass(frozen=True)
class BucketSizes:
    """Real queries and keys in each bucket of each item and head."""

    queries: Int64[Tensor, "B H C"]
    keys: Int64[Tensor, "B H C"]
    exists: Bool[Tensor, "B H C"]  # shorter items may have fewer buckets

    @property
    def total(self) -> Int64[Tensor, "B H C"]:
        """s_b, the number of queries and keys in each bucket."""
        return self.queries + self.keys

    @property
    def expected(self) -> Float[Tensor, "B H 1"]:
        """E, the expected number of queries and keys in a bucket."""
        return self.total.sum(-1, keepdim=True).double() / self.exists.sum(-1, keepdim=True)

    @property
    def ratios(self) -> Float[Tensor, "B H C"]:
        """#queries/#keys: infinite for a bucket without keys, NaN for an empty one."""
        return self.queries.double() / self.keys.double()

    def imbalance(self) -> "Imbalance":
        """Shares of unbalanced buckets, of all items and heads together."""
        size, ratio, expected = self.total, self.ratios, self.expected
        by_size = (size > 2 * expected) | (size < expected / 2)
        by_ratio = (ratio > 2) | (ratio < 0.5)
        return Imbalance(
            size=_share(by_size, self.exists),
            size_of_filled=_share(by_size, size > 0),
            ratio=_share(by_ratio, self.exists),
            ratio_of_both=_share(by_ratio, (self.queries > 0) & (self.keys > 0)),
        )


@dataclass(frozen=True)
class Imbalance:
    """Shares in [0, 1]; NaN where there is no bucket to take the share of."""

    size: float  # size-imbalanced, of all buckets
    size_of_filled: float  # … of those that are not empty
    ratio: float  # ratio-imbalanced, of all buckets; an empty one is not imbalanced
    ratio_of_both: float  # … of those with queries and keys


def bucket_sizes(
    method: Method | BoundMethod, query: Float[Tensor, "B H N D"], key: Float[Tensor, "B G M D"], **options: Any
) -> BucketSizes:
    """Sizes of the buckets by each token's highest score; padding is left out.

    Args:
        method: a method that has `scores`; one with learned parameters bound.
        options: as in `subquad.attention`: `mask`, `scale`.

    Raises:
        ValueError: the method does not hash tokens by themselves, or refuses the call; packed segments.
    """
    of_query, of_key = scores(method, query, key, **options)
    mask = asked(method, query, key, **options)[2].mask
    valid_queries, valid_keys = mask.query_padding(query.shape[2]), mask.key_padding(key.shape[2])
    exists = ~torch.isneginf(of_query).all(2)
    return BucketSizes(counts(of_query, valid_queries), counts(of_key, valid_keys), exists)


def counts(scores: Float[Tensor, "B H N C"], valid: Bool[Tensor, "B N"] | None) -> Int64[Tensor, "B H C"]:
    """The number of real tokens that score highest in each bucket."""
    labels = scores.argmax(-1)
    taken = torch.ones_like(labels) if valid is None else valid[:, None].expand_as(labels).long()
    return torch.zeros_like(labels[..., :1]).expand(*labels.shape[:2], scores.shape[3]).scatter_add(2, labels, taken)


def _share(chosen: Bool[Tensor, "B H C"], among: Bool[Tensor, "B H C"]) -> float:
    return float((chosen & among).sum().double() / among.sum())
