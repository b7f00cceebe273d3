"""Attention inside buckets that random hash functions fill: the baseline of learned hash functions.

Sun, Yang, Yoo 2022, section 4.1, equation 9, without Reformer's tie of queries and keys:

    H_Q(x) = H_K(x) = x [R; −R],   R: random directions; x is q·√scale or k·√scale
    buckets, merge and causal form as in "lha"

`hash=random` does not look at the vectors at all: its scores are random numbers of a token's place (the "Rand." row of
the paper's table 1). With `tail` cells, every query is in the one bucket that it scores highest, and the keys outside
of it come in as centroids, as in "lha-tail". With `selection=argmax` each token is in the one bucket that it scores
highest, of any size: strictly causal, as that of "lha".

The directions of bucket 2b and 2b + 1 are opposite; they depend on the seed, the bucket and the width alone, so that an
item with fewer buckets has the first ones of an item with more. Random numbers go by the place among the real tokens.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from subquad.core.randomness import normal, normal_rows
from subquad.kernels.selection.balanced import best_bucket, bucket_sizes, most_of
from subquad.kernels.tokens.heads import repeat_heads
from subquad.kernels.tokens.padding import zeroed_halves
from subquad.kernels.tokens.positions import ValidPositions, ranks
from subquad.kernels.tokens.slots import Buckets
from subquad.methods.core.bucketed import HashedBuckets, attend_with_cells, residual_in_cells
from subquad.methods.core.method import Call, Partial, Traits, choice, number, upcast, whole
from subquad.methods.core.residual import Residual

OF_KEYS = 2**62  # tells the seed of the keys' random numbers from that of the queries'


def plane_scores(x: Float[Tensor, "B H N D"], buckets: int, seed: int) -> Float[Tensor, "B H N C"]:
    """x [R; −R], opposite directions side by side; an odd number of buckets lacks the last opposite."""
    planes = normal(seed, (buckets + 1) // 2, x.shape[3], like=x)
    return torch.stack([x @ planes.T, -(x @ planes.T)], dim=-1).flatten(3)[..., :buckets]


def position_scores(
    x: Float[Tensor, "B H N D"], valid: Tensor | None, buckets: int, seed: int, before: Tensor | None = None
) -> Float[Tensor, "B H N C"]:
    """Random numbers by bucket and place among the item's real tokens; all heads have the same.

    `before`, (B,): how many real tokens of each item precede these, if these are not all.
    """
    B, H, N, _ = x.shape
    if before is not None:
        positions = ranks(valid, N, x.device) + before[:, None]
        return normal_rows(seed, positions, buckets, like=x)[:, None].expand(-1, H, -1, -1)
    drawn = normal(seed, N, buckets, like=x)
    if valid is None:
        return drawn.expand(B, H, -1, -1)
    rank = (valid.cumsum(1) - 1).clamp(min=0)
    return drawn[rank][:, None].expand(-1, H, -1, -1)


@dataclass(frozen=True)
class RandomHash(HashedBuckets):
    """Attention inside the buckets of random hash functions.

    Args:
        buckets: B. 0: as many as `bucket_size` asks for at the number of each item's keys.
        bucket_size: queries, and keys, of a bucket before `enlarge`. 0: N/B.
        hash: "planes", x[R; −R], or "random", which does not look at the vectors.
        enlarge: factor on the bucket size; 1 for buckets of N/B.
        merge: how often a key counts that shares several buckets with a query: "multiplicity" or once, "union".
        tail: how many centroids represent the keys outside a query's one bucket; 0 for the paper's buckets.
        selection: "balanced" buckets of one size, or each token in its "argmax" bucket: strictly causal.
        seed: random seed of the directions, or of the random numbers.

    >>> import torch, subquad as sq
    >>> q, k, v = torch.randn(3, 2, 4, 300, 64)
    >>> sq.attention(q, k, v, method="lsh:buckets=4").shape
    torch.Size([2, 4, 300, 64])
    """

    buckets: int = whole(8, counts=True)
    bucket_size: int = whole(0)
    hash: str = choice("planes", "random")
    enlarge: float = number(math.sqrt(2), least=1.0)
    merge: str = choice("multiplicity", "union")
    tail: int = whole(0, counts=True)
    selection: str = choice("balanced", "argmax")
    seed: int = whole(0)

    name: ClassVar[str] = "lsh"
    traits: ClassVar[Traits] = replace(
        HashedBuckets.shared_traits, stochastic=True, source="Sun et al. 2022, equation 9; Kitaev et al. 2020"
    )

    def check(self) -> None:
        """Raise ValueError if the number of buckets is undetermined, or for settings that argmax excludes."""
        super().check()
        for setting, fits in {"tail": self.tail == 0, "buckets": self.buckets > 0}.items():
            if self.selection == "argmax" and not fits:
                have = getattr(self, setting)
                raise ValueError(f"{self.name!r}: {setting}={have} needs selection='balanced', but it is 'argmax'")

    def describe(self) -> Traits:
        """The traits of hashed buckets; with random hashes or a tail, the output depends on positions."""
        traits = super().describe()
        if self.hash == "random":
            traits = replace(traits, order_free=False, positional=True)
        return replace(traits, causal="no", positional=True) if self.tail > 0 else traits

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        """Attend inside the buckets, and merge; with a tail, to the one bucket and the centroids together."""
        if self.tail == 0:
            return super().attend(query, key, value, call)
        (buckets,) = self.meetings(query, key, call)
        return attend_with_cells(query, key, value, buckets, self.tail, call)

    @property
    def summarises(self) -> bool:
        """True if the keys outside a query's bucket take part: with a tail."""
        return self.tail > 0

    def residual(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Residual:
        """The centroids of the tail by themselves, and the keys of each query's bucket."""
        (buckets,) = self.meetings(query, key, call)
        return residual_in_cells(query, key, value, buckets, self.tail, call)

    def meetings(self, query: Tensor, key: Tensor, call: Call) -> tuple[Buckets, ...]:
        """Pairs of queries and keys that meet in a bucket."""
        if self.tail == 0:
            return super().meetings(query, key, call)
        with torch.no_grad():
            of_query, of_key = self.scores(query, key, call)
            sizing = (of_key.shape[3], self.enlarge, self.bucket_size)
            sizes = bucket_sizes(ValidPositions.from_mask(call.mask, query, key).key_lengths, *sizing)
            return (best_bucket(of_query, of_key, call.mask, sizes, most_of(key.shape[2], *sizing)),)

    def scores(
        self, query: Tensor, key: Tensor, call: Call, before: tuple[Tensor | None, Tensor | None] = (None, None)
    ) -> tuple[Tensor, Tensor]:
        """H_Q and H_K; −inf in buckets that an item does not have. Causal or argmax: their sum for both, as in "lha".

        `before`: how many real queries and keys of each item precede these, if these are not all.
        """
        (query, key), line = upcast(query, key), ValidPositions.from_mask(call.mask, query, key)
        query, key = zeroed_halves(query, key, call.mask) if self.ties(call) else (query, key)
        buckets = self.buckets or math.ceil(line.M / self.bucket_size)
        if self.hash == "random":
            of_query = position_scores(query, line.valid_queries, buckets, call.seed, before[0])
            of_key = position_scores(key, line.valid_keys, buckets, call.seed ^ OF_KEYS, before[1])
        else:
            root = abs(call.scale) ** 0.5
            of_query, of_key = (plane_scores(x * root, buckets, call.seed) for x in (query, key))
        of_key = repeat_heads(of_key, query.shape[1])
        if self.ties(call):
            of_query = of_key = of_query + of_key
        if self.buckets == 0:
            bucket_count = (line.key_lengths + self.bucket_size - 1) // self.bucket_size
            absent = torch.arange(buckets, device=key.device) >= bucket_count.clamp(min=1)[:, None, None, None]
            of_query, of_key = (x.masked_fill(absent, -torch.inf) for x in (of_query, of_key))
        return of_query, of_key
