"""How close something is to the exact model."""

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from subquad.methods import Bound, Method


def cosine(a: Float[Tensor, "n width"], b: Float[Tensor, "n width"]) -> Float[Tensor, "n"]:
    """Cosine of each pair of rows, in fp64: close to 1, fp32 has few digits left."""
    return torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=-1)


def percentile(values: Tensor, q: float) -> float:
    """The q-quantile of some numbers, interpolated."""
    return float(values.double().quantile(q))


def relative_error(out: Tensor, exact: Tensor) -> float:
    """‖out − exact‖ / ‖exact‖ over all entries; 0 where both are 0."""
    error, size = (out.double() - exact.double()).norm(), exact.double().norm()
    if size > 0:
        return float(error / size)
    return math.inf if error > 0 else 0.0


def attention_weights(
    method: Method | Bound,
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B G M D"],
    *,
    keys: slice = slice(None),
    **options: Any,
) -> Float[Tensor, "B H N columns"]:
    """The attention matrix A that a method applies to its values, read off with the identity as values.

    Every method here is linear in its values, out = A·V, so V = I gives A. N×M memory: for a few heads, or for a few
    keys: with `keys` only their columns.
    """
    identity = torch.eye(key.shape[2], dtype=key.dtype, device=key.device)[:, keys]
    return method(query, key, identity.expand(*key.shape[:2], -1, -1), **options)


def retrieval_agreement(
    scores: Float[Tensor, "queries passages"], exact: Float[Tensor, "queries passages"], depth: int = 10
) -> tuple[float, float]:
    """Share of queries whose best passage is the exact model's, and of its `depth` best that are among `depth` here."""
    depth = min(depth, exact.shape[1])
    mine, its = scores.topk(depth, dim=1).indices, exact.topk(depth, dim=1).indices
    top1 = (mine[:, 0] == its[:, 0]).float().mean()
    found = (mine[:, :, None] == its[:, None, :]).any(1).float().mean()
    return float(top1), float(found)


def crossover(speedups: Mapping[int, float], ties: Collection[int] = ()) -> float | None:
    """The length from which on a method is faster than exact attention, at every longer measured length.

    Between two lengths the logarithm of the speed-up is taken to be linear in the logarithm of the length.

    Args:
        speedups: {length: exact time / method time}.
        ties: the lengths at which the speed-up is within the noise. They count neither as faster nor as slower.

    Returns:
        None when the longest measured length is not faster. A measured length where the crossing is there or below it:
        the shortest one, or the one above a tie.
    """
    lengths = sorted(speedups)
    faster = {length for length in lengths if speedups[length] > 1.0} - set(ties)
    if not lengths or lengths[-1] not in faster:
        return None
    faster_from = lengths[-1]
    for length in reversed(lengths):
        if length not in faster:
            if length in ties:
                return float(faster_from)
            low, high = math.log(speedups[length]), math.log(speedups[faster_from])
            return length * (faster_from / length) ** (-low / (high - low))
        faster_from = length
    return float(lengths[0])
