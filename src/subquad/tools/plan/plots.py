"""A plan's plots, as PNGs and for the page."""

from collections.abc import Callable
from typing import Any

from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch, Rectangle

from subquad.methods.full import EXACT
from subquad.tools.plan.schema import PlannedLayer, PlannedLength, PlanReport
from subquad.tools.plan.tables import PLOTS, title
from subquad.tools.report import cells, drawing, vector


def plots(report: PlanReport) -> dict[str, bytes]:
    """PNGs by name; a plot without figures to draw is left out."""
    titles = (f"what runs where, {report.settings['floor_text']}", "what other floors would give")
    return drawing.pngs(MAKERS, report, title(report).partition(":")[0], dict(zip(PLOTS, titles, strict=True)))


def drawings(report: PlanReport) -> dict[str, vector.Drawing]:
    """Drawings of the plots for the page, without a title, by name."""
    return vector.drawings(MAKERS, report)


def layers_figure(report: PlanReport, narrow: bool = False) -> Figure | None:
    """A square for each layer and length, in its method's colour, with its share of exact attention's time.

    Layers are columns; narrow, they are rows, and the legend is below.
    """
    numbers = list(dict.fromkeys(number for p in report.lengths for number in p.layers))
    used = list(dict.fromkeys(layer.method for p in report.lengths for layer in p.layers.values()))
    methods = [name for name in used if name != EXACT]
    if not numbers:
        return None
    looks = drawing.styles([EXACT, *methods])
    lines = sum(drawing.broken(name).count("\n") + 1 for name in methods)
    landscape = (2.4 + 0.75 * len(numbers) + 3.2, 1.6 + 0.62 * len(report.lengths) + 0.12 * len(methods))
    size = (drawing.NARROW, 1.2 + 0.32 * len(numbers) + 0.17 * lines) if narrow else landscape
    figure = Figure(figsize=size, layout=ConstrainedLayoutEngine())
    ax = figure.subplots()
    for i, planned in enumerate(report.lengths):
        for j, number in enumerate(numbers):
            layer = planned.layers.get(number)
            color = "" if layer is None or layer.method == EXACT else looks[layer.method].color
            text = f"layer {number}, {planned.length:,} tokens"
            _square(ax, (i, j) if narrow else (j, i), layer, color, text)
    _square_axes(ax, numbers, [f"{p.length:,}" for p in report.lengths], narrow)
    handles = [Patch(facecolor=looks[name].color, label=drawing.broken(name)) for name in methods]
    handles.append(Patch(facecolor=drawing.PAPER, edgecolor="#7a828a", label="exact attention"))
    if narrow:
        figure.legend(handles=handles, loc="outside lower left")
    else:
        ax.legend(handles=handles, loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


def _square(ax: Any, corner: tuple[int, int], layer: PlannedLayer | None, color: str, where: str) -> None:
    """One layer at one length; without a colour it is exact attention."""
    patch = Rectangle(corner, 1, 1, facecolor=color or drawing.PAPER, edgecolor="#7a828a", linewidth=0.8)
    ax.add_patch(patch)
    if layer is None:
        return
    share = cells.share(layer.time).text
    label = f"{layer.method}\n{where}: {share} of exact attention's time, loss {layer.loss:.4f}"
    vector.named(patch, [label if color else f"exact attention\n{where}"])
    text, ink = (f"{100 * layer.time:.0f} %", drawing.ON_COLOR) if color else ("exact", "#59636e")
    ax.text(corner[0] + 0.5, corner[1] + 0.5, text, ha="center", va="center", color=ink, fontsize=8.5)


def _square_axes(ax: Any, layers: list[str], lengths: list[str], narrow: bool) -> None:
    """Layers along one axis and lengths along the other, the first of both at the top left."""
    across, down = (lengths, layers) if narrow else (layers, lengths)
    ax.set_xlim(0, len(across))
    ax.set_ylim(len(down), 0)
    ax.set_xticks([i + 0.5 for i in range(len(across))], across)
    ax.set_yticks([i + 0.5 for i in range(len(down))], down)
    ax.set_xlabel("tokens" if narrow else "layer")
    ax.set_ylabel("layer" if narrow else "tokens")
    ax.grid(False)
    ax.tick_params(length=0)


def front_figure(report: PlanReport, narrow: bool = False) -> Figure | None:
    """Speed-up against the loss that is accepted, a panel for each length. Narrow: one below the other."""
    able = [planned for planned in report.lengths if planned.floors]
    if not able:
        return None
    size = (drawing.NARROW, 2.8 * len(able)) if narrow else (4.2 * len(able) + 0.6, 3.8)
    figure = Figure(figsize=size, layout=ConstrainedLayoutEngine())
    rows, columns = (len(able), 1) if narrow else (1, len(able))
    axes: Any = figure.subplots(rows, columns, squeeze=False, sharey=True).flatten()
    for ax, planned in zip(axes, able, strict=True):
        accepted = _floors(ax, planned)
        ax.axhline(1.0, color="#222222", linewidth=0.9)
        ax.set_xscale("log")
        drawing.ticks_at(ax.xaxis, sorted(accepted), lambda x: f"{1 - x:.4g}")
        ax.invert_xaxis()
        ax.set_xlabel("fidelity")
        ax.set_title(f"{planned.length:,} tokens", fontsize=10)
    for ax in axes[::columns]:
        ax.set_ylabel("speed-up of the whole model")
    axes[0].legend(loc="best")
    return figure


def _floors(ax: Any, planned: PlannedLength) -> list[float]:
    """Draw what floors would give, and the plan; return the losses that the floors accept."""
    floors = [f for f in planned.floors if f.floor < 1]  # a loss of 0 has no place on a logarithmic axis
    accepted = [1 - f.floor for f in floors]
    of_plan, of_best = ([getattr(f, key) for f in floors] for key in ("speedup", "uniform_speedup"))
    for what, speedups, color, marker in (
        ("plan", of_plan, "#0b6b50", "o"),
        ("best single method", of_best, "#8C564B", "s"),
    ):
        label = f"{what} (predicted)"
        (line,) = ax.plot(accepted, speedups, color=color, marker=marker, label=label, linewidth=1.7)
        points = zip(accepted, speedups, strict=True)
        vector.named(line, [f"{what}\nfidelity {1 - x:.4g}: {y:.2f}×, predicted" for x, y in points])
    if planned.verified is not None:
        loss, speedup = planned.verified.loss, planned.verified.speedup
        (star,) = ax.plot(loss, speedup, "*", color="#D55E00", markersize=13, label="the plan, verified")
        vector.named(star, [f"the plan, verified\nfidelity {1 - loss:.4f}: {speedup:.2f}×"])
    return accepted


MAKERS: dict[str, Callable[..., Figure | None]] = dict(zip(PLOTS, (layers_figure, front_figure), strict=True))
