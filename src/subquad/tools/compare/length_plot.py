"""The plot of a whole forward pass against the length: exact attention, the methods, and where they cross."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from subquad.tools.compare import reading
from subquad.tools.compare.growth import Curve, curve_of, overtaking
from subquad.tools.compare.recommend import is_exact_kernel
from subquad.tools.compare.schema import MethodReport, Report
from subquad.tools.models.dtypes import FP32
from subquad.tools.report import cells, vector
from subquad.tools.report.drawing import Style, add_legend, beside_legend, log_lengths, ring, ticks, ticks_at

FARTHER = 2  # times the longest length, up to which times are predicted


def model_time_vs_length(report: Report, looks: Mapping[str, Style], narrow: bool = False) -> Figure | None:
    """A line for each row in the dtype of the longest length, dashed where it is predicted; None with one length only.

    A ring marks where an approximation overtakes the fastest exact attention.
    """
    rows = _rows(report)
    curves = {name: made for name, row in rows.items() if (made := curve_of(row)) is not None}
    if len(curves) < 2:
        return None
    figure, ax = beside_legend(len(curves), 4.8, narrow)
    for name, made in curves.items():
        _draw(ax, rows[name], made, looks[name])
    _mark_crossings(ax, rows, curves, looks, reading.of_next_tokens(report))
    log_lengths(ax)
    ticks_at(ax.xaxis, _doubled([int(n) for row in rows.values() for n in (row.model or {})]), lambda x: f"{x:,.0f}")
    ticks(ax.yaxis, ax.get_ylim(), lambda y: f"{y:g}")
    ax.set_ylabel("seconds per forward pass of the model")
    add_legend(figure, narrow)
    return figure


def _rows(report: Report) -> dict[str, MethodReport]:
    """The rows in the dtype that was run at the longest length with several rows, exact attention first."""
    rows = reading.ran(report)
    longest = max((int(n) for m in rows for n in (m.model or {})), default=0)
    at_longest = [(m.dtype or FP32) for m in rows if str(longest) in (m.model or {})]
    if not at_longest:
        return {}
    dtype = max(dict.fromkeys(at_longest), key=at_longest.count)
    of_dtype = [m for m in rows if (m.dtype or FP32) == dtype and m.model]
    return {m.method: m for m in sorted(of_dtype, key=lambda m: not is_exact_kernel(m))}


def _doubled(lengths: Sequence[int]) -> list[float]:
    """The shortest length, doubled until it is the farthest that is predicted.

    >>> _doubled([2048, 8192])
    [2048.0, 4096.0, 8192.0, 16384.0]
    """
    steps = math.ceil(math.log2(FARTHER * max(lengths) / min(lengths)))
    return [float(min(lengths) * 2**step) for step in range(steps + 1)]


def _draw(ax: Any, row: MethodReport, made: Curve, look: Style) -> None:
    seconds = {int(n): cost.ms / 1e3 for n, cost in sorted((row.model or {}).items(), key=lambda item: int(item[0]))}
    lengths = list(seconds)
    between = np.union1d(np.geomspace(lengths[0], lengths[-1], 24), lengths)  # the line bends at the measured lengths
    beyond = np.geomspace(lengths[-1], FARTHER * lengths[-1], 8)
    width = 2.6 if is_exact_kernel(row) else 1.7
    ax.plot(between, [made(n) / 1e3 for n in between], color=look.color, linewidth=width)
    ax.plot(beyond, [made(n) / 1e3 for n in beyond], color=look.color, linewidth=width, linestyle=(0, (4, 3)))
    (points,) = ax.plot(lengths, list(seconds.values()), label=row.method, **(look.line | {"linestyle": ""}))
    labels = [f"{row.method}\n{n:,} tokens: {cells.size(1e3 * each).text} ms" for n, each in seconds.items()]
    vector.named(points, labels)


def _mark_crossings(
    ax: Any, rows: Mapping[str, MethodReport], curves: Mapping[str, Curve], looks: Mapping[str, Style], causal: bool
) -> None:
    lengths = sorted({int(n) for row in rows.values() for n in (row.model or {})})
    exact = [name for name in curves if is_exact_kernel(rows[name])]
    if not exact:
        return
    fastest = min(exact, key=lambda name: curves[name](lengths[-1]))
    for name, made in curves.items():
        at = None if name in exact else overtaking(rows[name], rows[fastest], lengths, causal)
        if at is not None and at <= FARTHER * lengths[-1]:
            ring(ax, at, made(at) / 1e3, looks[name].color)
