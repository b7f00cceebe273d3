"""Each pair once: which pairs of several sets of buckets have met in an earlier bucket or set.

A set's signature gives each token a bit for each of its buckets, in words of int64. A query and a key share a bucket
where their words have a bit in common, so no pair is ever looked up: O(pairs · C / 62) operations on words for sets of
C buckets, and one bool for each pair of a block.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from subquad.kernels.tokens.slots import Buckets
from subquad.masks import Mask

BITS = 62  # of a word, which stays below the sign


@dataclass(frozen=True)
class Signature:
    """The buckets of each query and each key of one set, as bits: bucket c is bit c mod 62 of word ⌊c / 62⌋."""

    queries: tuple[Int64[Tensor, "B H _"], ...]  # a word each; P = N + 1, the last is that of empty slots
    keys: tuple[Int64[Tensor, "B H _"], ...]
    span: int | None

    @staticmethod
    def from_buckets(buckets: Buckets, N: int, M: int) -> "Signature":
        """The signature of a set, in which a token is once in a bucket."""
        C = buckets.keys.shape[2]
        number = torch.arange(C, device=buckets.keys.device).expand(buckets.keys.shape[:3])
        of_block = number if buckets.bucket is None else buckets.bucket
        return Signature(_words(buckets.queries, of_block, N, C), _words(buckets.keys, number, M, C), buckets.span)

    def shared(
        self, queries: Int64[Tensor, "B H T S"], keys: Int64[Tensor, "B H T K"], mask: Mask
    ) -> Bool[Tensor, "B H T S K"]:
        """The pairs among these that meet in the set."""
        both = _any_in_common(self._words_at(queries, keys))
        if self.span is None:
            return both
        near = Mask(offset=mask.offset, span=self.span).sees(queries[..., :, None], keys[..., None, :])
        return both & near

    def shared_before(self, buckets: Buckets) -> Bool[Tensor, "B H T S K"]:
        """The pairs of the set's own blocks that meet in an earlier bucket too."""
        queries, keys = buckets.queries, buckets.keys_of_block()
        number = torch.arange(buckets.keys.shape[2], device=keys.device).expand(buckets.keys.shape[:3])
        number = number if buckets.bucket is None else buckets.bucket
        words = []
        for word, (of_query, of_key) in enumerate(self._words_at(queries, keys)):
            earlier = (1 << (number - word * BITS).clamp(0, BITS)) - 1
            words.append((of_query, of_key & earlier[..., None]))
        return _any_in_common(words)

    def _words_at(self, queries: Tensor, keys: Tensor) -> list[tuple[Tensor, Tensor]]:
        words = zip(self.queries, self.keys, strict=True)
        return [(_at(of_query, queries), _at(of_key, keys)) for of_query, of_key in words]


def _words(
    slots: Int64[Tensor, "B H T S"], bucket: Int64[Tensor, "B H T"], tokens: int, buckets: int
) -> tuple[Tensor, ...]:
    """The words of each token."""
    B, H, T, S = slots.shape
    words = []
    for first in range(0, max(buckets, 1), BITS):
        number = (bucket - first)[..., None].expand(B, H, T, S)
        inside = (number >= 0) & (number < BITS) & (slots < tokens)
        bit = torch.where(inside, 1 << number.clamp(0, BITS - 1), 0)
        empty = bit.new_zeros(B, H, tokens + 1)
        words.append(empty.scatter_add(2, slots.flatten(2), bit.flatten(2)))
    return tuple(words)


def _at(words: Int64[Tensor, "B H P"], slots: Int64[Tensor, "B H T S"]) -> Int64[Tensor, "B H T S"]:
    return words.gather(2, slots.flatten(2)).view_as(slots)


def _any_in_common(words: Sequence[tuple[Tensor, Tensor]]) -> Bool[Tensor, "B H T S K"]:
    common = [(of_query[..., :, None] & of_key[..., None, :]) != 0 for of_query, of_key in words]
    met = common[0]
    for more in common[1:]:
        met = met | more
    return met


@torch.no_grad()
def first_meetings(
    sets: Sequence[Buckets], N: int, M: int, mask: Mask, before: Sequence[Buckets] = ()
) -> tuple[Bool[Tensor, "B H _ _ _"], ...]:
    """For each set, which pairs of its blocks meet for the first time: in no earlier bucket, set, or set of `before`.

    >>> slots = torch.tensor([[[[0, 1]]]])
    >>> both = Buckets(slots, slots), Buckets(slots, torch.tensor([[[[1, 2]]]]))
    >>> [first.int().tolist() for first in first_meetings(both, 3, 3, Mask())]
    [[[[[[1, 1], [1, 1]]]]], [[[[[0, 1], [0, 1]]]]]]
    """
    earlier = [Signature.from_buckets(each, N, M) for each in before]
    firsts = []
    for each in sets:
        signature, queries, keys = Signature.from_buckets(each, N, M), each.queries, each.keys_of_block()
        met = signature.shared_before(each)
        for other in earlier:
            met = met | other.shared(queries, keys, mask)
        firsts.append(~met)
        earlier.append(signature)
    return tuple(firsts)
