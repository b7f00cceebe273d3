"""Balanced selection in compiled code."""

from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from subquad.ops.choose.top.op import top_and_best, top_by_hash, top_by_score
from subquad.ops.hash_functions import Hashed
from subquad.ops.native import interface
from subquad.ops.native.interface import pointer, rows, with_contiguous_rows
from subquad.ops.precision import wide


@top_and_best.refusal("cpu")
def refusal(scores: Tensor | Hashed, *_: object, **__: object) -> str | None:
    """Why the compiled kernels cannot rank by these scores; None where they can."""
    return interface.refusal(scores.terms[0][1] if isinstance(scores, Hashed) else scores)


@top_by_score.on("cpu")
def by_score(
    outputs: tuple[Tensor, Tensor], scores: Tensor, sizes: Tensor, most: int, real: Tensor | None, odds: bool
) -> None:
    """As `top_and_best`."""
    scores = with_contiguous_rows(wide(scores)[0])
    given = (rows(scores), None, 0, 1.0)
    _select(scores.shape, 32 * scores.numel(), given, real, sizes, odds, outputs)


@top_by_hash.on("cpu")
def by_hash(
    outputs: tuple[Tensor, Tensor],
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
) -> None:
    """As `top_by_hash` says."""
    vectors = [with_contiguous_rows(x) for x in wide(*vectors)]
    weights, biases = [x.contiguous() for x in weights], [x.contiguous() for x in biases]
    B, _, N, _ = vectors[0].shape
    C = weights[-1].shape[2]
    for x in vectors:
        interface.check("top_by_hash", vectors=(x, torch.float32, (B, x.shape[1], N, x.shape[3])))
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
