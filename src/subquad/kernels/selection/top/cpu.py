"""Balanced selection in compiled code."""

from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from subquad.kernels.native import interface
from subquad.kernels.precision import upcast
from subquad.kernels.selection.hash_functions import Hashed
from subquad.kernels.selection.top.op import top_and_best, top_by_hash, top_by_score


@top_and_best.refusal("cpu")
def refusal(x: Any) -> str | None:
    """The reason why the compiled kernels cannot rank by these scores; None if they can."""
    return interface.refusal(x.scores.terms[0][1] if isinstance(x.scores, Hashed) else x.scores)


@top_by_score.on("cpu")
def by_score(outputs: tuple[Tensor, Tensor], x: Any) -> None:
    """The CPU backend of `top_and_best`."""
    (scores,) = upcast(x.scores)
    interface.check("top_by_score", scores=(scores, torch.float32, tuple(scores.shape)))
    _select(scores.shape, 32 * scores.numel(), x, outputs, scores=scores, terms=(), root=1.0)


@top_by_hash.on("cpu")
def by_hash(outputs: tuple[Tensor, Tensor], x: Any) -> None:
    """The CPU backend of `top_by_hash`."""
    vectors = upcast(*x.vectors)
    B, _, N, _ = vectors[0].shape
    for each in vectors:
        interface.check("top_by_hash", vectors=(each, torch.float32, (B, each.shape[1], N, each.shape[3])))
    layers = zip(x.weights, x.biases, strict=True)
    terms = [
        {
            "x": each,
            "heads": each.shape[1],
            "layers": [_layer(*layer, each.shape[1]) for layer in islice(layers, count)],
        }
        for each, count in zip(vectors, x.layers, strict=True)
    ]
    cost = B * x.heads * N * sum(weight.shape[1] * weight.shape[2] for weight in x.weights)
    _select((B, x.heads, N, x.weights[-1].shape[2]), cost, x, outputs, scores=None, terms=terms, root=x.root)


def _layer(weight: Tensor, bias: Tensor, heads: int) -> dict[str, Any]:
    """A layer of each of the heads, which may share one."""
    weight, bias = weight.expand(heads, -1, -1), bias.expand(heads, -1, -1)
    interface.check("top_by_hash", bias=(bias, bias.dtype, (heads, 1, weight.shape[2])))
    return {"in": weight.shape[1], "out": weight.shape[2], "weight": weight, "bias": bias}


def _select(shape: Sequence[int], cost: int, x: Any, outputs: tuple[Tensor, Tensor], **scores: Any) -> None:
    (B, H, N, buckets), (tokens, best) = shape, outputs
    interface.check("top_of_each_bucket", valid=(x.valid, torch.bool, (B, N)), sizes=(x.sizes, x.sizes.dtype, (B,)))
    interface.run(
        "bucket_top",
        **{"B": B, "H": H, "N": N, "buckets": buckets, "slots": tokens.shape[3]},
        **scores,
        threads=interface.threads(cost),
        valid=x.valid,
        wanted=x.sizes.to(torch.int64),
        odds=x.odds,
        tokens=tokens,
        best=best,
    )
