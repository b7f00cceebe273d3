"""Attention inside buckets in compiled code: one op a direction for all sets of buckets together.

Sets travel as three lists, an empty tensor of `bucket` standing for none. The gradient is itself not differentiable.
"""

from ctypes import POINTER, cast
from itertools import chain

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from subquad.masks import Mask
from subquad.ops.buckets import Buckets
from subquad.ops.native import interface
from subquad.ops.native.interface import pointer, rows, token_major, with_contiguous_rows

NO_WINDOW = -1
Sets = tuple[list[Tensor], list[Tensor], list[Tensor]]


def refusal(query: Tensor, of_distance: Tensor | None, union: bool, dropout_p: float) -> str | None:
    """Why the compiled kernels cannot take this call; None where they can."""
    if of_distance is not None:
        return "the kernels add nothing to the logits by distance"
    if dropout_p > 0:
        return f"dropout_p={dropout_p}, and the kernels have no dropout"
    if union:
        return "union=True, and the kernels count a key as often as it shares a bucket with the query"
    if query.dtype in (torch.bfloat16, torch.float16):
        return f"the dtype is {query.dtype}, and bucket attention takes fp32"
    return interface.refusal(query)


def attend_buckets(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    buckets: tuple[Buckets, ...],
    mask: Mask,
    *,
    scale: float,
    key_bias: Tensor | None,
    hidden: Tensor | None,
    other_keys_only: bool,
) -> tuple[Tensor, Tensor]:
    """As `subquad.ops.bucket_attention.attend_buckets`, without union and dropout."""
    queries, keys = [each.queries for each in buckets], [each.keys for each in buckets]
    bucket = [each.queries.new_empty(0) if each.bucket is None else each.bucket for each in buckets]
    offset: int | Tensor = 0 if mask.offset is None else mask.offset
    offsets = None
    if isinstance(offset, Tensor):
        offsets = offset.to(query.device, torch.int64).reshape(-1).expand(query.shape[0])
        offset = 0
    spans = [each.narrowed(mask).span for each in buckets]
    sets = queries, keys, bucket, [NO_WINDOW if span is None else span for span in spans]
    pattern = offsets, hidden, offset, mask.is_causal, other_keys_only
    return _forward(query, key, value, key_bias, *sets, *pattern, scale)


@torch.library.custom_op("subquad::bucket_attention_forward", mutates_args=(), device_types="cpu")
def _forward(
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
) -> tuple[Tensor, Tensor]:
    """(out, lse)."""
    _check("bucket_attention_forward", query, key, value, key_bias, queries, keys, bucket, offsets, hidden)
    query, key, value = (with_contiguous_rows(x) for x in (query, key, value))
    key_bias, offsets, hidden = (None if x is None else x.contiguous() for x in (key_bias, offsets, hidden))
    sets = _contiguous(queries, keys, bucket)
    out, lse = _outputs(query, value)
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
    return out, lse


@_forward.register_fake
def _(query, key, value, *_):  # type: ignore[no-untyped-def]
    return _outputs(query, value)


def _outputs(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    return token_major(query, value.shape[3]), query.new_empty(query.shape[:3])


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
    pairs = _pairs([x.shape for x in sets[0]], [x.shape for x in sets[1]])
    return interface.axes(query, value, 0, 0, 0, pairs * (query.shape[3] + value.shape[3]))


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    query, key, value, key_bias, *sets, spans, offsets, hidden, offset, causal, other_keys_only, scale = inputs
    ctx.save_for_backward(query, key, value, key_bias, *output, offsets, hidden, *chain(*sets))
    ctx.spans, ctx.rest = spans, (offset, causal, other_keys_only, scale)
    ctx.set_materialize_grads(False)  # often nobody differentiates lse


def _differentiate(ctx, grad_out, grad_lse):  # type: ignore[no-untyped-def]
    query, key, value, key_bias, out, lse, offsets, hidden, *slots = ctx.saved_tensors
    count = len(ctx.spans)
    grads: tuple[Tensor | None, ...] = (None,) * 4
    if grad_out is not None or grad_lse is not None:
        sets = (slots[i : i + count] for i in range(0, 3 * count, count))
        whole = query, key, value, key_bias, out, lse
        *of_inputs, of_bias = _backward(grad_out, grad_lse, *whole, *sets, ctx.spans, offsets, hidden, *ctx.rest)
        grads = *of_inputs, None if key_bias is None else of_bias
    return *grads, *([None] * count for _ in range(3)), *(None,) * 7


_forward.register_autograd(_differentiate, setup_context=_save)


@torch.library.custom_op("subquad::bucket_attention_backward", mutates_args=(), device_types="cpu")
def _backward(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and key_bias; the last is empty where there is no bias."""
    _check("bucket_attention_backward", query, key, value, key_bias, queries, keys, bucket, offsets, hidden)
    of_out, of_lse = (*query.shape[:3], value.shape[3]), tuple(query.shape[:3])
    interface.check(
        "bucket_attention_backward",
        grad_out=(grad_out, query.dtype, of_out),
        grad_lse=(grad_lse, query.dtype, of_lse),
        out=(out, query.dtype, of_out),
        lse=(lse, query.dtype, of_lse),
    )
    *grads, grad_key_bias = _gradients(query, key, value, key_bias)
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
            *(rows(x) for x in grads),
            pointer(key_bias),
            _described(sets, spans),
            _pattern(causal, other_keys_only, offset, offsets, hidden),
            scale,
            pointer(lse),
            pointer(grad_lse),
            None if key_bias is None else pointer(grad_key_bias),
        ),
    )
    return *grads, grad_key_bias  # type: ignore[return-value]


@_backward.register_fake
def _(grad_out, grad_lse, query, key, value, key_bias, *_):  # type: ignore[no-untyped-def]
    return _gradients(query, key, value, key_bias)


def _gradients(query: Tensor, key: Tensor, value: Tensor, key_bias: Tensor | None) -> tuple[Tensor, ...]:
    of_bias = query.new_empty(0 if key_bias is None else key_bias.shape)
    return *(token_major(x, x.shape[3]) for x in (query, key, value)), of_bias


interface.not_differentiable(_backward, "attention inside buckets")


@register_flop_formula([torch.ops.subquad.bucket_attention_forward])
def _forward_flops(query, key, value, key_bias, queries, keys, *_, **__):  # type: ignore[no-untyped-def]
    """Operations of the products, as torch's `FlopCounterMode` counts them: logits, weighted values."""
    return 2 * _pairs(queries, keys) * (query[3] + value[3])


@register_flop_formula([torch.ops.subquad.bucket_attention_backward])
def _backward_flops(grad_out, grad_lse, query, key, value, key_bias, out, lse, queries, keys, *_, **__):  # type: ignore[no-untyped-def]
    """The logits again and the gradients of both their sides; the gradients of weights and values."""
    return 2 * _pairs(queries, keys) * (3 * query[3] + 2 * value[3])


def _pairs(queries, keys) -> int:  # type: ignore[no-untyped-def]
    """Query-key pairs that meet in buckets, by the shapes of the slots."""
    return sum(B * H * T * S * K for (B, H, T, S), (*_, K) in zip(queries, keys, strict=True))
