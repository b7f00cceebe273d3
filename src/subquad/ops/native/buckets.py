"""Filling buckets in compiled code: the tokens that score highest in each, and tokens by their bucket in blocks."""

from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from subquad.ops.native import interface
from subquad.ops.native.interface import pointer, rows, with_contiguous_rows


def refusal(scores: Tensor) -> str | None:
    """Why the compiled kernels cannot rank by these scores; None where they can."""
    if scores.dtype in (torch.bfloat16, torch.float16):
        return f"the dtype is {scores.dtype}, and buckets are filled by fp32 scores"
    return interface.refusal(scores)


@torch.library.custom_op("subquad::top_of_each_bucket", mutates_args=(), device_types="cpu")
def top_of_each_bucket(
    scores: Tensor, sizes: Tensor, most: int, real: Tensor | None, odds: bool
) -> tuple[Tensor, Tensor]:
    """As `subquad.ops.bucketing.top_and_best`."""
    scores = with_contiguous_rows(scores)
    _, H, N, C = scores.shape
    outputs = _slots(scores, H, N, C, most)
    work = 32 * scores.numel()
    given = (rows(scores), None, 0, 1.0)
    _select(scores.shape, work, given, real, sizes, odds, outputs)
    return outputs


@top_of_each_bucket.register_fake
def _(scores: Tensor, sizes: Tensor, most: int, real: Tensor | None, odds: bool) -> tuple[Tensor, Tensor]:
    _, H, N, C = scores.shape
    return _slots(scores, H, N, C, most)


@torch.library.custom_op("subquad::top_by_hash", mutates_args=(), device_types="cpu")
def top_by_hash(
    vectors: list[Tensor],
    weights: list[Tensor],
    biases: list[Tensor],
    layers: list[int],
    heads: int,
    root: float,
    sizes: Tensor,
    most: int,
    real: Tensor | None,
    odds: bool,
) -> tuple[Tensor, Tensor]:
    """The same of scores Σ_t H_t(root·x_t), which are computed as they are needed and never stored.

    H_t are perceptrons of `layers[t]` layers each, one for each head of x_t or for several; weights (G,in,out) and
    biases (G,1,out) of all of them follow each other.
    """
    vectors = [with_contiguous_rows(x) for x in vectors]
    weights, biases = [x.contiguous() for x in weights], [x.contiguous() for x in biases]
    B, _, N, _ = vectors[0].shape
    C = weights[-1].shape[2]
    for x in vectors:
        interface.check("top_by_hash", vectors=(x, torch.float32, (B, x.shape[1], N, x.shape[3])))
    outputs = _slots(vectors[0], heads, N, C, most)
    each = (
        interface.HashLayer(pointer(weight), pointer(bias), *weight.shape[1:])
        for weight, bias in zip(weights, biases, strict=True)
    )
    chains = [(interface.HashLayer * count)(*islice(each, count)) for count in layers]
    terms = (interface.HashTerm * len(chains))(
        *(interface.HashTerm(rows(x), x.shape[1], of, len(of)) for x, of in zip(vectors, chains, strict=True))
    )
    work = B * heads * N * sum(weight.shape[1] * weight.shape[2] for weight in weights)
    _select((B, heads, N, C), work, (interface.Rows(), terms, len(terms), root), real, sizes, odds, outputs)
    return outputs


@top_by_hash.register_fake
def _(vectors, weights, biases, layers, heads, root, sizes, most, real, odds):  # type: ignore[no-untyped-def]
    return _slots(vectors[0], heads, vectors[0].shape[2], weights[-1].shape[2], most)


def _slots(like: Tensor, heads: int, tokens: int, buckets: int, most: int) -> tuple[Tensor, Tensor]:
    slots = like.new_empty(like.shape[0], heads, buckets, torch.sym_min(most, tokens), dtype=torch.int64)
    return slots, like.new_empty(like.shape[0], heads, tokens, dtype=torch.int64)


def _select(
    shape: Sequence[int],
    work: int,
    scores: tuple[Any, ...],
    real: Tensor | None,
    sizes: Tensor,
    odds: bool,
    outputs: tuple[Tensor, Tensor],
) -> None:
    B, H, N, C = shape
    interface.check("top_of_each_bucket", real=(real, torch.bool, (B, N)), sizes=(sizes, sizes.dtype, (B,)))
    real, sizes = None if real is None else real.contiguous(), sizes.to(torch.int64).contiguous()
    axes = interface.Sizes(B, H, H, N, N, C, C, C, outputs[0].shape[3], 0, 0, interface.threads(work))
    pointers = (pointer(x) for x in outputs)
    interface.run("bucket_top", interface.Selecting(axes, *scores, pointer(real), pointer(sizes), odds, *pointers))


@register_flop_formula([torch.ops.subquad.top_by_hash])
def _hash_flops(vectors, weights, biases, layers, heads, *_, **__):  # type: ignore[no-untyped-def]
    """Operations of the products, as torch's `FlopCounterMode` counts them, for every head of the scores."""
    B, _, N, _ = vectors[0]
    return 2 * B * heads * N * sum(wide * out for _, wide, out in weights)


@torch.library.custom_op("subquad::by_bucket", mutates_args=(), device_types="cpu")
def by_bucket(labels: Tensor, buckets: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `subquad.ops.buckets.by_bucket` before it cuts blocks off, and how many blocks each head uses."""
    interface.check("by_bucket", labels=(labels, torch.int64, tuple(labels.shape)))
    if buckets < 1 or size < 1:
        raise ValueError(f"by_bucket: {buckets} buckets and blocks of {size}, but there must be 1 of each at least")
    labels = labels.contiguous()
    outputs = _blocks(labels, buckets, size)
    B, H, N = labels.shape
    axes = interface.Sizes(B, H, H, N, N, 1, 1, buckets, size, 0, 0, interface.threads(32 * labels.numel()))
    interface.run("bucket_blocks", interface.Blocking(axes, pointer(labels), *(pointer(x) for x in outputs)))
    return outputs


@by_bucket.register_fake
def _(labels: Tensor, buckets: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    return _blocks(labels, buckets, size)


def _blocks(labels: Tensor, buckets: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    B, H, N = labels.shape
    blocks = -(-N // size) + buckets
    return (
        labels.new_empty(B, H, blocks, size),
        labels.new_empty(B, H, blocks),
        labels.new_empty(B, H),
    )
