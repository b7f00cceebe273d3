"""Attention inside buckets in compiled code, which computes in fp32."""

from ctypes import POINTER, cast

import torch
from torch import Tensor

from subquad.ops.native import interface
from subquad.ops.native.interface import pointer, rows, with_contiguous_rows
from subquad.ops.parts.pairs.op import attend_pairs, pairs, pairs_backward, pairs_forward
from subquad.ops.precision import wide

Sets = tuple[list[Tensor], list[Tensor], list[Tensor]]


@attend_pairs.refusal("cpu")
def refusal(
    query: Tensor,
    *_: object,
    of_distance: Tensor | None = None,
    union: bool = False,
    dropout_p: float = 0.0,
    **__: object,
) -> str | None:
    """Why the compiled kernels cannot take this call; None where they can."""
    if of_distance is not None:
        return "the kernels add nothing to the logits by distance"
    if dropout_p > 0:
        return f"dropout_p={dropout_p}, and the kernels have no dropout"
    if union:
        return "union=True, and the kernels count a key as often as it shares a bucket with the query"
    return interface.refusal(query)


@pairs_forward.on("cpu")
def forward(
    outputs: tuple[Tensor, Tensor],
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
) -> None:
    """As `attend_pairs`: (out, lse)."""
    query, key, value = wide(query, key, value)
    _check("pairs_forward", query, key, value, key_bias, queries, keys, bucket, offsets, hidden)
    query, key, value = (with_contiguous_rows(x) for x in (query, key, value))
    key_bias, offsets, hidden = (None if x is None else x.contiguous() for x in (key_bias, offsets, hidden))
    sets = _contiguous(queries, keys, bucket)
    out, lse = outputs
    interface.run(
        "bucket_forward",
        interface.BucketForward(
            _sizes(query, value, sets),
            *(rows(x) for x in (query, key, value, out)),
            pointer(key_bias),
            _described(sets, spans),
            _pattern(causal, other_keys_only, offset, offsets, hidden),
            scale,
            pointer(lse),
        ),
    )


@pairs_backward.on("cpu")
def backward(
    grads: tuple[Tensor, Tensor, Tensor, Tensor],
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
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
) -> None:
    """Gradients of query, key, value and key_bias; the last is empty where there is no bias."""
    query, key, value = wide(query, key, value)
    _check("pairs_backward", query, key, value, key_bias, queries, keys, bucket, offsets, hidden)
    of_out, of_lse = (*query.shape[:3], value.shape[3]), tuple(query.shape[:3])
    interface.check(
        "pairs_backward",
        grad_out=(grad_out, query.dtype, of_out),
        grad_lse=(grad_lse, query.dtype, of_lse),
        out=(out, query.dtype, of_out),
        lse=(lse, query.dtype, of_lse),
    )
    query, key, value, out = (with_contiguous_rows(x) for x in (query, key, value, out))
    key_bias, offsets, hidden, grad_lse = (
        None if x is None else x.contiguous() for x in (key_bias, offsets, hidden, grad_lse)
    )
    grad_out = None if grad_out is None else with_contiguous_rows(grad_out)
    sets, lse = _contiguous(queries, keys, bucket), lse.contiguous()
    interface.run(
        "bucket_backward",
        interface.BucketBackward(
            _sizes(query, value, sets),
            *(rows(x) for x in (query, key, value, out)),
            interface.Rows() if grad_out is None else rows(grad_out),
            *(rows(x) for x in grads[:3]),
            pointer(key_bias),
            _described(sets, spans),
            _pattern(causal, other_keys_only, offset, offsets, hidden),
            scale,
            pointer(lse),
            pointer(grad_lse),
            None if key_bias is None else pointer(grads[3]),
        ),
    )


def _check(
    op: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_bias: Tensor | None,
    queries: list[Tensor],
    keys: list[Tensor],
    bucket: list[Tensor],
    offsets: Tensor | None,
    hidden: Tensor | None,
) -> None:
    (B, H, _, D), (_, G, M, E) = query.shape, value.shape
    rows = 1 if hidden is None else max(hidden.shape[2], 1)
    interface.check(
        op,
        key=(key, torch.float32, (B, G, M, D)),
        value=(value, torch.float32, (B, G, M, E)),
        key_bias=(key_bias, torch.float32, (B, H, M)),
        offsets=(offsets, torch.int64, (B,)),
        hidden=(hidden, torch.bool, (B, H, rows, M)),
    )
    for of_queries, of_keys, named in zip(queries, keys, bucket, strict=True):
        T = of_queries.shape[2] if named.numel() > 0 else min(of_queries.shape[2], of_keys.shape[2])
        interface.check(
            op,
            queries=(of_queries, torch.int64, (B, H, T, of_queries.shape[3])),
            keys=(of_keys, torch.int64, (B, H, *of_keys.shape[2:])),
            bucket=(named, torch.int64, (0,) if named.ndim == 1 else (B, H, T)),
        )


def _pattern(
    causal: bool, other_keys_only: bool, offset: int, offsets: Tensor | None, hidden: Tensor | None
) -> interface.Pattern:
    rows = 0 if hidden is None else hidden.shape[2]
    return interface.Pattern(causal, other_keys_only, offset, pointer(offsets), pointer(hidden), rows)


def _contiguous(queries: list[Tensor], keys: list[Tensor], bucket: list[Tensor]) -> Sets:
    """All lists in one piece each; a tensor that stands in several sets stays one."""
    whole = {id(x): x.contiguous() for x in (*queries, *keys, *bucket)}
    return tuple([whole[id(x)] for x in side] for side in (queries, keys, bucket))  # type: ignore[return-value]


def _described(sets: Sets, spans: list[int]) -> interface.BucketSets:
    """Where the sets lie. Buckets of the same keys are the same buckets, whose keys are packed once."""
    described = (interface.BucketSet * len(spans))()
    first_of: dict[tuple[int, torch.Size, int], int] = {}
    buckets = 0
    for i, (queries, keys, bucket, span) in enumerate(zip(*sets, spans, strict=True)):
        same = keys.data_ptr(), keys.shape, span
        if same not in first_of:
            first_of[same] = buckets
            buckets += keys.shape[2]
        named = bucket if bucket.numel() > 0 else None
        shape = (*queries.shape[2:], *keys.shape[2:])
        where = (pointer(x) for x in (queries, keys, named))
        described[i] = interface.BucketSet(*where, *shape, span, first_of[same])
    return interface.BucketSets(cast(described, POINTER(interface.BucketSet)), len(described))


def _sizes(query: Tensor, value: Tensor, sets: Sets) -> interface.Sizes:
    met = pairs([x.shape for x in sets[0]], [x.shape for x in sets[1]])
    return interface.axes(query, value, 0, 0, 0, met * (query.shape[3] + value.shape[3]))
