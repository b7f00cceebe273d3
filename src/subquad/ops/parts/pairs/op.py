"""The op `attend_pairs`.

On compiled backends it is one torch operator a direction for all sets of buckets together. Sets travel as three lists,
an empty tensor of `bucket` standing for none. The gradient is itself not differentiable.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from subquad.masks import Mask
from subquad.ops.backends import Gradient, Op, Operator
from subquad.ops.parts.pairs import reference
from subquad.ops.precision import wide
from subquad.ops.slots import Buckets
from subquad.ops.softmax import merge_partials
from subquad.ops.tensors import token_major

NO_WINDOW = -1
SLOTS = 1 << 18  # of a head, that one compiled call takes in several sets


@Op
def attend_pairs(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M E"],
    buckets: Buckets | tuple[Buckets, ...],
    mask: Mask,
    *,
    scale: float,
    key_bias: Float[Tensor, "B H M"] | None = None,
    of_distance: Float[Tensor, "#B H #N P"] | None = None,
    hidden: Bool[Tensor, "B H R M"] | None = None,
    shown: tuple[Bool[Tensor, "B H _ _ _"], ...] | None = None,
    by_features: bool = False,
    union: bool = False,
    other_keys_only: bool = False,
    dropout_p: float = 0.0,
) -> tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]]:
    """Each query's attention over the keys that it meets, as a partial: (out, lse), both in fp32 or better.

        out_i = Σ_j m_ij e^{s_ij} v_j / Σ_j m_ij e^{s_ij},   lse_i = ln Σ_j m_ij e^{s_ij},   s_ij = scale·q_i·k_j + b_j

    m_ij is how many buckets query i shares with key j, over all sets of buckets: merging buckets by log-sum-exp is one
    softmax in which a shared key counts that often. A query that meets no key has out = 0 and lse = −inf.

    Args:
        buckets: one set of buckets, or several.
        mask: its causal part and its window are applied; padding must be left out of the buckets already.
        key_bias: b, added to the logits of each key.
        of_distance: added to the logits too, by how far the key stands from the query: row i holds its terms for the
            distances −w, …, w in tokens ahead, or −w, …, 0 under a causal mask; one row is for all queries. The window
            w is that of the mask and the buckets together, which must have one. At a term of −∞ a query sees no key.
        hidden: query number i does not see the keys j at which row i mod R holds True.
        shown: for each set which pairs of its blocks count at all, such as those of `first_meetings`; None: all.
        by_features: s_ij = ln Σ_r e^{q_ir + k_jr} instead of scale·q_i·k_j, for queries and keys that are logarithms of
            features.
        union: a key counts once in each set, however many of its buckets it shares with the query.
        other_keys_only: a query does not see the key of its own number.

    The gradient flows through out and lse to query, key, value, key_bias and of_distance.

    Raises:
        ValueError: `of_distance` does not hold the distances of the window.
    """
    return reference.attend_pairs(
        query,
        key,
        value,
        (buckets,) if isinstance(buckets, Buckets) else buckets,
        mask,
        scale=scale,
        key_bias=key_bias,
        of_distance=of_distance,
        hidden=hidden,
        shown=shown,
        by_features=by_features,
        union=union,
        other_keys_only=other_keys_only,
        dropout_p=dropout_p,
    )


def _sets(buckets: Buckets | tuple[Buckets, ...]) -> tuple[Buckets, ...]:
    """The sets of buckets, less those without a block; one at least."""
    if isinstance(buckets, Buckets):
        return (buckets,)
    return buckets[:1] + tuple(more for more in buckets[1:] if more.queries.shape[2] > 0)


@attend_pairs.compiled
def _(
    backend: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    buckets: Buckets | tuple[Buckets, ...],
    mask: Mask,
    *,
    scale: float,
    key_bias: Tensor | None = None,
    of_distance: Tensor | None = None,
    hidden: Tensor | None = None,
    shown: tuple[Tensor, ...] | None = None,
    by_features: bool = False,
    union: bool = False,
    other_keys_only: bool = False,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    offset: int | Tensor = 0 if mask.offset is None else mask.offset
    offsets = None
    if isinstance(offset, Tensor):
        offsets = offset.to(query.device, torch.int64).reshape(-1).expand(query.shape[0])
        offset = 0
    pattern = offsets, hidden, offset, mask.is_causal, other_keys_only
    if of_distance is not None:
        reference.check_distances(of_distance.shape[3], [each.narrowed(mask) for each in _sets(buckets)])
        (of_distance,) = wide(of_distance.expand(query.shape[0], -1, -1, -1))
    parts = []
    for some in _portions(_sets(buckets)):
        queries, keys = [each.queries for each in some], [each.keys for each in some]
        bucket = [each.queries.new_empty(0) if each.bucket is None else each.bucket for each in some]
        spans = [each.narrowed(mask).span for each in some]
        sets = queries, keys, bucket, [NO_WINDOW if span is None else span for span in spans]
        parts.append(pairs_forward(backend, query, key, value, key_bias, *sets, *pattern, scale, of_distance))
    return parts[0] if len(parts) == 1 else merge_partials(parts)


def _portions(buckets: tuple[Buckets, ...]) -> list[tuple[Buckets, ...]]:
    """The sets in portions for one compiled call each, whose memory grows with the slots."""
    portions: list[tuple[Buckets, ...]] = []
    slots = 0
    for each in buckets:
        size = each.queries.shape[2] * each.queries.shape[3] + each.keys.shape[2] * each.keys.shape[3]
        if not portions or slots + size > SLOTS:
            portions, slots = [*portions, ()], 0
        portions[-1], slots = (*portions[-1], each), slots + size
    return portions


@Operator
def pairs_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_bias: Tensor | None,
    queries: list[Tensor],
    keys: list[Tensor],
    bucket: list[Tensor],
    spans: list[int],
    offsets: Tensor | None,
    hidden: Tensor | None,
    offset: int,
    causal: bool,
    other_keys_only: bool,
    scale: float,
    of_distance: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Allocate (out, lse)."""
    exact = torch.promote_types(query.dtype, torch.float32)
    return token_major(query, value.shape[3], exact), query.new_empty(query.shape[:3], dtype=exact)


BY = "query", "key", "value", "key_bias", "of_distance"
pairs_backward = Gradient(pairs_forward, *BY, named="attention inside buckets")


@pairs_forward.flops
def _(x: Any) -> int:
    """Operations of the products: logits, weighted values."""
    return 2 * pairs(x.queries, x.keys) * (x.query[3] + x.value[3])


@pairs_backward.flops
def _(x: Any) -> int:
    """The logits again and the gradients of both their sides; the gradients of weights and values."""
    return 2 * pairs(x.queries, x.keys) * (3 * x.query[3] + 2 * x.value[3])


def pairs(queries: Sequence[Sequence[int]], keys: Sequence[Sequence[int]]) -> int:
    """Query-key pairs that meet in buckets, by the shapes of the slots."""
    return sum(B * H * T * S * K for (B, H, T, S), (*_, K) in zip(queries, keys, strict=True))
