"""Measures of closeness to exact attention and to the exact model."""

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from subquad.methods import BoundMethod, Full, Method
from subquad.tools.measure.group import ALONE, MeasuringGroup


def cosine(a: Float[Tensor, "n width"], b: Float[Tensor, "n width"]) -> Float[Tensor, "n"]:
    """Cosine of each pair of rows, in fp64: close to 1, fp32 has few digits left."""
    return torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=-1)


def percentile(values: Tensor, q: float) -> float:
    """The q-quantile of some numbers, interpolated."""
    return float(values.double().quantile(q))


def relative_error(out: Tensor, exact: Tensor, ranks: MeasuringGroup = ALONE) -> float:
    """‖out − exact‖ / ‖exact‖ over all entries, of a group over those of all its processes; 0 where both are 0."""
    norms = (float(x.double().norm()) for x in (out.double() - exact.double(), exact))
    error, size = (math.sqrt(square) for square in ranks.sums(*(norm * norm for norm in norms)))
    if size > 0:
        return error / size
    return math.inf if error > 0 else 0.0


def attention_weights(
    method: Method | BoundMethod,
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M E"],
    *,
    rows: Int64[Tensor, "rows"] | None = None,
    keys: slice = slice(None),
    **options: Any,
) -> Float[Tensor, "B H rows columns"]:
    """The attention matrix A that a method applies to its values, out = A·V; of some rows and columns only, if wanted.

    Most methods are linear in their values, so V = I gives A. If a method's trait `by_values` declares that its choices
    depend on the values, A is the derivative of out with respect to them, one backward pass a row. N×M memory for all.
    """
    plain = method.method if isinstance(method, BoundMethod) else method
    if not plain.traits.by_values:
        identity = torch.eye(key.shape[2], dtype=key.dtype, device=key.device)[:, keys]
        out = method(query, key, identity.expand(*key.shape[:2], -1, -1), **options)
        return out if rows is None else out[:, :, rows]
    with torch.inference_mode(False), torch.enable_grad():
        query, key, value = query.detach().clone(), key.detach().clone(), value.detach().clone().requires_grad_()
        out, group = method(query, key, value, **options), query.shape[1] // key.shape[1]
        rows = torch.arange(query.shape[2], device=query.device) if rows is None else rows
        weights = out.new_zeros(*query.shape[:2], len(rows), key.shape[2])
        for at, row in enumerate(rows.tolist()):
            for head in range(group):  # of those that share a key head, one at a time
                one = torch.zeros_like(out)
                one[:, head::group, row, 0] = 1.0
                (of_values,) = torch.autograd.grad(out, value, one, retain_graph=True)
                weights[:, head::group, at] = of_values[..., 0]
    return weights[..., keys]


def weights_l1(
    method: Method | BoundMethod,
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M E"],
    *,
    heads: int = 2,
    queries: int = 16,
    **options: Any,
) -> float:
    """Mean over some heads and queries, evenly spaced, of the L1 distance of attention weights to exact ones.

    Of a method that is bound, over all heads: its parameters are theirs. A bias among the options is left out.
    """
    if not isinstance(method, BoundMethod):
        H, G = query.shape[1], key.shape[1]
        chosen = torch.arange(heads, device=query.device) * H // heads
        query, key, value = query[:, chosen], key[:, chosen * G // H], value[:, chosen * G // H]
    options |= {"bias": None, "rows": torch.arange(queries, device=query.device) * query.shape[2] // queries}
    mine = attention_weights(method, query, key, value, **options)
    exact = attention_weights(Full(), query, key, value, enable_gqa=query.shape[1] != key.shape[1], **options)
    return float((mine - exact).abs().sum(-1).mean())


def retrieval_agreement(
    scores: Float[Tensor, "queries passages"], exact: Float[Tensor, "queries passages"], depth: int = 10
) -> tuple[float, float]:
    """Share of queries whose best passage is the exact model's, and of its `depth` best that are among `depth` here."""
    depth = min(depth, exact.shape[1])
    mine, its = scores.topk(depth, dim=1).indices, exact.topk(depth, dim=1).indices
    top1 = (mine[:, 0] == its[:, 0]).float().mean()
    recall = (mine[:, :, None] == its[:, None, :]).any(1).float().mean()
    return float(top1), float(recall)


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
