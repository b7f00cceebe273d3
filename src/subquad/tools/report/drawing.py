"""Shared code of all plots: the look of methods, axes, PNGs. matplotlib's global state is left as it was."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from textwrap import wrap
from typing import Any, TypeVar

import numpy as np
from matplotlib import style
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, Colormap, to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from subquad.methods.core.names import name_of
from subquad.methods.full import EXACT
from subquad.tools.report.content import pieces

R = TypeVar("R")
Marker = str | tuple[int, int, int]  # as matplotlib names them: a letter, or (points, 1, turn) of a star

# Okabe and Ito's palette, which most colour-blind readers can tell apart
FAMILIES = {
    "full": "#222222",
    "clustered": "#0072B2",
    "i-clustered": "#D55E00",
    "oracle-top": "#009E73",
    "shared-full": "#CC79A7",
}
OTHERS = (
    "#56B4E9", "#B8860B", "#7A5195", "#8C564B", "#44AA99", "#882255", "#8A8A1F", "#332288", "#E3779A", "#5F6F7A",
)  # fmt: skip
MARKERS: tuple[Marker, ...] = (*"osD^vPX<>hp8dH", (4, 1, 0), (6, 1, 0), (3, 1, 0), (8, 1, 0), (4, 1, 45), (3, 1, 180))
LOOK = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e7ea",
    "axes.axisbelow": True,
    "axes.edgecolor": "#7a828a",
    "legend.frameon": False,
    "legend.fontsize": 9,
    "text.parse_math": False,  # a "$" in a model's name is not a formula
}
DPI = 160
NARROW = 4.0  # inches: the width of a figure where there is little room
PAPER = "#ffffff"  # behind a figure
GUIDE: dict[str, Any] = {"color": "#5b636b", "linewidth": 1.2, "linestyle": (0, (4, 3))}  # of a line to compare with
EXPECTED = GUIDE | {"color": "#c1272d", "linewidth": 1.3}
EXACT_LINE = {"linewidth": 2.8, "zorder": 3}  # of exact attention, besides its style
ON_COLOR = "#fefefe"  # of letters on a method's colour; not PAPER, because a page gives each its own dark colour


@dataclass(frozen=True)
class Style:
    """The look of a method in every plot."""

    color: str
    marker: Marker

    @property
    def scale(self) -> float:
        """The scale of the marker, larger for a star, which looks small."""
        return 1.8 if self.marker == "*" else 1.0

    @property
    def line(self) -> dict[str, Any]:
        """The keywords of `matplotlib.axes.Axes.plot` for this style."""
        return {"color": self.color, "marker": self.marker, "markersize": 5.5 * self.scale, "linewidth": 1.7}


@contextmanager
def look() -> Iterator[None]:
    """Figures made and saved inside the block have the look of our plots."""
    with style.context(["default", LOOK]):
        yield


def styles(names: Sequence[str]) -> dict[str, Style]:
    """A colour for each family of methods, a shade for each of its settings; every method has its own marker."""
    members: dict[str, list[str]] = {}
    for name in names:
        members.setdefault(name_of(name), []).append(name)
    strangers = [family for family in members if family not in FAMILIES]
    bases = FAMILIES | {family: OTHERS[i % len(OTHERS)] for i, family in enumerate(strangers)}
    order = [name for name in names if name != EXACT]
    looks = {
        name: Style(_shade(bases[family], i, len(alike)), MARKERS[order.index(name) % len(MARKERS)])
        for family, alike in members.items()
        for i, name in enumerate(alike)
        if name != EXACT
    }
    return {EXACT: Style(FAMILIES[EXACT], "*")} | looks


def log_lengths(ax: Any) -> None:
    """Both axes logarithmic, with ticks at the lengths that lines have, as many as there is room for."""
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    lengths = sorted({float(x) for line in ax.lines for x in line.get_xdata() if len(line.get_xdata()) > 1})
    ticks_at(ax.xaxis, lengths, lambda x: f"{x:,.0f}")
    ax.set_xlabel("tokens")


def ticks_at(axis: Any, positions: Sequence[float], text: Callable[[float], str]) -> None:
    """Ticks of a logarithmic axis at these places, in order, as many as there is room for, written out."""
    if positions:
        axis.set_major_locator(FixedLocator(_apart(positions, positions[-1] / positions[0])))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))


def _apart(positions: Sequence[float], span: float) -> list[float]:
    """The places that are at least a tenth of the axis apart, chosen from the largest down; `span` is a factor."""
    least = span**0.1
    kept = [positions[-1]]
    for position in reversed(positions[:-1]):
        if kept[-1] / position >= least * (1 - 1e-9):
            kept.append(position)
    return kept[::-1]


def ticks(axis: Any, limits: tuple[float, float], text: Callable[[float], str]) -> None:
    """Ticks at round numbers, as many as there is room for, written out; at the limits where there is none between."""
    low, high = limits
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    tenths, halves = [i / 10 for i in range(10, 100)], [i / 2 for i in range(2, 20)]
    for steps in (tenths, halves, range(1, 10), (1, 2, 5), (1, 3), (1,)):  # the finest for which there is room
        positions = [step * 10.0**decade for decade in decades for step in steps if low <= step * 10.0**decade <= high]
        if len(positions) <= 7:
            break
    if not positions:  # values that hardly differ: no number of two digits lies between the limits
        low, high = sorted((float(f"{low:.4g}"), float(f"{high:.4g}")))
        positions = sorted({low, high})
    several = positions[:: math.ceil(len(positions) / 7)]  # of many decades, some
    axis.set_major_locator(FixedLocator(_apart(several, high / low)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(float(f"{value:.6g}"))))


def _shade(base: str, i: int, count: int) -> str:
    """The i-th of some shades of a colour, from light to dark."""
    shade_at = 0.0 if count == 1 else 2 * i / (count - 1) - 1
    towards, share = (1.0, -0.45 * shade_at) if shade_at < 0 else (0.0, 0.5 * shade_at)
    return str(to_hex([channel + (towards - channel) * share for channel in to_rgb(base)]))


def broken(name: str) -> str:
    """A method's name in several lines: cut after the colon and the commas, before "@" and before a bracket."""
    return "\n".join(pieces(name.replace(" (", "\n(").replace("@", "\n@")))


def titled(figure: Figure, model: str, what: str) -> Figure:
    """The model, without the folder or organisation that it lies in, and what is shown: at the top left.

    In as many lines as it takes to stay inside the figure.
    """
    name = model.rstrip("/").rpartition("/")[2]
    name = name if len(name) <= 50 else f"{name[:49]}…"
    text = f"{name}: {what}"
    title = figure.suptitle(text, x=0.01, ha="left", fontsize=11.5, fontweight="bold")
    renderer, room = FigureCanvasAgg(figure).get_renderer(), 0.96 * figure.bbox.width
    lines = 1
    while title.get_window_extent(renderer).width > room and lines < len(text):
        lines += 1
        title.set_text("\n".join(wrap(text, math.ceil(len(text) / lines) + 6)))  # some more: words are not cut
    return figure


def beside_legend(entries: int, height: float, narrow: bool) -> tuple[Figure, Any]:
    """A figure of this height in inches with its axes, for a legend on the right; narrow, below them."""
    size = (NARROW, 3.2 + 0.2 * entries) if narrow else (9.6, height)
    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots()


def add_legend(figure: Figure, narrow: bool) -> None:
    """The legend of `beside_legend`."""
    figure.legend(loc="outside lower left" if narrow else "outside right upper")


def ring(ax: Any, x: float, y: float, color: str) -> None:
    """A ring around a place where two lines cross."""
    look = {"markersize": 12, "markerfacecolor": "none", "markeredgewidth": 1.8, "linestyle": "", "zorder": 5}
    ax.plot(x, y, marker="o", color=color, **look)


def heat_map(ax: Any, values: Any, **look: Any) -> Any:
    """Draw values by row and column as squares without lines around them; returns the image."""
    ax.grid(visible=False)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    return ax.imshow(values, interpolation="nearest", aspect="auto", **look)


def layer_bar(figure: Figure, axes: Any, colors: Colormap, layers: Sequence[str], **look: Any) -> Any:
    """Draw the bar that shows each layer's colour; returns its axes."""
    norm = BoundaryNorm(np.arange(len(layers) + 1) - 0.5, len(layers))
    bar = figure.colorbar(ScalarMappable(norm, colors), ax=axes, pad=0.015, **look)
    few = range(0, len(layers), max(1, math.ceil(len(layers) / 12)))
    bar.set_ticks(list(few), labels=[layers[i] for i in few])
    bar.ax.minorticks_off()
    bar.set_label("layer")
    return bar.ax


def pngs(
    makers: Mapping[str, Callable[[R], Figure | None]], report: R, model: str = "", titles: Mapping[str, str] = {}
) -> dict[str, bytes]:
    """PNGs by name, those of `titles` with the model and a title; a plot without figures to draw is left out."""
    with look():
        drawn = {name: figure for name, make in makers.items() if (figure := make(report)) is not None}
        for name in drawn.keys() & titles.keys():
            titled(drawn[name], model, titles[name])
        return {name: png(figure) for name, figure in drawn.items()}


def png(figure: Figure) -> bytes:
    """The figure as a PNG. A letter that the font does not have is drawn as a box, without a warning."""
    buffer = BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")
        figure.savefig(buffer, format="png", dpi=DPI, facecolor="white")
    return buffer.getvalue()
