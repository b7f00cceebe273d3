"""Draw what an experiment shows."""

from collections.abc import Callable
from typing import Any, TypeVar

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from subquad.report.drawing import OTHERS, broken, look, png, styles, titled
from subquad.report.experiment import Bars, HeatMap, Lines, Plot, Results

Kind = TypeVar("Kind", Lines, HeatMap, Bars)


def plots(name: str, results: Results) -> dict[str, bytes]:
    """A PNG for each plot, by its file's name."""
    drawn = {}
    with look():
        for plot in results.plots:
            figure = _draw(plot)
            titled(figure, name, plot.title)
            FigureCanvasAgg(figure)
            drawn[f"{plot.file}.png"] = png(figure)
    return drawn


def _draw(plot: Plot) -> Figure:
    makers: dict[type[Any], Callable[[Any], Figure]] = {Lines: _lines, HeatMap: _heat_map, Bars: _bars}
    return makers[type(plot)](plot)


def _lines(plot: Lines) -> Figure:
    figure = Figure(figsize=(8.6, 4.6), layout="constrained")
    ax = figure.subplots()
    looks = styles(list(plot.series))
    for name, points in plot.series.items():
        if not points:
            continue
        xs, ys = zip(*points, strict=True)
        style = looks[name].line | ({} if plot.joined else {"linestyle": "none"})
        if len(points) > 40:
            style |= {"marker": ""}
        ax.plot(xs, ys, label=broken(name), **style)
        for (x, y), text in zip(points, plot.labels.get(name, ()), strict=False):
            ax.annotate(text, (x, y), textcoords="offset points", xytext=(5, 4), fontsize=8, color=looks[name].color)
        if name in plot.bands:
            low, high = zip(*plot.bands[name], strict=True)
            ax.fill_between(xs, low, high, color=looks[name].color, alpha=0.15, linewidth=0)
    _levels(ax, plot.levels)
    if plot.log_x:
        ax.set_xscale("log")
    if plot.log_y:
        ax.set_yscale("log")
    ax.set_xlabel(plot.x)
    ax.set_ylabel(plot.y)
    _legend(figure, ax)
    return figure


def _heat_map(plot: HeatMap) -> Figure:
    figure = Figure(figsize=(2.6 + 0.75 * len(plot.columns), 1.6 + 0.5 * len(plot.rows)), layout="constrained")
    ax = figure.subplots()
    ax.grid(False)
    values = [[float("nan") if v is None else v for v in row] for row in plot.values]
    image = ax.imshow(values, vmin=plot.low, vmax=plot.high, cmap="viridis", aspect="auto")
    ax.set_xticks(range(len(plot.columns)), plot.columns)
    ax.set_yticks(range(len(plot.rows)), plot.rows)
    ax.set_xlabel(plot.x)
    ax.set_ylabel(plot.y)
    middle = (plot.low + plot.high) / 2
    for i, row in enumerate(plot.values):
        for j, value in enumerate(row):
            if value is not None:
                color = "black" if value > middle else "white"
                ax.text(j, i, format(value, plot.format), ha="center", va="center", color=color, fontsize=9)
    figure.colorbar(image, ax=ax)
    return figure


def _bars(plot: Bars) -> Figure:
    figure = Figure(figsize=(max(6.4, 1.2 + 0.4 * len(plot.groups) * len(plot.series)), 4.6), layout="constrained")
    ax = figure.subplots()
    looks = styles(list(plot.series))
    width = 0.8 / max(1, len(plot.series))
    for i, (name, values) in enumerate(plot.series.items()):
        places = [g - 0.4 + width * (i + 0.5) for g, v in enumerate(values) if v is not None]
        heights = [v for v in values if v is not None]
        ax.bar(places, heights, width, label=broken(name), color=looks[name].color)
    _levels(ax, plot.levels)
    ax.set_xticks(range(len(plot.groups)), [broken(group) for group in plot.groups])
    ax.set_ylabel(plot.y)
    _legend(figure, ax)
    return figure


def _levels(ax: Any, levels: Any) -> None:
    for i, (name, level) in enumerate(levels.items()):
        ax.axhline(level, color=OTHERS[i % len(OTHERS)], linestyle="--", linewidth=1.2, label=f"{name}: {level:g}")


def _legend(figure: Figure, ax: Any) -> None:
    if ax.get_legend_handles_labels()[0]:
        figure.legend(loc="outside right center")
