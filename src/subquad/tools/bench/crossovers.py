"""Conclusions from the times of `subquad bench`: exponents of growth and crossovers; and how to find cells."""

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

from subquad.methods.full import EXACT
from subquad.tools.bench.schema import BenchCell, Crossover
from subquad.tools.measure.fidelity import crossover

Panel = tuple[str, str]  # dtype, passes


def growth(values: Mapping[int, float]) -> dict[int, float]:
    """Exponent p of value ∝ length^p, from each length to the next; under the longer one of both.

    >>> growth({256: 1.0, 512: 2.0, 2048: 32.0})
    {512: 1.0, 2048: 2.0}
    """
    lengths = sorted(values)
    return {
        longer: math.log(values[longer] / values[shorter]) / math.log(longer / shorter)
        for shorter, longer in pairwise(lengths)
    }


def crossing(speedups: Mapping[int, float], ties: Collection[int] = ()) -> dict[str, Any]:
    """State and tokens of a `Crossover`, from speed-ups by length, some of which are within the noise."""
    if not speedups:
        return {"state": "unknown", "tokens": None}
    ends: dict[str, Any] = {"shortest": min(speedups), "longest": max(speedups)}
    if ties:
        ends["ties"] = sorted(ties)
    clear = {length for length, speedup in speedups.items() if speedup > 1.0} - set(ties)
    if clear == speedups.keys():
        return {"state": "below the shortest", "tokens": None, **ends}
    tokens = crossover(speedups, ties)
    if tokens is None:
        return {"state": "not reached", "tokens": None, **ends}
    return {"state": "at or below" if tokens in clear else "at", "tokens": tokens, **ends}


def crossovers(cells: Sequence[BenchCell]) -> list[Crossover]:
    """One for each method but SDPA in each panel."""
    return [_crossover(cells, panel, name) for panel in panels(cells) for name in names(cells) if name != EXACT]


def _crossover(cells: Sequence[BenchCell], panel: Panel, method: str) -> Crossover:
    speedups = by_length(cells, panel, method, "speedup")
    ties = [cell.length for cell in cells_of(cells, panel, method) if cell.verdict == "within the noise"]
    return Crossover(method, *panel, **crossing(speedups, ties))


def ran(cells: Sequence[BenchCell], panel: Panel, method: str) -> bool:
    """True if a method was measured at any length of a panel."""
    return any(cell.status == "measured" for cell in cells_of(cells, panel, method))


def panels(cells: Sequence[BenchCell]) -> list[Panel]:
    """Dtypes and passes that were measured together, in the order of the cells."""
    return list(dict.fromkeys((cell.dtype, cell.passes) for cell in cells))


def names(cells: Sequence[BenchCell]) -> list[str]:
    """The methods, SDPA first."""
    methods = dict.fromkeys(cell.method for cell in cells)
    return sorted(methods, key=lambda name: name != EXACT)


def cells_of(cells: Sequence[BenchCell], panel: Panel, method: str) -> list[BenchCell]:
    """A method's cells in a panel, shortest first."""
    chosen = [cell for cell in cells if (cell.dtype, cell.passes, cell.method) == (*panel, method)]
    return sorted(chosen, key=lambda cell: cell.length)


def by_length(cells: Sequence[BenchCell], panel: Panel, method: str, figure: str) -> dict[int, float]:
    """A figure by length, where it is known and above 0."""
    values: dict[int, Any] = {cell.length: getattr(cell, figure, None) for cell in cells_of(cells, panel, method)}
    return {length: float(value) for length, value in values.items() if value is not None and value > 0}
