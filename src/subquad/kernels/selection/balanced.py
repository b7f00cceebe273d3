"""From scores to buckets: balanced ones, and those of one label each."""

import math

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from subquad.core.versions import sym_min
from subquad.kernels.selection.blocks.op import by_bucket
from subquad.kernels.selection.group_means import group_sizes
from subquad.kernels.selection.hash_functions import Hashed
from subquad.kernels.selection.sorted_chunks import tokens_at
from subquad.kernels.selection.top.op import top_and_best
from subquad.kernels.tokens.positions import valid_lengths
from subquad.kernels.tokens.slots import Buckets, valid_slots, with_itself
from subquad.kernels.transforms import shapes_may_follow_data
from subquad.masks import Mask


def balanced_buckets(
    of_query: Float[Tensor, "B H N C"] | Hashed,
    of_key: Float[Tensor, "B H M C"] | Hashed,
    mask: Mask,
    *,
    enlarge: float,
    size: int = 0,
    odds: bool = True,
) -> tuple[Buckets, ...]:
    """Each bucket takes the queries and the keys that score highest in it, N/B·enlarge of either (or size·enlarge).

    A query that no bucket takes meets the keys of the bucket that it scores highest; under a causal mask itself too, as
    every query does that a bucket takes when its scores as query and as key are the same. Sizes are each item's own.
    With `odds`, scores are logits over the buckets, and tokens are ranked by their softmax.
    """
    B, _, N, C = of_query.shape
    M, device = of_key.shape[2], of_query.device
    valid_queries, valid_keys = mask.query_padding(N), mask.key_padding(M)
    sides: list[tuple[Tensor, Tensor]] = []
    for scores, valid, tokens in ((of_query, valid_queries, N), (of_key, valid_keys, M)):
        if scores is of_query and sides and valid_queries is valid_keys:  # tied, and without padding
            sides *= 2
            break
        lengths = valid_lengths(valid, B, tokens, device)
        sizes = bucket_sizes(lengths, C, enlarge, size)
        sides.append(top_and_best(scores, sizes, most_of(tokens, C, enlarge, size), valid, odds=odds))
    (queries, best), (keys, _) = sides
    return filled_buckets(queries, best, keys, mask)


def filled_buckets(
    queries: Int64[Tensor, "B H C S"], best: Int64[Tensor, "B H N"], keys: Int64[Tensor, "B H C K"], mask: Mask
) -> tuple[Buckets, ...]:
    """The sets of `balanced_buckets`, from what each bucket takes and the bucket that each query scores highest."""
    (B, H, N), C = best.shape, queries.shape[2]
    valid = mask.query_padding(N)
    taken = torch.zeros(B, H, N + 1, dtype=torch.bool, device=best.device)
    alone = ~taken.scatter(2, queries.flatten(2), True)[..., :N]
    alone = alone if valid is None else alone & valid[:, None]
    left_over, bucket = by_bucket(torch.where(alone, best, C), C)
    buckets = (Buckets(queries, keys), Buckets(left_over, keys, bucket))
    if not mask.is_causal:
        return buckets
    valid_keys = mask.key_padding(N)
    return *buckets, with_itself(alone if valid_keys is None else alone & valid_keys[:, None])


def bucket_sizes(lengths: Int64[Tensor, "B"], buckets: int, enlarge: float, size: int) -> Int64[Tensor, "B"]:
    """Tokens that a bucket takes of items of these lengths: n/B·enlarge, or size·enlarge where a size is given."""
    return lengths.clamp(max=fixed_size(size, enlarge)) if size else enlarged(lengths, buckets, enlarge)


def fixed_size(size: int, enlarge: float) -> int:
    """Tokens that a bucket takes of an item that has enough."""
    return max(1, int(size * enlarge))


def enlarged(lengths: Int64[Tensor, "B"], buckets: int, enlarge: float) -> Int64[Tensor, "B"]:
    """Tokens of a bucket: int(n / B · enlarge), at least one and at most n."""
    size = (lengths.double() / buckets * enlarge).floor().long()
    return size.clamp(min=1).minimum(lengths)


def most_of(tokens: int, buckets: int, enlarge: float, size: int) -> int:
    """At least the largest of `bucket_sizes` for items of at most `tokens` tokens."""
    return sym_min(tokens, fixed_size(size, enlarge) if size else math.ceil(tokens / buckets * enlarge))


def same_label_buckets(labels: Int64[Tensor, "B H N"], buckets: int, mask: Mask) -> tuple[Buckets, ...]:
    """Every token meets all tokens of its label, however many those are; padded tokens none.

    Tokens are sorted by label into blocks. One part pairs each block with itself, the next with the block before it,
    and so on; blocks after it are left out under a causal mask, which would hide them whole. If nothing may be read
    from the labels, there would be as many parts as blocks: there each label's list of keys is as long as all tokens.
    """
    N = labels.shape[2]
    valid, valid_keys = mask.query_padding(N), mask.key_padding(N)
    if valid is not None and valid_keys is not None:  # padding has no place in the blocks
        labels = torch.where((valid | valid_keys)[:, None], labels, buckets)
    tokens, bucket = by_bucket(labels, buckets)
    queries = valid_slots(tokens, valid)
    if not shapes_may_follow_data(bucket):
        return (Buckets(queries, valid_slots(_members(labels, buckets), valid_keys), bucket),)
    keys, T = valid_slots(tokens, valid_keys), tokens.shape[2]
    longest = int(group_sizes(bucket, buckets + 1).max()) if T else 1  # one part without blocks where there is no token
    parts = []
    for back in range(longest):
        for shift in {back, back if mask.is_causal else -back}:
            blocks = torch.arange(T, device=tokens.device) - shift
            inside = (blocks >= 0) & (blocks < T)
            blocks = blocks.clamp(0, max(T - 1, 0))
            same = inside & (bucket[:, :, blocks] == bucket)
            parts.append(Buckets(queries, torch.where(same[..., None], keys[:, :, blocks], N)))
    return tuple(parts)


def _members(labels: Int64[Tensor, "B H N"], buckets: int) -> Int64[Tensor, "B H C N"]:
    """The tokens of each label, in slots for all tokens."""
    sizes, rank = group_sizes(labels, buckets), torch.arange(labels.shape[2], device=labels.device)
    ranks = (sizes.cumsum(-1) - sizes)[..., None] + rank
    return tokens_at(labels.argsort(dim=-1, stable=True), ranks, rank < sizes[..., None])


def best_bucket(
    of_query: Float[Tensor, "B H N C"] | Hashed,
    of_key: Float[Tensor, "B H M C"] | Hashed,
    mask: Mask,
    keys: Int64[Tensor, "B"],
    most: int,
) -> Buckets:
    """Every query is in the one bucket that it scores highest; each bucket takes the `keys` that score highest in it.

    Keys are ranked by the scores as they are, not over the buckets. `most` is the largest of `keys`.
    """
    N, M, C = of_query.shape[2], of_key.shape[2], of_query.shape[3]
    valid = mask.query_padding(N)
    _, labels = top_and_best(of_query, torch.zeros_like(keys), 1, valid, odds=False)
    labels = labels if valid is None else torch.where(valid[:, None], labels, C)
    queries, bucket = by_bucket(labels, C)
    return Buckets(queries, top_and_best(of_key, keys, most, mask.key_padding(M), odds=False)[0], bucket)
