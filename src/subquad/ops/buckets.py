"""Buckets: lists of queries and of keys that meet, and the ways to fill them from scores."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from subquad.masks import Mask
from subquad.ops.backends import choose
from subquad.ops.grouping import sort_into_blocks
from subquad.ops.native import buckets as compiled
from subquad.ops.native.interface import refusal_of_any_dtype

BLOCK = 32  # slots of a block of queries that were in no bucket


@dataclass(frozen=True)
class Buckets:
    """Which queries meet which keys: every query of a block meets every key of the block's bucket.

    Slots hold token numbers; an empty slot holds N, or M for keys: one past the end. Only real tokens are listed.
    Without `bucket` there is one block for each bucket. With `span` only tokens at most that far apart meet.
    """

    queries: Int64[Tensor, "B H T S"]
    keys: Int64[Tensor, "B H C K"]
    bucket: Int64[Tensor, "B H T"] | None = None
    span: int | None = None

    def narrowed(self, mask: Mask) -> Mask:
        """The mask, and the span of these buckets."""
        return mask if self.span is None else mask & Mask(span=self.span)  # which may be symbolic

    def keys_of_block(self) -> Int64[Tensor, "B H T K"]:
        """For every block the keys of its bucket."""
        if self.bucket is None:
            return self.keys
        return self.keys.gather(2, self.bucket[..., None].expand(*self.bucket.shape, self.keys.shape[3]))

    def multiplicity(self, N: int, M: int, mask: Mask, rows: slice = slice(None)) -> Float[Tensor, "B H rows M"]:
        """How often each query, of these rows, meets each key. N×M memory for all: for tests and diagnostics."""
        queries = members(self.queries, N)[:, :, rows]
        keys = members(self.keys_of_block(), M)
        query, key = (torch.arange(n, device=queries.device)[None, None] for n in (N, M))
        seen = meets(query[:, :, rows, None], key[..., None, :], self.narrowed(mask))
        return queries @ keys.transpose(-1, -2) * seen


def members(slots: Int64[Tensor, "B H C S"], tokens: int) -> Float[Tensor, "B H {tokens} C"]:
    """1 where a token is in a bucket, else 0."""
    B, H, C, _ = slots.shape
    inside = torch.zeros(B, H, C, tokens + 1, device=slots.device).scatter_(3, slots, 1.0)
    return inside[..., :tokens].transpose(-1, -2)


def steps_ahead(query: Int64[Tensor, "..."], key: Int64[Tensor, "..."], mask: Mask) -> Int64[Tensor, "..."]:
    """How many tokens key number j stands after query number i, which the mask's offset places among the keys.

    The batch is the first axis of `query` where the offset differs by item.
    """
    offset = mask.offset
    if isinstance(offset, Tensor):
        offset = offset.to(query.device).reshape(-1, *[1] * (query.ndim - 1))
    return key - (query + (0 if offset is None else offset))


def meets(query: Int64[Tensor, "..."], key: Int64[Tensor, "..."], mask: Mask) -> Bool[Tensor, "..."]:
    """Whether the pattern of a mask, causal or a window, lets query number i see key number j; as `steps_ahead`."""
    ahead = steps_ahead(query, key, mask)
    seen = torch.ones_like(ahead, dtype=torch.bool)
    if mask.is_causal:
        seen = seen & (ahead <= 0)
    if mask.span is not None:
        seen = seen & (ahead.abs() <= mask.span)
    return seen


def real_lengths(real: Bool[Tensor, "B N"] | None, batch: int, tokens: int, device: torch.device) -> Int64[Tensor, "B"]:
    """How many real tokens each item has."""
    if real is None:
        return torch.full((batch,), tokens, dtype=torch.int64, device=device)
    return real.sum(1)


def enlarged(lengths: Int64[Tensor, "B"], buckets: int, enlarge: float) -> Int64[Tensor, "B"]:
    """Tokens of a bucket: int(n / B · enlarge), at least one and at most n."""
    size = (lengths.double() / buckets * enlarge).floor().long()
    return size.clamp(min=1).minimum(lengths)


def top_of_each_bucket(
    scores: Float[Tensor, "B H N C"], sizes: Int64[Tensor, "B"], most: int, real: Bool[Tensor, "B N"] | None
) -> Int64[Tensor, "B H C K"]:
    """Balanced selection: each bucket takes the `sizes` real tokens of its item that score highest in it.

    They come in ascending order; of equal scores the lower token goes first. `most` is at least the largest of the
    sizes. A token whose score is −inf is never taken.
    """
    if choose(cpu=compiled.refusal(scores)) == "cpu":
        return compiled.top_of_each_bucket(scores.detach(), sizes, most, real, False)[0]
    N = scores.shape[2]
    ranked = scores.detach().transpose(-1, -2)
    if real is not None:
        ranked = ranked.masked_fill(~real[:, None, None, :], -torch.inf)
    values, order = (x[..., :most] for x in ranked.sort(dim=-1, descending=True, stable=True))
    taken = torch.arange(order.shape[3], device=scores.device) < sizes[:, None, None, None]
    return torch.where(taken & ~torch.isneginf(values), order, N).sort(-1).values


def by_bucket(
    labels: Int64[Tensor, "B H N"], buckets: int, size: int = BLOCK
) -> tuple[Int64[Tensor, "B H T S"], Int64[Tensor, "B H T"]]:
    """Sort queries by bucket into blocks of `size` slots: (the queries, the bucket of each block).

    A label of `buckets` is in none. Outside of torch.compile the blocks that nobody uses are cut off.
    """
    if choose(cpu=refusal_of_any_dtype(labels)) == "cpu":
        tokens, bucket, used = compiled.by_bucket(labels, buckets, size)
    else:
        tokens, bucket, used = _by_bucket(labels, buckets, size)
    most = tokens.shape[2] if torch.compiler.is_compiling() else int(used.max())
    return tokens[:, :, :most], bucket[:, :, :most]


def _by_bucket(labels: Tensor, buckets: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """All blocks, and how many each head uses."""
    N = labels.shape[2]
    blocks = sort_into_blocks(labels, buckets, size)
    numbers = torch.arange(1, N + 1, device=labels.device).expand_as(labels)[..., None]
    tokens = blocks.gather(numbers)[..., 0] - 1
    tokens = torch.where(tokens < 0, N, tokens)
    return tokens, blocks.group, (tokens < N).any(3).sum(2)


def rows(x: Float[Tensor, "B H N D"], slots: Int64[Tensor, "B H T S"]) -> Float[Tensor, "B H T S D"]:
    """The vectors of the tokens in these slots; 0 for an empty slot."""
    B, H, _, D = x.shape
    padded = torch.cat([x, x.new_zeros(B, H, 1, D)], dim=2)
    return padded.gather(2, slots.flatten(2)[..., None].expand(-1, -1, -1, D)).unflatten(2, slots.shape[2:])
