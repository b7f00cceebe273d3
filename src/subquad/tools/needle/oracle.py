"""The oracle of a method that is causal by halves: each query's own best keys, as many as the method meets exactly.

`oracle-top` gives every query the same number of keys, and a method by halves does not, so k is the mean over the
queries of a prompt. A window in addition to the best keys is not possible: the sum of `oracle-top` and `local` would
need the best keys outside of the window.
"""

from collections.abc import Iterable

from subquad.methods import Method, OracleTopK
from subquad.methods.core.halves import ByHalves


def oracle_of(methods: Iterable[Method], length: int) -> tuple[Method, OracleTopK] | None:
    """The first method whose exact keys can be counted, and its oracle; None where there is none."""
    for method in methods:
        if isinstance(method, ByHalves) and hasattr(method, "topk"):
            return method, OracleTopK(topk=max(1, round(mean_exact_keys(method, length))))
    return None


def mean_exact_keys(method: ByHalves, length: int) -> float:
    """The mean number of keys that a query meets exactly: those in its block, and the top keys of its rectangles.

    The last queries meet all keys before them.
    """
    if length <= method.block or length <= method.last:
        return (length + 1) / 2
    counts = [0] * length
    for part in method.rectangles(length, 0):
        inner = method.in_rectangle(part.queries, part.keys).clamped_to(part.queries, part.keys)
        for number in range(part.count):
            first = part.query + number * part.step
            for row in range(part.queries):
                counts[first + row] += row + 1 if part.diagonal else min(getattr(inner, "topk", 0), part.keys)
    exact = range(length - method.last, length)
    return (sum(counts[: length - method.last]) + sum(row + 1 for row in exact)) / length
