"""Balanced selection on GPUs: the largest scores of each bucket, of equal ones those of the lower tokens."""

from itertools import islice
from typing import Any

import torch
from torch import Tensor

from subquad.kernels.precision import upcast
from subquad.kernels.selection.hash_functions import Hashed, perceptron
from subquad.kernels.selection.top.op import top_and_best, top_by_hash, top_by_score
from subquad.kernels.selection.top.reference import log_odds
from subquad.kernels.tokens.heads import repeat_heads
from subquad.kernels.triton import DTYPES, refusal_of_any_dtype
from subquad.kernels.triton.largest import list_largest

SCORES = 1 << 26  # numbers that lie in memory at a time; where there are more, heads are ranked one by one


@top_and_best.refusal("triton")
def refusal(x: Any) -> str | None:
    """The reason why the backend cannot rank by these scores; None if it can."""
    ranked = x.scores.terms[0][1] if isinstance(x.scores, Hashed) else x.scores
    if ranked.dtype not in DTYPES:
        return f"the dtype is {ranked.dtype}, and scores are computed in fp32"
    return refusal_of_any_dtype(ranked)


@top_by_score.on("triton")
def by_score(outputs: tuple[Tensor, Tensor], x: Any) -> None:
    """The Triton backend of `top_and_best`."""
    (scores,) = upcast(x.scores)
    _choose(scores, *outputs, x)


@top_by_hash.on("triton")
def by_hash(outputs: tuple[Tensor, Tensor], x: Any) -> None:
    """The Triton backend of `top_by_hash`, for all heads together or one after the other."""
    buckets = x.weights[-1].shape[2]
    step = x.heads if outputs[1].numel() * buckets <= SCORES else 1
    for head in range(0, x.heads, step):
        tokens, best = (output[:, head : head + step] for output in outputs)
        _choose(_scores(x, head, step), tokens, best, x)


def _choose(scores: Tensor, tokens: Tensor, best: Tensor, x: Any) -> None:
    """Fill the slots and the best buckets of some heads."""
    N = scores.shape[2]
    ranked = (log_odds(scores) if x.odds else scores).transpose(2, 3).contiguous()
    if x.valid is not None:
        ranked.masked_fill_(~x.valid[:, None, None, :], -torch.inf)
    slots = tokens if tokens.is_contiguous() else tokens.new_empty(tokens.shape)
    list_largest(ranked, slots, empty=N, wanted=x.sizes)
    if slots is not tokens:
        tokens.copy_(slots)
    best.copy_(scores.argmax(-1))


def _scores(x: Any, head: int, step: int) -> Tensor:
    """The scores of the heads from `head` to `head + step`: of all heads, or of one."""
    layers, scores = iter(zip(x.weights, x.biases, strict=True)), []
    for (vectors,), count in zip(map(upcast, x.vectors), x.layers, strict=True):
        share = x.heads // vectors.shape[1]  # heads that share one of these vectors
        score_heads = slice(head // share, -(-(head + step) // share))
        some = [
            tuple(part[score_heads] if part.shape[0] > 1 else part for part in layer) for layer in islice(layers, count)
        ]
        scores.append(repeat_heads(perceptron(vectors[:, score_heads] * x.root, some), step))
    return sum(scores[1:], scores[0])
