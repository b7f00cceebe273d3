"""A report's plots, as PNGs and for the page. Drawn on matplotlib's objects; its global state is left as it was."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from subquad.tools.compare import reading, tables
from subquad.tools.compare.length_plot import model_time_vs_length
from subquad.tools.compare.schema import MethodReport, Report
from subquad.tools.report import cells, drawing, vector
from subquad.tools.report.drawing import Style, log_lengths, ticks

RESOLUTION = 1e-3  # of the fidelity axis at 1
LEGEND_HANDLE, LEGEND_LETTER = 0.5, 0.07  # inches: of a marker with its gaps, and of a letter of its text


def plots(report: Report) -> dict[str, bytes]:
    """PNGs by name; a plot without figures to draw is left out. Names, titles and texts: `tables.PLOTS`."""
    titles = {name: f"{title[0].lower()}{title[1:]}" for name, (title, *_) in tables.PLOTS.items()}
    return drawing.pngs(_makers(), report, tables.short_name(report), titles)


def drawings(report: Report) -> dict[str, vector.Drawing]:
    """Drawings of the plots for the page, without a title, by name."""
    return vector.drawings(_makers(), report)


def _makers() -> dict[str, Callable[..., Figure | None]]:
    makers = (quality_vs_speed, model_time, error_by_layer, time_vs_length)
    return dict(zip(tables.PLOTS, makers, strict=True))


def model_time(report: Report, narrow: bool = False) -> Figure | None:
    """A whole forward pass against the length; None with one length only."""
    return model_time_vs_length(report, styles(report), narrow)


def styles(report: Report) -> dict[str, Style]:
    """The look of every method that ran."""
    return drawing.styles([method.method for method in reading.ran(report)])


# ---------------------------------------------------------------------- fidelity against speed-up


def quality_vs_speed(report: Report, narrow: bool = False) -> Figure | None:
    """A panel for each length of the model; None where no method has both figures. Narrow: one below the other."""
    panels = {length: points for length in reading.model_lengths(report) if (points := _points(report, length))}
    if not panels:
        return None
    looks = styles(report)
    named = [name for name in looks if any(name in points for points in panels.values())]
    handles = [_handle(looks[name], name) for name in named] + _guides(report)
    columns = 1 if narrow else min(len(panels), 3)
    rows = math.ceil(len(panels) / columns)
    size = (drawing.NARROW, 3.0 * rows + 0.2 * len(handles)) if narrow else (max(3.5 * columns, 6.5), 3.6 * rows + 1.3)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flatten()
    _scale_both(
        axes[0], [point for points in panels.values() for point in points.values()], reading.min_fidelity(report)
    )
    for ax, (length, points) in zip(axes, panels.items(), strict=False):
        _panel(ax, report, length, points, looks)
    for ax in axes[len(panels) :]:
        ax.set_visible(False)
    for ax in axes:
        ax.set_xlabel("speed-up of a forward pass" + (" over exact fp32" if _is_over_fp32(report) else ""))
    for ax in axes[::columns]:
        ax.set_ylabel("fidelity to the exact model")
    figure.legend(handles=handles, loc="outside lower center", ncols=1 if narrow else _legend_columns(handles, size[0]))
    return figure


def _legend_columns(handles: Sequence[Line2D], width: float) -> int:
    """The number of columns, at most three, that fit into the figure's width in inches; columns are filled in turn."""
    labels = [str(handle.get_label()) for handle in handles]
    for count in (3, 2):
        height = math.ceil(len(labels) / count)
        longest = [max(map(len, labels[i : i + height])) for i in range(0, len(labels), height)]
        if sum(LEGEND_HANDLE + LEGEND_LETTER * letters for letters in longest) <= width:
            return count
    return 1


def pareto(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The Pareto front of points, slowest first."""
    front: list[tuple[float, float]] = []
    for x, y in sorted(points, reverse=True):
        if not front or y > front[-1][1]:
            front.append((x, y))
    return front[::-1]


def _points(report: Report, length: str) -> dict[str, tuple[float, float]]:
    """(speed-up, fidelity) of the methods that have both; empty where only exact attention has."""
    points = {m.method: p for m in reading.ran(report) if m.status == "measured" and (p := _point(m, length))}
    exact = {m.method: (1.0, 1.0) for m in reading.ran(report) if m.status == "exact"}
    return exact | points if points else {}


def _point(method: MethodReport, length: str) -> tuple[float, float] | None:
    speed = _speedup(method, length)[0]
    fidelity = reading.fidelity(method, length)
    return None if speed is None or speed <= 0 or fidelity is None else (speed, min(fidelity, 1.0))


def _speedup(method: MethodReport, length: str) -> tuple[float | None, object]:
    """A row's speed-up and its verdict: over exact attention in fp32 for rows in 16 bits, if that was timed too."""
    speed, verdict = method.cost("model", length).over_fp32
    return cells.known(speed), verdict


def _is_over_fp32(report: Report) -> bool:
    """True if the report has rows in 16 bits whose speed-up is over exact attention in fp32."""
    lengths = reading.model_lengths(report)
    return any(m.cost("model", n).speedup_fp32 is not None for m in reading.ran(report) for n in lengths)


def _panel(
    ax: Any, report: Report, length: str, points: Mapping[str, tuple[float, float]], looks: Mapping[str, Style]
) -> None:
    least, noise = reading.min_fidelity(report), max(reading.noise_at(report, "model", length) or 1.0, 1.0)
    ties = _ties(report, length)
    ax.set_title(f"{int(length):,} tokens", fontsize=10.5)
    ax.axvspan(1 / noise, noise, color="#9aa2aa", alpha=0.22, linewidth=0)
    ax.axvline(1.0, color="#9aa2aa", linewidth=1)
    right = ax.get_xlim()[1]
    if least is not None:
        ax.axhline(least, **drawing.GUIDE)
        ax.fill_between([min(noise, right), right], least, ax.get_ylim()[1], color="#009E73", alpha=0.09, linewidth=0)
    front = pareto([(1.0 if name in ties else x, y) for name, (x, y) in points.items()])
    ax.plot(*zip(*front, strict=True), color="#8a929a", linewidth=1.3, zorder=2)
    for name, (x, y) in points.items():
        size, color = 8 * looks[name].scale, looks[name].color
        if name in ties:
            look = {"markerfacecolor": "none", "markeredgecolor": color, "markeredgewidth": 1.3}
        else:
            look = {"color": color, "markeredgecolor": "white", "markeredgewidth": 0.8}
        (mark,) = ax.plot(x, y, linestyle="", marker=looks[name].marker, markersize=size, zorder=3, **look)
        verdict = "within the noise" if name in ties else ""
        point = f"fidelity {y:.4f}, speed-up {cells.speedup(x, verdict).text} at {int(length):,} tokens"
        vector.named(mark, ["\n".join(filter(None, (name, point, verdict)))])


def _ties(report: Report, length: str) -> set[str]:
    """The methods whose speed-up is within the noise."""
    verdicts = {m.method: _speedup(m, length)[1] for m in reading.ran(report)}
    return {name for name, verdict in verdicts.items() if verdict == "within the noise"}


def _scale_both(ax: Any, points: Sequence[tuple[float, float]], least: float | None) -> None:
    """Logarithmic speed-ups, and fidelities spread where they are near 1; shared by all panels."""
    speeds = [x for x, _ in points]
    ax.set_xscale("log")
    ax.set_xlim(min(*speeds, 0.9) / 1.2, max(max(speeds) * 1.2, 2.2))
    ticks(ax.xaxis, ax.get_xlim(), lambda x: f"{x:g}×")
    ax.set_yscale("function", functions=(_spread, _gathered))
    lowest = min([y for _, y in points] + ([least] if least is not None else []))
    bottom, top = _spread(np.array([lowest, 1.0]))
    margin = 0.06 * max(top - bottom, 0.5)
    ax.set_ylim(*_gathered(np.array([bottom - margin, top + margin])))
    low = ax.get_ylim()[0]
    ax.yaxis.set_major_locator(
        FixedLocator([y for y in (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 1) if y >= low])
    )
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))


def _spread(fidelity: Any) -> Any:
    """Fidelity to its place on the axis: 0.9, 0.99 and 0.999 about as far apart from each other; 1 is finite."""
    return -np.log10(np.maximum(1.0 + RESOLUTION - np.asarray(fidelity, dtype=float), 1e-9))


def _gathered(position: Any) -> Any:
    return 1.0 + RESOLUTION - 10.0 ** -np.asarray(position, dtype=float)


def _guides(report: Report) -> list[Line2D]:
    least = reading.min_fidelity(report)
    asked_for = f"minimum fidelity: {least:.4g}" if least is not None else ""
    front = Line2D([], [], color="#8a929a", linewidth=1.3, label="Pareto front")
    asked = Line2D([], [], label=asked_for, **drawing.GUIDE)
    hollow: dict[str, Any] = {"markerfacecolor": "none", "markeredgecolor": "#5b636b", "markeredgewidth": 1.3}
    tie = Line2D([], [], linestyle="", marker="o", markersize=7.5, label="hollow: within the noise", **hollow)
    return [front, asked, tie] if least is not None else [front, tie]


# ---------------------------------------------------------------------- error by layer


def error_by_layer(report: Report, narrow: bool = False) -> Figure | None:
    """A line for each method; None where no layer's error is known and above 0. Narrow: with the legend below."""
    looks = styles(report)
    errors = {m.method: {n: e for n, e in reading.layer_errors(m).items() if e > 0} for m in reading.ran(report)}
    errors = {name: by_layer for name, by_layer in errors.items() if by_layer}
    if not errors:
        return None
    figure, ax = drawing.beside_legend(len(errors), 4.4, narrow)
    worst_first = sorted(errors, key=lambda name: -sum(errors[name].values()) / len(errors[name]))
    for name in worst_first:
        (line,) = ax.plot(list(errors[name]), list(errors[name].values()), label=name, **looks[name].line)
        vector.named(line, [f"{name}\nlayer {layer}: error {error:.3g}" for layer, error in errors[name].items()])
    ax.set_yscale("log")
    ticks(ax.yaxis, ax.get_ylim(), lambda y: f"{y:g}")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.grid(axis="x", visible=False)
    ax.set_xlabel("layer")
    ax.set_ylabel("‖out − exact‖ / ‖exact‖")
    drawing.add_legend(figure, narrow)
    return figure


# ---------------------------------------------------------------------- time against length


def time_vs_length(report: Report, narrow: bool = False) -> Figure | None:
    """Exact attention and the methods, with rings where they cross; None where nothing was timed."""
    looks = styles(report)
    times = {m.method: t for m in reading.ran(report) if (t := _times(m, reading.op_lengths(report)))}
    if not times:
        return None
    methods = {m.method: m for m in reading.ran(report) if m.method in times}
    lines = sum(_timed(method).count("\n") + 1 for method in methods.values())  # of the legend
    figure, ax = drawing.beside_legend(lines, max(5.2, 0.6 + 0.19 * lines), narrow)
    common = max(set.intersection(*(set(t) for t in times.values())), default=None)
    for name in sorted(methods, key=lambda name: -times[name].get(common or 0, 0.0)):
        look = looks[name].line | (drawing.EXACT_LINE if methods[name].status == "exact" else {})
        (line,) = ax.plot(list(times[name]), list(times[name].values()), label=_timed(methods[name]), **look)
        vector.named(line, [_point_label(methods[name], length, ms) for length, ms in times[name].items()])
    _mark_crossovers(ax, methods, times, looks)
    log_lengths(ax)
    ticks(ax.yaxis, ax.get_ylim(), lambda y: f"{y:g}")
    ax.set_ylabel("ms per call, one layer")
    drawing.add_legend(figure, narrow)
    return figure


def _times(method: MethodReport, lengths: Sequence[str]) -> dict[int, float]:
    times = {int(n): cells.known(method.cost("op", n).ms) for n in lengths}
    return {n: ms for n, ms in times.items() if ms is not None and ms > 0}


def _point_label(method: MethodReport, length: int, ms: float) -> str:
    """The text of a point."""
    text = f"{method.method}\n{length:,} tokens: {cells.size(ms).text} ms"
    if method.status == "exact":
        return text
    cost = method.cost("op", length)
    return f"{text}, speed-up {cells.speedup(cost.speedup, cost.verdict).text}"


def _timed(method: MethodReport) -> str:
    """A method's entry in the legend."""
    if method.status == "exact":
        return f"{method.method} (exact attention)"
    at = tables.crossover(method)
    if at.tone in ("slower", "missing"):
        return method.method
    where = "at every length" if at.tone == "faster" else f"from {at.text.replace('≤', 'at most ')} tokens"
    return f"{method.method}\n   faster {where}"


def _mark_crossovers(
    ax: Any, methods: Mapping[str, MethodReport], times: Mapping[str, Mapping[int, float]], looks: Mapping[str, Style]
) -> None:
    exact = next((times[name] for name, m in methods.items() if m.status == "exact"), None)
    for name, method in methods.items():
        at = cells.known(method.crossover)
        if exact is None or at is None or at in times[name] or not min(times[name]) < at < max(times[name]):
            continue  # no crossing is known; or it lies somewhere at or below a length that was measured
        height = float(np.exp(np.interp(np.log(at), np.log(list(exact)), np.log(list(exact.values())))))
        drawing.ring(ax, at, height, looks[name].color)


# ---------------------------------------------------------------------- drawing


def _handle(look: Style, name: str) -> Line2D:
    points = 7.5 * look.scale
    return Line2D([], [], linestyle="", marker=look.marker, markersize=points, color=look.color, label=name)
