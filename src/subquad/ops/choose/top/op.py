"""The op `top_and_best`."""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from subquad.ops.backends import Op, Operator
from subquad.ops.choose.top import reference
from subquad.ops.hash_functions import Hashed


@Op
def top_and_best(
    scores: Float[Tensor, "B H N C"] | Hashed,
    sizes: Int64[Tensor, "B"],
    most: int,
    real: Bool[Tensor, "B N"] | None,
    *,
    odds: bool,
) -> tuple[Int64[Tensor, "B H C K"], Int64[Tensor, "B H N"]]:
    """Balanced selection: each bucket takes the `sizes` real tokens of its item that score highest in it.

    They come in ascending order; of equal scores the lower token goes first. `most` is at least the largest of the
    sizes. A token whose score is −inf is never taken. With `odds`, scores are logits over the buckets, and tokens are
    ranked by their softmax. Beside the slots comes, for each token, the bucket that it scores highest.

    Scores that are still to be computed never lie in memory as a whole on a compiled backend.
    """
    scores = scores.scores() if isinstance(scores, Hashed) else scores
    return reference.top_of_each_bucket(scores, sizes, most, real, odds=odds), scores.argmax(-1)


@top_and_best.compiled
def _(
    backend: str, scores: Tensor | Hashed, sizes: Tensor, most: int, real: Tensor | None, *, odds: bool
) -> tuple[Tensor, Tensor]:
    if not isinstance(scores, Hashed):
        return top_by_score(backend, scores.detach(), sizes, most, real, odds)
    vectors, functions = [x.detach() for _, x in scores.terms], [function for function, _ in scores.terms]
    weights = [w.detach().float() for function in functions for w in function.weights]
    biases = [b.detach().float() for function in functions for b in function.biases]
    layers = [len(function.weights) for function in functions]
    return top_by_hash(backend, vectors, weights, biases, layers, scores.heads, scores.root, sizes, most, real, odds)


@Operator
def top_by_score(scores: Tensor, sizes: Tensor, most: int, real: Tensor | None, odds: bool) -> tuple[Tensor, Tensor]:
    """Allocate slots and best buckets."""
    _, H, N, C = scores.shape
    return _slots(scores, H, N, C, most)


@Operator
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
    """The top tokens by scores Σ_t H_t(root·x_t), which are computed when needed and never stored.

    H_t are perceptrons of `layers[t]` layers each, one for each head of x_t or for several; weights (G,in,out) and
    biases (G,1,out) of all of them follow each other.
    """
    return _slots(vectors[0], heads, vectors[0].shape[2], weights[-1].shape[2], most)


def _slots(like: Tensor, heads: int, tokens: int, buckets: int, most: int) -> tuple[Tensor, Tensor]:
    slots = like.new_empty(like.shape[0], heads, buckets, torch.sym_min(most, tokens), dtype=torch.int64)
    return slots, like.new_empty(like.shape[0], heads, tokens, dtype=torch.int64)


@top_by_hash.flops
def _(x: Any) -> int:
    """Operations of the products, for every head of the scores."""
    B, _, N, _ = x.vectors[0]
    return 2 * B * x.heads * N * sum(wide * out for _, wide, out in x.weights)
