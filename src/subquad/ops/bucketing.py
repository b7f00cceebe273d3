"""From scores to buckets: balanced ones, and those of one label each."""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from subquad.masks import Mask
from subquad.ops.backends import choose
from subquad.ops.buckets import Buckets, by_bucket, enlarged, real_lengths, top_of_each_bucket
from subquad.ops.hash_functions import Hashed
from subquad.ops.native import buckets as compiled
from subquad.ops.transforms import shapes_may_follow_data


def balanced_buckets(
    of_query: Float[Tensor, "B H N C"] | Hashed,
    of_key: Float[Tensor, "B H M C"] | Hashed,
    mask: Mask,
    *,
    enlarge: float,
    size: int = 0,
) -> tuple[Buckets, ...]:
    """`best_of_each_bucket`, of scores that are logits over the buckets: tokens are ranked by their softmax.

    Scores that are still to be computed never lie in memory as a whole where a compiled backend takes them.
    """
    return _fill(of_query, of_key, mask, enlarge, size, odds=True)


def best_of_each_bucket(
    of_query: Float[Tensor, "B H N C"],
    of_key: Float[Tensor, "B H M C"],
    mask: Mask,
    *,
    enlarge: float,
    size: int = 0,
) -> tuple[Buckets, ...]:
    """Each bucket takes the queries and the keys that score highest in it, N/B·enlarge of either (or size·enlarge).

    A query that no bucket takes meets the keys of the bucket that it scores highest; under a causal mask itself too, as
    every query does that a bucket takes when its scores as query and as key are the same. Sizes are each item's own.
    """
    return _fill(of_query, of_key, mask, enlarge, size, odds=False)


def _fill(
    of_query: Tensor | Hashed, of_key: Tensor | Hashed, mask: Mask, enlarge: float, size: int, *, odds: bool
) -> tuple[Buckets, ...]:
    B, _, N, C = of_query.shape
    M, device = of_key.shape[2], of_query.device
    real_queries, real_keys = mask.query_padding(N), mask.key_padding(M)
    sides: list[tuple[Tensor, Tensor]] = []
    for scores, real, tokens in ((of_query, real_queries, N), (of_key, real_keys, M)):
        if scores is of_query and sides and real_queries is real_keys:  # tied, and without padding
            sides *= 2
            break
        lengths = real_lengths(real, B, tokens, device)
        sizes = bucket_sizes(lengths, C, enlarge, size)
        sides.append(top_and_best(scores, sizes, most_of(tokens, C, enlarge, size), real, odds=odds))
    (queries, best), (keys, _) = sides
    taken = torch.zeros(*of_query.shape[:2], N + 1, dtype=torch.bool, device=device)
    alone = ~taken.scatter(2, queries.flatten(2), True)[..., :N]
    alone = alone if real_queries is None else alone & real_queries[:, None]
    labels = torch.where(alone, best, C)
    left_over, bucket = by_bucket(labels, C)
    buckets = (Buckets(queries, keys), Buckets(left_over, keys, bucket))
    if not mask.is_causal:
        return buckets
    return *buckets, with_itself(alone if real_keys is None else alone & real_keys[:, None])


def top_and_best(
    scores: Float[Tensor, "B H N C"] | Hashed,
    sizes: Int64[Tensor, "B"],
    most: int,
    real: Bool[Tensor, "B N"] | None,
    *,
    odds: bool,
) -> tuple[Int64[Tensor, "B H C K"], Int64[Tensor, "B H N"]]:
    """`top_of_each_bucket`, and of each token the bucket that it scores highest. With `odds` scores are logits over the
    buckets, and tokens are ranked by their softmax.
    """
    if isinstance(scores, Hashed):
        vectors = [x.detach() for _, x in scores.terms]
        if choose(cpu=compiled.refusal(vectors[0])) == "cpu":
            functions = [function for function, _ in scores.terms]
            weights = [w.detach().to(vectors[0].dtype) for function in functions for w in function.weights]
            biases = [b.detach().to(vectors[0].dtype) for function in functions for b in function.biases]
            layers = [len(function.weights) for function in functions]
            chosen = (sizes, most, real, odds)
            return compiled.top_by_hash(vectors, weights, biases, layers, scores.heads, scores.root, *chosen)
        scores = scores.scores()
    elif choose(cpu=compiled.refusal(scores)) == "cpu":
        return compiled.top_of_each_bucket(scores.detach(), sizes, most, real, odds)
    return top_of_each_bucket(log_odds(scores) if odds else scores, sizes, most, real), scores.argmax(-1)


def bucket_sizes(lengths: Int64[Tensor, "B"], buckets: int, enlarge: float, size: int) -> Int64[Tensor, "B"]:
    """Tokens that a bucket takes of items of these lengths: n/B·enlarge, or size·enlarge where a size is given."""
    return lengths.clamp(max=max(1, int(size * enlarge))) if size else enlarged(lengths, buckets, enlarge)


def most_of(tokens: int, buckets: int, enlarge: float, size: int) -> int:
    """At least the largest of `bucket_sizes` for items of at most so many tokens."""
    return torch.sym_min(tokens, max(1, int(size * enlarge)) if size else math.ceil(tokens / buckets * enlarge))


def log_odds(logits: Float[Tensor, "B H N C"]) -> Float[Tensor, "B H N C"]:
    """ln(p/(1 − p)) of p = softmax(logits): orders tokens within a bucket as p does, without saturating at p = 1."""
    total = logits.logsumexp(-1, keepdim=True)
    largest = F.one_hot(logits.argmax(-1), logits.shape[-1]).bool()
    rest_of_largest = logits.masked_fill(largest, -torch.inf).logsumexp(-1, keepdim=True)
    rest = torch.where(largest, rest_of_largest, total + torch.log1p(-(logits - total).exp().clamp(max=0.5)))
    return logits - rest


def with_itself(alone: Bool[Tensor, "B H N"]) -> Buckets:
    """A bucket of its own for each of these tokens."""
    N = alone.shape[2]
    slots = torch.where(alone, torch.arange(N, device=alone.device), N)[..., None]
    return Buckets(slots, slots)


def same_label_buckets(labels: Int64[Tensor, "B H N"], buckets: int, mask: Mask) -> tuple[Buckets, ...]:
    """Every token meets all tokens of its label, however many those are; padded tokens none.

    Tokens are sorted by label into blocks. One part pairs each block with itself, the next with the block before it,
    and so on; blocks after it are left out under a causal mask, which would hide them whole.
    """
    N = labels.shape[2]
    real, real_keys = mask.query_padding(N), mask.key_padding(N)
    if real is not None and real_keys is not None:  # padding has no place in the blocks
        labels = torch.where((real | real_keys)[:, None], labels, buckets)
    tokens, bucket = by_bucket(labels, buckets)
    queries, keys = real_slots(tokens, real), real_slots(tokens, real_keys)
    T = tokens.shape[2]
    longest = _longest_run(bucket) if shapes_may_follow_data() else T
    parts = []
    for back in range(longest):
        for shift in {back, back if mask.is_causal else -back}:
            blocks = torch.arange(T, device=tokens.device) - shift
            inside = (blocks >= 0) & (blocks < T)
            blocks = blocks.clamp(0, max(T - 1, 0))
            same = inside & (bucket[:, :, blocks] == bucket)
            parts.append(Buckets(queries, torch.where(same[..., None], keys[:, :, blocks], N)))
    return tuple(parts)


def hide_tokens(slots: Int64[Tensor, "B H T S"], hidden: Bool[Tensor, "B N"]) -> Int64[Tensor, "B H T S"]:
    """The slots, empty where their token is hidden."""
    N = hidden.shape[1]
    hidden = F.pad(hidden, (0, 1))[:, None, None].expand(*slots.shape[:3], -1)
    return torch.where(hidden.gather(3, slots), N, slots)


def real_slots(slots: Int64[Tensor, "B H T S"], real: Bool[Tensor, "B N"] | None) -> Int64[Tensor, "B H T S"]:
    """The slots, empty where their token is padding."""
    return slots if real is None else hide_tokens(slots, ~real)


def real_tokens(mask: Mask, query: Float[Tensor, "B H N D"], *, both: bool) -> Bool[Tensor, "B N"]:
    """In self-attention: which tokens are real as a query and as a key, or else as either."""
    B, _, N, _ = query.shape
    every = torch.ones(B, N, dtype=torch.bool, device=query.device)
    as_query, as_key = (every if side is None else side for side in (mask.query_padding(N), mask.key_padding(N)))
    return as_query & as_key if both else as_query | as_key


def _longest_run(bucket: Int64[Tensor, "B H T"]) -> int:
    """The most blocks that one bucket has; 1 where there are none, for a part without blocks."""
    return int(F.one_hot(bucket).sum(2).max()) if bucket.shape[2] else 1


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
    real = mask.query_padding(N)
    _, labels = top_and_best(of_query, torch.zeros_like(keys), 1, real, odds=False)
    labels = labels if real is None else torch.where(real[:, None], labels, C)
    queries, bucket = by_bucket(labels, C)
    return Buckets(queries, top_and_best(of_key, keys, most, mask.key_padding(M), odds=False)[0], bucket)
