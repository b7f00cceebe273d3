"""Covering arrays: few cases of a product of parameters in which every pair of values still occurs.

A test with several parameters says `@pytest.mark.covering`: then the cases that a covering array needs run, and the
others of the product get the marker `long`. `@pytest.mark.covering(strength=1)` asks for every single value, not for
every pair of them.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from heapq import heapify, heapreplace
from itertools import combinations

import pytest

Row = Sequence[Hashable]


def covering(
    rows: Sequence[Row], strength: int = 2, kind: Callable[[Hashable], Hashable] = lambda value: value
) -> list[int]:
    """Choose rows, in their order, so that every `strength` values that occur together in a row still do.

    Greedy and deterministic: the next row adds the most, and of those its values were used least. It works on any set
    of rows, so also where some combinations do not exist. Every value occurs, but only the kinds of values occur in
    every combination.
    """
    parts = [{*enumerate(row), *combinations(enumerate(map(kind, row)), min(strength, len(row)))} for row in rows]
    missing: set[Hashable] = set().union(*parts)
    taken, used = [], Counter[Hashable]()
    best_first = [(-len(part), 0, i) for i, part in enumerate(parts)]
    heapify(best_first)
    while missing:
        *before, best = best_first[0]
        now = [-len(parts[best] & missing), sum(used[v] for v in enumerate(rows[best]))]
        if now != before:  # rows only become worse, so that the first one that has not is the best
            heapreplace(best_first, (*now, best))
            continue
        taken.append(best)
        used.update(enumerate(rows[best]))
        missing -= parts[best]
    return sorted(taken)


def mark_long(items: Iterable[pytest.Item]) -> None:
    """Give the marker `long` to the cases of marked tests that their covering arrays do not need."""
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        if item.get_closest_marker("covering") and not item.get_closest_marker("long") and hasattr(item, "callspec"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        mark = cases[0].get_closest_marker("covering")
        taken = set(covering([values(case) for case in cases], kind=of_class, **mark.kwargs))
        for number, case in enumerate(cases):
            if number not in taken:
                case.add_marker(pytest.mark.long)


def values(case: pytest.Function) -> list[Hashable]:
    """The ids of a case's parameters, one for each parametrization; a method's is the method."""
    method = case.callspec.params.get("method")
    return [method if method is not None and name == str(method) else name for name in case.callspec._idlist]


def of_class(value: Hashable) -> Hashable:
    """The class of a method, whose settings stand for each other; any other value as it is."""
    return value if isinstance(value, str) else type(value)
