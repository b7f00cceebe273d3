"""A benchmark's plots, as PNGs: a panel for each dtype and passes, a line for each method."""

from collections.abc import Callable
from functools import partial
from typing import Any

from matplotlib.figure import Figure

from subquad.methods.full import EXACT
from subquad.tools.bench.crossovers import Panel, by_length, names, panels
from subquad.tools.bench.schema import BenchReport
from subquad.tools.report import cells, drawing
from subquad.tools.report.drawing import Style

# file name -> (figure of a cell, suffix of its quartiles, title, label of the axis)
PLOTS = {
    "time-per-token.png": ("us_per_token", "time per token against length", "µs per token"),
    "memory-per-token.png": ("bytes_per_token", "peak extra memory per token against length", "bytes per token"),
    "speedup.png": ("speedup", "speed-up over SDPA against length", "SDPA's time / the method's"),
}


def plots(report: BenchReport) -> dict[str, bytes]:
    """PNGs by name; a plot without figures to draw is left out."""
    return drawing.pngs({name: partial(figure, name=name) for name in PLOTS}, report)


def figure(report: BenchReport, name: str) -> Figure | None:
    """One of PLOTS; None where there is nothing to draw. Bands are quartiles; rings on speed-ups are crossovers,
    and the grey band at 1 is how far SDPA differs from itself.
    """
    what, heading, label = PLOTS[name]
    shown = [panel for panel in panels(report.cells) if _lines(report, panel, what)]
    if not shown:
        return None
    dtypes, passes = (list(dict.fromkeys(panel[i] for panel in shown)) for i in (0, 1))
    drawn = Figure(figsize=(max(4.6 * len(passes), 6.4), 3.9 * len(dtypes) + 1.2), layout="constrained")
    axes = drawn.subplots(len(dtypes), len(passes), squeeze=False, sharey=True)
    looks = drawing.styles(names(report.cells))
    for row, dtype in zip(axes, dtypes, strict=True):
        for ax, which in zip(row, passes, strict=True):
            if (dtype, which) in shown:
                _panel(ax, report, (dtype, which), what, looks)
                ax.set_title(f"{which}, {dtype}", fontsize=10.5)
            else:
                ax.set_visible(False)
        row[0].set_ylabel(label)
    handles = {line.get_label(): line for ax in axes.flat for line in ax.lines if not line.get_label().startswith("_")}
    entry = 0.7 + 0.08 * max(map(len, handles))  # inches of the widest: a handle and its letters
    columns = max(1, min(4, len(handles), int(drawn.get_figwidth() / entry)))
    drawn.legend(handles=list(handles.values()), loc="outside lower center", ncols=columns)
    s = report.settings
    threads = f"{s['threads']} thread{'' if s['threads'] == 1 else 's'}"
    shape = f"batch {s['batch']}, {s['heads']} heads of {s['head_dim']}, {s['device']}, {threads}"
    shape = f"causal, {shape}" if s["causal"] else shape
    drawn.suptitle(f"{heading}\n{shape}", x=0.01, ha="left", fontsize=11.5, fontweight="bold")
    return drawn


def _lines(report: BenchReport, panel: Panel, what: str) -> dict[str, dict[int, float]]:
    """Figures by length of the methods that have some."""
    lines = {name: by_length(report.cells, panel, name, what) for name in names(report.cells)}
    return {name: values for name, values in lines.items() if values and not (what == "speedup" and name == EXACT)}


def _panel(ax: Any, report: BenchReport, panel: Panel, what: str, looks: dict[str, Style]) -> None:
    for name, values in _lines(report, panel, what).items():
        exact = drawing.EXACT_LINE if name == EXACT else {}
        label = f"{EXACT} (SDPA)" if name == EXACT else name
        ax.plot(list(values), list(values.values()), label=label, **looks[name].line | exact)
        low, high = (_edge(report, panel, name, what, side) for side in ("low", "high"))
        both = sorted(low.keys() & high.keys() & values.keys())
        if both:
            edges = [low[n] for n in both], [high[n] for n in both]
            ax.fill_between(both, *edges, color=looks[name].color, alpha=0.18, linewidth=0)
    drawing.log_lengths(ax)
    if what == "speedup":
        ax.axhline(1.0, **drawing.GUIDE)
        _shade_noise(ax, by_length(report.cells, panel, EXACT, "noise"))
        _mark_crossovers(ax, report, panel, looks)
    unit: Callable[[float], str] = (lambda y: f"{y:g}×") if what == "speedup" else (lambda y: f"{y:,g}")
    drawing.ticks(ax.yaxis, ax.get_ylim(), unit)


def _edge(report: BenchReport, panel: Panel, name: str, what: str, side: str) -> dict[int, float]:
    """A quartile of a figure, by length."""
    if what == "us_per_token":
        tokens = report.settings["batch"]
        times = by_length(report.cells, panel, name, f"ms_{side}")
        return {length: 1e3 * ms / (tokens * length) for length, ms in times.items()}
    return by_length(report.cells, panel, name, f"{what}_{side}")


def _shade_noise(ax: Any, noise: dict[int, float]) -> None:
    """A grey band: how far SDPA differs from itself."""
    if noise:
        low, high = [1 / factor for factor in noise.values()], list(noise.values())
        ax.fill_between(list(noise), low, high, color="#9aa2aa", alpha=0.3, linewidth=0, zorder=1)


def _mark_crossovers(ax: Any, report: BenchReport, panel: Panel, looks: dict[str, Style]) -> None:
    for crossover in report.crossovers:
        at = cells.known(crossover.tokens) if crossover.state == "at" else None
        if (crossover.dtype, crossover.passes) == panel and at is not None:
            drawing.ring(ax, at, 1.0, looks[crossover.method].color)
