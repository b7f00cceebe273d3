"""Draw what an experiment shows."""

import math
from collections.abc import Callable, Mapping, Sequence
from textwrap import wrap
from typing import Any, TypeVar

from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from subquad.research.papers.results import Bars, HeatMap, Lines, Plot, Results
from subquad.tools.report import drawing
from subquad.tools.report.drawing import broken, look, styles, ticks, ticks_at, titled

Kind = TypeVar("Kind", Lines, HeatMap, Bars)

LETTER = 0.085  # inches of a letter of an axis' labels, about
ENTRY = 26  # letters of a line of a legend
MARKED = 40  # points of a line that is drawn with a marker at each
NAMED = 24  # places on a logarithmic axis that may all have a tick of their own
COLORS = "viridis"
DASHES = ("--", ":", "-.", (0, (8, 3)), (0, (1, 4)))  # of horizontal lines: colours are those of the series


def plots(name: str, results: Results) -> dict[str, bytes]:
    """A PNG for each plot, by its file's name."""
    with look():
        return {f"{plot.file}.png": drawing.png(drawn(name, plot)) for plot in results.plots}


def drawn(name: str, plot: Plot) -> Figure:
    """One plot of the experiment of this name, inside of `look`."""
    makers: dict[type[Any], Callable[[Any], Figure]] = {Lines: _lines, HeatMap: _heat_map, Bars: _bars}
    figure = titled(makers[type(plot)](plot), name, plot.title)
    FigureCanvasAgg(figure)
    return figure


def _lines(plot: Lines) -> Figure:
    figure, ax = _beside_legend(8.6, [*plot.series, *plot.levels])
    looks = styles(list(plot.series))
    for name, points in plot.series.items():
        if points:
            _line(ax, plot, name, looks[name])
    _levels(ax, plot.levels)
    for axis, scale, values in (
        ("x", plot.log_x, sorted({x for points in plot.series.values() for x, _ in points})),
        ("y", plot.log_y, []),
    ):
        _scale(ax, axis, scale, values)
    ax.set_xlabel(plot.x)
    ax.set_ylabel(plot.y)
    _legend(figure, ax)
    return figure


def _line(ax: Any, plot: Lines, name: str, style: Any) -> None:
    """One series with its band and the labels of its points."""
    points = plot.series[name]
    xs, ys = zip(*points, strict=True)
    drawn_as = style.line | ({} if plot.joined else {"linestyle": "none"})
    if len(points) > MARKED:
        drawn_as |= {"marker": ""}
    ax.plot(xs, ys, label=_entry(name), **drawn_as)
    for (x, y), text in zip(points, plot.labels.get(name, ()), strict=False):
        ax.annotate(text, (x, y), textcoords="offset points", xytext=(5, 4), fontsize=8, color=style.color)
    if name in plot.bands:
        low, high = zip(*plot.bands[name], strict=True)
        ax.fill_between(xs, low, high, color=style.color, alpha=0.15, linewidth=0)


def _scale(ax: Any, which: str, logarithmic: bool, values: Sequence[float]) -> None:
    """Ticks with their numbers written out; on a logarithmic axis at `values`, where they are few."""
    axis = getattr(ax, f"{which}axis")
    if not logarithmic:
        axis.set_major_formatter(FuncFormatter(lambda value, _: _number(value)))
        return
    getattr(ax, f"set_{which}scale")("log")
    limits = getattr(ax, f"get_{which}lim")()
    if 1 < len(values) <= NAMED and values[0] > 0:
        ticks_at(axis, values, _number)
    else:
        ticks(axis, limits, _number)


def _number(value: float) -> str:
    """ "16,384", "0.25", "1e-08"."""
    value = float(f"{value:.6g}")
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e7 else f"{value:g}"


def _heat_map(plot: HeatMap) -> Figure:
    widest = max((LETTER * len(column) + 0.15 for column in plot.columns), default=0.0)
    cell = max(0.75, min(widest, 1.2), 0.1 * max(map(len, _cell_texts(plot)), default=0))
    beside, below = 1.8 + LETTER * max(map(len, plot.rows), default=0), 0.5 * (widest > cell)
    size = max(5.2, beside + cell * len(plot.columns)), max(2.6, 1.6 + below + 0.5 * len(plot.rows))
    figure = Figure(figsize=size, layout="constrained")
    ax = figure.subplots()
    ax.grid(False)
    ax.set_facecolor("#eceef0")  # of what was not measured
    values = [[math.nan if v is None else v for v in row] for row in plot.values]
    if values and values[0]:
        image = ax.imshow(values, vmin=plot.low, vmax=plot.high, cmap=COLORS, aspect="auto")
        figure.colorbar(image, ax=ax)
    turned: dict[str, Any] = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"} if widest > cell else {}
    ax.set_xticks(range(len(plot.columns)), plot.columns, **turned)
    ax.set_yticks(range(len(plot.rows)), plot.rows)
    ax.tick_params(length=0)
    ax.set_xlabel(plot.x)
    ax.set_ylabel(plot.y)
    for i, row in enumerate(plot.values):
        for j, value in enumerate(row):
            _square(ax, plot, j, i, value)
    return figure


def _cell_texts(plot: HeatMap) -> list[str]:
    return [format(value, plot.format) for row in plot.values for value in row if value is not None]


def _square(ax: Any, plot: HeatMap, x: int, y: int, value: float | None) -> None:
    """A value in its square, in black or white, whichever can be read."""
    text, color = "–", "#5b636b"
    if value is not None:
        share = (value - plot.low) / ((plot.high - plot.low) or 1.0)
        red, green, blue, _ = colormaps[COLORS](min(max(share, 0.0), 1.0))
        text, color = format(value, plot.format), "black" if 0.3 * red + 0.6 * green + 0.1 * blue > 0.5 else "white"
    ax.text(x, y, text, ha="center", va="center", color=color, fontsize=9)


def _bars(plot: Bars) -> Figure:
    entries = [*plot.series, *plot.levels]
    figure, ax = _beside_legend(min(18.0, max(6.4, 3.6 + 0.3 * len(plot.groups) * len(plot.series))), entries)
    looks = styles(list(plot.series))
    width = 0.8 / max(1, len(plot.series))
    for i, (name, values) in enumerate(plot.series.items()):
        positions = [g - 0.4 + width * (i + 0.5) for g in range(len(values))]
        ax.bar(positions, [0.0 if v is None else v for v in values], width, label=_entry(name), color=looks[name].color)
        for position, value in zip(positions, values, strict=True):
            if value is None:
                ax.text(position, 0.0, "–", ha="center", va="bottom", color=looks[name].color)
    _levels(ax, plot.levels)
    room = max(6, int(0.6 * figure.get_figwidth() / (LETTER * max(1, len(plot.groups)))))  # letters below a group
    ax.set_xticks(range(len(plot.groups)), ["\n".join(_lines_of(group, room)) for group in plot.groups])
    ax.tick_params(axis="x", length=0)
    ax.xaxis.grid(False)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _number(value)))
    ax.set_ylabel(plot.y)
    _legend(figure, ax)
    return figure


def _beside_legend(width: float, entries: Sequence[str]) -> tuple[Figure, Any]:
    """A figure with axes, high enough for a legend of these entries next to them."""
    lines = sum(len(_entry(name).splitlines()) for name in entries)
    figure = Figure(figsize=(width, max(4.6, 0.9 + 0.15 * lines + 0.08 * len(entries))), layout="constrained")
    return figure, figure.subplots()


def _levels(ax: Any, levels: Mapping[str, float]) -> None:
    for i, (name, level) in enumerate(levels.items()):
        label = "\n".join(wrap(f"{name}: {level:.4g}", ENTRY))
        ax.axhline(level, color="#5b636b", linestyle=DASHES[i % len(DASHES)], linewidth=1.3, label=label)


def _entry(name: str) -> str:
    """A name in a legend, in lines of some length."""
    return "\n".join(_lines_of(name, ENTRY))


def _lines_of(name: str, room: int) -> list[str]:
    return [line for piece in broken(name).splitlines() for line in wrap(piece.strip(), room)] or [name]


def _legend(figure: Figure, ax: Any) -> None:
    if ax.get_legend_handles_labels()[0]:
        figure.legend(loc="outside right center")
