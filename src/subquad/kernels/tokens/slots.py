"""Slots: lists of tokens, of which some places are empty, and the buckets that they make."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from subquad.masks import Mask


@dataclass(frozen=True)
class Slots:
    """Lists of token numbers along the last axis; an empty slot holds `none`, which is not the number of any token.

    `a | b` lists the tokens of both, each once where a and b list each once; `a - b` empties the slots of a whose token
    is in the same list of b. So the parts of an attention can be kept disjoint: no key counts twice.

    >>> a, b = (Slots(torch.tensor(tokens), 9) for tokens in ([1, 2, 9], [2, 3]))
    >>> (a | b).tokens, (a - b).tokens
    (tensor([1, 2, 9, 9, 3]), tensor([1, 9, 9]))
    """

    tokens: Int64[Tensor, "*lists S"]
    none: int

    def __or__(self, other: "Slots") -> "Slots":
        assert self.none == other.none, "lists of tokens of different sequences"
        return Slots(torch.cat([self.tokens, (other - self).tokens], dim=-1), self.none)

    def __sub__(self, other: "Slots") -> "Slots":
        assert self.none == other.none, "lists of tokens of different sequences"
        both = (self.tokens[..., :, None] == other.tokens[..., None, :]).any(-1)
        return Slots(torch.where(both, self.none, self.tokens), self.none)


@dataclass(frozen=True)
class Buckets:
    """Blocks of queries and buckets of keys: every query of a block meets every key of the block's bucket.

        queries (T blocks of S slots)     bucket     keys (C buckets of K slots)
        [ 4  0  9  N ] ────────────────►    1        [ 0  1  2  3 ]   bucket 0
        [ 7  N  N  N ] ────────────────►    1        [ 4  7  9  M ]   bucket 1
        [ 2  3  1  N ] ────────────────►    0

    Slots hold token numbers; an empty slot holds N, or M for keys: one past the end. Only real tokens are listed.
    Without `bucket` there is one block for each bucket. With `span` only tokens at most that far apart meet.
    """

    queries: Int64[Tensor, "B H T S"]
    keys: Int64[Tensor, "B H C K"]
    bucket: Int64[Tensor, "B H T"] | None = None
    span: int | None = None

    def narrowed(self, mask: Mask) -> Mask:
        """The mask with the span of these buckets."""
        return mask if self.span is None else mask & Mask(span=self.span)  # which may be symbolic

    def of_valid(self, queries: Bool[Tensor, "B N"] | None, keys: Bool[Tensor, "B M"] | None) -> "Buckets":
        """The buckets without padding; None for `valid` means that all tokens are real."""
        return replace(self, queries=valid_slots(self.queries, queries), keys=valid_slots(self.keys, keys))

    def keys_of_block(self) -> Int64[Tensor, "B H T K"]:
        """For every block the keys of its bucket."""
        if self.bucket is None:
            return self.keys
        return self.keys.gather(2, self.bucket[..., None].expand(*self.bucket.shape, self.keys.shape[3]))

    def labels(self, N: int) -> Int64[Tensor, "B H N"]:
        """The bucket of each query, where it is in one at most; for those in none, the number of buckets."""
        assert self.bucket is not None
        B, H, C, _ = self.keys.shape
        labels = torch.full((B, H, N + 1), C, device=self.queries.device)
        of_slot = self.bucket[..., None].expand_as(self.queries)
        return labels.scatter(2, self.queries.flatten(2), of_slot.flatten(2))[..., :N]

    def multiplicity(self, N: int, M: int, mask: Mask, rows: slice = slice(None)) -> Float[Tensor, "B H rows M"]:
        """The number of times that each query, of these rows, meets each key. N×M memory for all: for tests."""
        queries = members(self.queries, N)[:, :, rows]
        keys = members(self.keys_of_block(), M)
        query, key = (torch.arange(n, device=queries.device)[None, None] for n in (N, M))
        allowed = self.narrowed(mask).sees(query[:, :, rows, None], key[..., None, :])
        return queries @ keys.transpose(-1, -2) * allowed


def members(slots: Int64[Tensor, "B H C S"], tokens: int) -> Float[Tensor, "B H {tokens} C"]:
    """A mask that is 1 where a token is in a bucket."""
    B, H, C, _ = slots.shape
    inside = torch.zeros(B, H, C, tokens + 1, device=slots.device).scatter(3, slots, 1.0)
    return inside[..., :tokens].transpose(-1, -2)


def vectors_at(x: Float[Tensor, "B G N D"], slots: Int64[Tensor, "B H T S"]) -> Float[Tensor, "B H T S D"]:
    """The vectors of the tokens in these slots; 0 for an empty slot. Several heads may share one of x's."""
    B, G, _, D = x.shape
    padded = torch.cat([x, x.new_zeros(B, G, 1, D)], dim=2)
    rows = padded.gather(2, slots.reshape(B, G, -1)[..., None].expand(-1, -1, -1, D))
    return rows.view(*slots.shape, D)


def taken(x: Float[Tensor, "B H M D"], tokens: Int64[Tensor, "B N"]) -> Float[Tensor, "B H N D"]:
    """The vectors of tokens that are the same for all heads."""
    B, H, _, D = x.shape
    return x.gather(2, tokens[:, None, :, None].expand(B, H, tokens.shape[1], D))


def rows_at(x: Float[Tensor, "B H M D"], slots: Int64[Tensor, "B S"]) -> Float[Tensor, "B H S D"]:
    """The vectors of the tokens in slots that are the same for all heads; 0 for an empty slot, which holds M."""
    return taken(F.pad(x, (0, 0, 0, 1)), slots)


def valid_slots(slots: Int64[Tensor, "B H T S"], valid: Bool[Tensor, "B N"] | None) -> Int64[Tensor, "B H T S"]:
    """The slots, empty where their token is padding."""
    if valid is None:
        return slots
    hidden = F.pad(~valid, (0, 1))[:, None, None].expand(*slots.shape[:3], -1)
    return torch.where(hidden.gather(3, slots), valid.shape[1], slots)


def with_itself(alone: Bool[Tensor, "B H N"]) -> Buckets:
    """Buckets of one token each."""
    N = alone.shape[2]
    slots = torch.where(alone, torch.arange(N, device=alone.device), N)[..., None]
    return Buckets(slots, slots)
