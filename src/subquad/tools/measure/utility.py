"""Attention utility: how much of exact attention falls on the keys that a method chooses.

Sun, Yang, Yoo 2022, "Sparse Attention with Learning-to-Hash", section 3.3, with A = softmax(scale·Q Kᵀ):

    AU    = (1/N) Σ_ij A_ij·[i and j share a bucket]       equation 5, each key once
    bound = (1/N) Σ_i Σ of the k largest A_ij              the figure's upper bound, k = N/B

Buckets of random tokens have an expected utility of 1/B, one bucket has 1. A partition into buckets with equally many
queries and keys cannot exceed the bound at N/B keys. A method that puts a query into two buckets can: it chose more
keys. No method exceeds the bound at its own number of distinct keys for each query.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from subquad.kernels.attention.attention_sums import exact_weights
from subquad.kernels.tokens.heads import repeat_heads
from subquad.kernels.tokens.slots import Buckets
from subquad.masks import Mask
from subquad.methods import BoundMethod, Full, Method
from subquad.tools.measure.hooks import asked, meetings

Name = TypeVar("Name")

CHUNK = 2**22  # weights, of all heads and items, that are in memory at a time


@dataclass(frozen=True)
class Utility:
    """The utility of one method for each item and head, as means over the real queries."""

    utility: Float[Tensor, "B H"]
    keys: Float[Tensor, "B H"]  # distinct ones that a query meets
    bound: Float[Tensor, "B H"]  # the largest utility with each query's own number of keys


def attention_utility(
    method: Method | BoundMethod, query: Float[Tensor, "B H N D"], key: Float[Tensor, "B G M D"], **options: Any
) -> Utility:
    """The utility of one method; see `utilities`."""
    return utilities({"": method}, query, key, keys=0, **options)[1][""]


@torch.no_grad()
def utilities(
    methods: Mapping[Name, Method | BoundMethod],
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B G M D"],
    *,
    keys: int | Int64[Tensor, "B"],
    **options: Any,
) -> tuple[Float[Tensor, "B H"], dict[Name, Utility]]:
    """The upper bound at `keys` keys per query, and the utility of methods on the same queries and keys.

    O(H·N·M·(D + ln M)) time; memory for a few queries' weights at a time.

    Args:
        methods: methods that have `meetings`; those with learned parameters bound.
        keys: number of keys of the bound, for all items or for each; larger numbers count as all keys.
        options: as in `subquad.attention`: `mask`, `scale`, `bias`. Padded queries are left out of the means.

    Raises:
        ValueError: a method does not declare its choice of keys, or refuses the call; packed segments.
    """
    chosen = {name: meetings(method, query, key, **options) for name, method in methods.items()}
    query, key, call = asked(Full(), query, key, **options)
    B, H, N, _ = query.shape
    M = key.shape[2]
    at = torch.as_tensor(keys, device=query.device).expand(B).clamp(max=M)[:, None, None, None]
    bound = query.new_zeros(B, H, dtype=torch.float64)
    sums = {name: query.new_zeros(3, B, H, dtype=torch.float64) for name in methods}
    step = max(1, CHUNK // max(1, B * H * M))
    for rows, weights in exact_weights(query, repeat_heads(key, H), call.mask, call.scale, step=step, bias=call.bias):
        best = _sums_of_largest(weights)
        bound += best.gather(3, at.expand(B, H, weights.shape[2], 1)).sum((2, 3), dtype=torch.float64)
        for name, buckets in chosen.items():
            met = _met(buckets, N, M, call.mask, rows)
            count = met.sum(3, keepdim=True)
            for total, part in zip(sums[name], (weights * met, count, best.gather(3, count)), strict=True):
                total += part.sum((2, 3), dtype=torch.float64)
    valid = call.mask.query_padding(N)
    queries = torch.full((B, 1), N, device=query.device) if valid is None else valid.sum(1, keepdim=True).clamp(min=1)
    return bound / queries, {name: Utility(*(total / queries)) for name, total in sums.items()}


def _sums_of_largest(weights: Float[Tensor, "B H N M"]) -> Float[Tensor, "B H N M+1"]:
    """Entry k: the sum of the k largest weights of the query."""
    ranked = weights.sort(-1, descending=True).values.cumsum(-1)
    return torch.nn.functional.pad(ranked, (1, 0))


def _met(buckets: tuple[Buckets, ...], N: int, M: int, mask: Mask, rows: slice) -> Bool[Tensor, "B H rows M"]:
    """A mask that is True where a query meets a key in any bucket."""
    first, *more = (part.multiplicity(N, M, mask, rows) > 0 for part in buckets)
    for met in more:
        first = first | met
    return first
