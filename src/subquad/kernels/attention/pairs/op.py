"""The op `attend_pairs`.

On compiled backends it is one torch operator a direction for all sets of buckets together. Sets travel as three lists,
an empty tensor of `bucket` for none. The gradient is itself not differentiable.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from subquad.kernels.attention.pairs import reference
from subquad.kernels.attention.softmax import merge_partials
from subquad.kernels.dispatch import Op
from subquad.kernels.operators import Gradient
from subquad.kernels.precision import upcast
from subquad.kernels.tensors import token_major
from subquad.kernels.tokens.slots import Buckets

attend_pairs = Op(reference.attend_pairs)

NO_WINDOW = -1
SLOTS = 1 << 18  # of a head, that one compiled call takes in several sets
SETS = {"queries": list[Tensor], "keys": list[Tensor], "bucket": list[Tensor], "spans": list[int]}
PATTERN = {"offsets": Tensor | None, "hidden": Tensor | None, "offset": int, "causal": bool, "other_keys_only": bool}


@attend_pairs.compiled
def run(backend: str, x: Any) -> tuple[Tensor, Tensor]:
    """Run on a compiled backend: one call for each portion of the sets, merged."""
    offset: int | Tensor = 0 if x.mask.offset is None else x.mask.offset
    offsets = None
    if isinstance(offset, Tensor):
        offsets = offset.to(x.query.device, torch.int64).reshape(-1).expand(x.query.shape[0])
        offset = 0
    pattern = offsets, x.hidden, offset, x.mask.is_causal, x.other_keys_only
    buckets, of_distance = _sets(x.buckets), x.of_distance
    if of_distance is not None:
        reference.check_distances(of_distance.shape[3], [each.narrowed(x.mask) for each in buckets])
        (of_distance,) = upcast(of_distance.expand(x.query.shape[0], -1, -1, -1))
    parts = []
    for some in _portions(buckets):
        queries, keys = [each.queries for each in some], [each.keys for each in some]
        bucket = [each.queries.new_empty(0) if each.bucket is None else each.bucket for each in some]
        spans = [each.narrowed(x.mask).span for each in some]
        sets = queries, keys, bucket, [NO_WINDOW if span is None else span for span in spans]
        inputs = x.query, x.key, x.value, x.key_bias
        out, lse, _ = pairs_forward.run(backend, *inputs, *sets, *pattern, x.scale, of_distance)
        parts.append((out, lse))
    return parts[0] if len(parts) == 1 else merge_partials(parts)


def _sets(buckets: Buckets | tuple[Buckets, ...]) -> tuple[Buckets, ...]:
    """The sets of buckets, less those without a block; one at least."""
    if isinstance(buckets, Buckets):
        return (buckets,)
    return buckets[:1] + tuple(more for more in buckets[1:] if more.queries.shape[2] > 0)


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


@attend_pairs.operator(
    *("query", "key", "value", "key_bias"), *SETS, *PATTERN, "scale", "of_distance", **SETS, **PATTERN
)
def pairs_forward(x: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate out, lse, and the residual that rounding took from lse, which the backward pass reads."""
    exact = torch.promote_types(x.query.dtype, torch.float32)
    lse, residual = (x.query.new_empty(x.query.shape[:3], dtype=exact) for _ in range(2))
    return token_major(x.query, x.value.shape[3], exact), lse, residual


BY = "query", "key", "value", "key_bias", "of_distance"
pairs_backward = Gradient(pairs_forward, *BY, title="attention inside buckets")


@pairs_forward.flops
def forward_flops(x: Any) -> int:
    """Operations of the products: logits, weighted values."""
    return 2 * pairs(x.queries, x.keys) * (x.query[3] + x.value[3])


@pairs_backward.flops
def backward_flops(x: Any) -> int:
    """The logits again and the gradients of both their sides; the gradients of weights and values."""
    return 2 * pairs(x.queries, x.keys) * (3 * x.query[3] + 2 * x.value[3])


def pairs(queries: Sequence[Sequence[int]], keys: Sequence[Sequence[int]]) -> int:
    """Query-key pairs that meet in buckets, by the shapes of the slots."""
    return sum(B * H * T * S * K for (B, H, T, S), (*_, K) in zip(queries, keys, strict=True))
