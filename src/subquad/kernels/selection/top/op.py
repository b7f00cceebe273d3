"""The op `top_and_best`."""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from subquad.core.versions import sym_min
from subquad.kernels.dispatch import Op
from subquad.kernels.selection.hash_functions import Hashed
from subquad.kernels.selection.top import reference


@Op
def top_and_best(
    scores: Float[Tensor, "B H N C"] | Hashed,
    sizes: Int64[Tensor, "B"],
    most: int,
    valid: Bool[Tensor, "B N"] | None,
    *,
    odds: bool,
) -> tuple[Int64[Tensor, "B H C K"], Int64[Tensor, "B H N"]]:
    """Balanced selection: each bucket takes the `sizes` real tokens of its item that score highest in it.

    They come in ascending order; of equal scores the lower token goes first. `most` is at least the largest of the
    sizes. A token whose score is −inf is never taken. With `odds`, scores are logits over the buckets, and tokens are
    ranked by their softmax. Also returned is the bucket that each token scores highest.

    Scores that are still to be computed never lie in memory as a whole on a compiled backend.
    """
    scores = scores.scores() if isinstance(scores, Hashed) else scores
    return reference.top_of_each_bucket(scores, sizes, most, valid, odds=odds), scores.argmax(-1)


@top_and_best.compiled
def run(backend: str, x: Any) -> tuple[Tensor, Tensor]:
    """Run on a compiled backend, by scores or by what they are computed from."""
    scores, choice = x.scores, (x.sizes, x.most, x.valid, x.odds)
    if isinstance(scores, Hashed):
        vectors, functions = [each.detach() for _, each in scores.terms], [function for function, _ in scores.terms]
        weights = [w.detach().float() for function in functions for w in function.weights]
        biases = [b.detach().float() for function in functions for b in function.biases]
        layers = [len(function.weights) for function in functions]
        slots, best = top_by_hash.run(backend, vectors, weights, biases, layers, scores.heads, scores.root, *choice)
    else:
        slots, best = top_by_score.run(backend, scores.detach(), *choice)
    return slots, best


CHOICE = "sizes", "most", "valid", "odds"
HASHED: dict[str, Any] = {"vectors": list[Tensor], "weights": list[Tensor], "biases": list[Tensor]}
HASHED |= {"layers": list[int], "heads": int, "root": float}


@top_and_best.operator("scores", *CHOICE, scores=Tensor)
def top_by_score(x: Any) -> tuple[Tensor, Tensor]:
    """Allocate slots and best buckets."""
    _, H, N, C = x.scores.shape
    return _slots(x.scores, H, N, C, x.most)


@top_and_best.operator(*HASHED, *CHOICE, **HASHED)
def top_by_hash(x: Any) -> tuple[Tensor, Tensor]:
    """The top tokens by scores Σ_t H_t(root·x_t), which are computed when needed and never stored.

    H_t are perceptrons of `layers[t]` layers each, one for each head of x_t or for several; weights (G,in,out) and
    biases (G,1,out) of all of them follow each other.
    """
    return _slots(x.vectors[0], x.heads, x.vectors[0].shape[2], x.weights[-1].shape[2], x.most)


def _slots(like: Tensor, heads: int, tokens: int, buckets: int, most: int) -> tuple[Tensor, Tensor]:
    slots = like.new_empty(like.shape[0], heads, buckets, sym_min(most, tokens), dtype=torch.int64)
    return slots, like.new_empty(like.shape[0], heads, tokens, dtype=torch.int64)


@top_by_hash.flops
def hash_flops(x: Any) -> int:
    """Operations of the products, for every head of the scores."""
    B, _, N, _ = x.vectors[0]
    return 2 * B * x.heads * N * sum(width * out for _, width, out in x.weights)
