"""Balanced selection in compiled code."""

from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from subquad.ops.choose.top.op import top_and_best, top_by_hash, top_by_score
from subquad.ops.hash_functions import Hashed
from subquad.ops.native import interface
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
    (scores,) = wide(scores)
    interface.check("top_by_score", scores=(scores, torch.float32, tuple(scores.shape)))
    _select(scores.shape, 32 * scores.numel(), sizes, real, odds, outputs, scores=scores, terms=(), root=1.0)


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
    vectors = wide(*vectors)
    B, _, N, _ = vectors[0].shape
    for x in vectors:
        interface.check("top_by_hash", vectors=(x, torch.float32, (B, x.shape[1], N, x.shape[3])))
    each = (
        {"in": weight.shape[1], "out": weight.shape[2], "weight": weight, "bias": bias}
        for weight, bias in zip(weights, biases, strict=True)
    )
    terms = [
        {"x": x, "heads": x.shape[1], "layers": list(islice(each, count))}
        for x, count in zip(vectors, layers, strict=True)
    ]
    work = B * heads * N * sum(weight.shape[1] * weight.shape[2] for weight in weights)
    shape = B, heads, N, weights[-1].shape[2]
    _select(shape, work, sizes, real, odds, outputs, scores=None, terms=terms, root=root)


def _select(
    shape: Sequence[int],
    work: int,
    sizes: Tensor,
    real: Tensor | None,
    odds: bool,
    outputs: tuple[Tensor, Tensor],
    **scores: Any,
) -> None:
    B, H, N, buckets = shape
    tokens, best = outputs
    interface.check("top_of_each_bucket", real=(real, torch.bool, (B, N)), sizes=(sizes, sizes.dtype, (B,)))
    interface.run(
        "bucket_top",
        B=B,
        H=H,
        N=N,
        **scores,
        buckets=buckets,
        slots=tokens.shape[3],
        threads=interface.threads(work),
        real=real,
        wanted=sizes.to(torch.int64),
        odds=odds,
        tokens=tokens,
        best=best,
    )
