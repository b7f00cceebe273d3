"""Attention inside buckets in compiled code, which computes in fp32."""

from ctypes import POINTER, cast
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.ops.native import interface
from subquad.ops.native.interface import pointer, rows, with_contiguous_rows
from subquad.ops.parts.pairs.op import attend_pairs, pairs, pairs_backward, pairs_forward
from subquad.ops.precision import wide


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
def forward(outputs: tuple[Tensor, Tensor], x: Any) -> None:
    """As `attend_pairs`: (out, lse)."""
    call, out = _described("pairs_forward", x), outputs[0]
    interface.run(
        "bucket_forward",
        interface.BucketForward(
            call.sizes,
            *(rows(x) for x in (*call.inputs, out)),
            pointer(call.key_bias),
            call.sets,
            call.pattern,
            x.scale,
            pointer(outputs[1]),
        ),
    )


@pairs_backward.on("cpu")
def backward(gradients: tuple[Tensor, Tensor, Tensor, Tensor], x: Any) -> None:
    """Gradients of query, key, value and key_bias."""
    call, (grad_out, grad_lse), (out, lse) = _described("pairs_backward", x), x.grads, x.outputs
    of_out, of_lse = (*x.query.shape[:3], x.value.shape[3]), tuple(x.query.shape[:3])
    interface.check(
        "pairs_backward",
        grad_out=(grad_out, torch.float32, of_out),
        grad_lse=(grad_lse, torch.float32, of_lse),
        out=(out, torch.float32, of_out),
        lse=(lse, torch.float32, of_lse),
    )
    out, lse = with_contiguous_rows(out), lse.contiguous()
    grad_out = None if grad_out is None else with_contiguous_rows(grad_out)
    grad_lse = None if grad_lse is None else grad_lse.contiguous()
    *grads, of_bias = gradients
    interface.run(
        "bucket_backward",
        interface.BucketBackward(
            call.sizes,
            *(rows(x) for x in (*call.inputs, out)),
            interface.Rows() if grad_out is None else rows(grad_out),
            *(rows(x) for x in grads),
            pointer(call.key_bias),
            call.sets,
            call.pattern,
            x.scale,
            pointer(lse),
            pointer(grad_lse),
            None if call.key_bias is None else pointer(of_bias),
        ),
    )


class _Call(NamedTuple):
    """A call's arguments as the kernels read them, and the tensors that hold these."""

    inputs: list[Tensor]  # query, key, value
    key_bias: Tensor | None
    sizes: interface.Sizes
    sets: interface.BucketSets
    pattern: interface.Pattern
    held: tuple[Any, ...]


def _described(op: str, x: Any) -> _Call:
    inputs = wide(x.query, x.key, x.value)
    _check(op, *inputs, x)
    query, key, value = (with_contiguous_rows(x) for x in inputs)
    key_bias, offsets, hidden = (None if t is None else t.contiguous() for t in (x.key_bias, x.offsets, x.hidden))
    whole = {id(t): t.contiguous() for t in (*x.queries, *x.keys, *x.bucket)}  # one that is in several sets stays one
    sets = [[whole[id(t)] for t in side] for side in (x.queries, x.keys, x.bucket)]
    products = pairs([t.shape for t in x.queries], [t.shape for t in x.keys]) * (query.shape[3] + value.shape[3])
    parted = 0 if hidden is None else hidden.shape[2]
    return _Call(
        [query, key, value],
        key_bias,
        interface.axes(query, value, 0, 0, 0, products),
        _sets(*sets, x.spans),
        interface.Pattern(x.causal, x.other_keys_only, x.offset, pointer(offsets), pointer(hidden), parted),
        (offsets, hidden, sets),
    )


def _check(op: str, query: Tensor, key: Tensor, value: Tensor, x: Any) -> None:
    (B, H, _, D), (_, G, M, E) = query.shape, value.shape
    parted = 1 if x.hidden is None else max(x.hidden.shape[2], 1)
    interface.check(
        op,
        key=(key, torch.float32, (B, G, M, D)),
        value=(value, torch.float32, (B, G, M, E)),
        key_bias=(x.key_bias, torch.float32, (B, H, M)),
        offsets=(x.offsets, torch.int64, (B,)),
        hidden=(x.hidden, torch.bool, (B, H, parted, M)),
    )
    for of_queries, of_keys, named in zip(x.queries, x.keys, x.bucket, strict=True):
        T = of_queries.shape[2] if named.numel() > 0 else min(of_queries.shape[2], of_keys.shape[2])
        interface.check(
            op,
            queries=(of_queries, torch.int64, (B, H, T, of_queries.shape[3])),
            keys=(of_keys, torch.int64, (B, H, *of_keys.shape[2:])),
            bucket=(named, torch.int64, (0,) if named.ndim == 1 else (B, H, T)),
        )


def _sets(queries: list[Tensor], keys: list[Tensor], bucket: list[Tensor], spans: list[int]) -> interface.BucketSets:
    """Where the sets lie. Buckets of the same keys are the same buckets, whose keys are packed once."""
    described = (interface.BucketSet * len(spans))()
    first_of: dict[tuple[int, torch.Size, int], int] = {}
    buckets = 0
    for i, (of_queries, of_keys, named, span) in enumerate(zip(queries, keys, bucket, spans, strict=True)):
        same = of_keys.data_ptr(), of_keys.shape, span
        if same not in first_of:
            first_of[same] = buckets
            buckets += of_keys.shape[2]
        where = (pointer(x) for x in (of_queries, of_keys, named if named.numel() > 0 else None))
        shape = (*of_queries.shape[2:], *of_keys.shape[2:])
        described[i] = interface.BucketSet(*where, *shape, span, first_of[same])
    return interface.BucketSets(cast(described, POINTER(interface.BucketSet)), len(described))
