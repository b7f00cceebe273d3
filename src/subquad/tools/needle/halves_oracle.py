"""The oracle of a method that is causal by halves: each query's own best keys, as many as the method meets exactly.

`oracle-top` gives every query the same number of keys, and a method by halves does not, so k is the mean over the
queries of a prompt. A window in addition to the best keys is not possible: the sum of `oracle-top` and `local` would
need the best keys outside of the window.
"""

from collections.abc import Iterable

import torch

from subquad.methods import ClusteredTail, ImprovedClustered, Method, OracleTopK
from subquad.methods.clustered_tail import OF_RECTANGLE, by_length


def oracle_of(methods: Iterable[Method], length: int, dtype: torch.dtype) -> tuple[Method, OracleTopK] | None:
    """The first method whose exact keys can be counted in a dtype, and its oracle; None where there is none."""
    for method in methods:
        if isinstance(method, ClusteredTail | ImprovedClustered):
            return method, OracleTopK(topk=max(1, round(mean_exact_keys(method, length, dtype))))
    return None


def mean_exact_keys(method: ClusteredTail | ImprovedClustered, length: int, dtype: torch.dtype) -> float:
    """The mean number of keys that a query meets exactly: those in its block, and the top keys of its rectangles.

    The last queries meet all keys before them. The default block depends on the dtype of the keys.
    """
    method = method.sized_for(dtype)
    if length <= method.block or length <= method.last:
        return (length + 1) / 2
    counts = [0] * length
    for part in method.rectangles(length, 0):
        topk, _ = by_length(method.topk, OF_RECTANGLE.topk, part.keys, None)
        for number in range(part.count):
            first = part.query + number * part.step
            for row in range(part.queries):
                counts[first + row] += row + 1 if part.diagonal else topk
    exact = range(length - method.last, length)
    return (sum(counts[: length - method.last]) + sum(row + 1 for row in exact)) / length
