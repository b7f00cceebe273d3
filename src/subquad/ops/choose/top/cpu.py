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
def by_score(outputs: tuple[Tensor, Tensor], x: Any) -> None:
    """As `top_and_best`."""
    scores = with_contiguous_rows(*wide(x.scores))
    _select(scores.shape, 32 * scores.numel(), (rows(scores), None, 0, 1.0), x, outputs)


@top_by_hash.on("cpu")
def by_hash(outputs: tuple[Tensor, Tensor], x: Any) -> None:
    """As `top_by_hash` says."""
    vectors = [with_contiguous_rows(t) for t in wide(*x.vectors)]
    weights, biases = [t.contiguous() for t in x.weights], [t.contiguous() for t in x.biases]
    B, _, N, _ = vectors[0].shape
    for t in vectors:
        interface.check("top_by_hash", vectors=(t, torch.float32, (B, t.shape[1], N, t.shape[3])))
    each = (
        interface.HashLayer(pointer(weight), pointer(bias), *weight.shape[1:])
        for weight, bias in zip(weights, biases, strict=True)
    )
    chains = [(interface.HashLayer * count)(*islice(each, count)) for count in x.layers]
    terms = (interface.HashTerm * len(chains))(
        *(interface.HashTerm(rows(t), t.shape[1], of, len(of)) for t, of in zip(vectors, chains, strict=True))
    )
    work = B * x.heads * N * sum(weight.shape[1] * weight.shape[2] for weight in weights)
    shape = B, x.heads, N, weights[-1].shape[2]
    _select(shape, work, (interface.Rows(), terms, len(terms), x.root), x, outputs)


def _select(shape: Sequence[int], work: int, scores: tuple[Any, ...], x: Any, outputs: tuple[Tensor, Tensor]) -> None:
    B, H, N, C = shape
    interface.check("top_of_each_bucket", real=(x.real, torch.bool, (B, N)), sizes=(x.sizes, x.sizes.dtype, (B,)))
    real, sizes = None if x.real is None else x.real.contiguous(), x.sizes.to(torch.int64).contiguous()
    axes = interface.Sizes(B, H, H, N, N, C, C, C, outputs[0].shape[3], 0, 0, interface.threads(work))
    pointers = (pointer(t) for t in outputs)
    interface.run("bucket_top", interface.Selecting(axes, *scores, pointer(real), pointer(sizes), x.odds, *pointers))
