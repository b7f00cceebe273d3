"""The plot of the spectrum of attention weights (figure 1 of Wang, Li, Khabsa, Fang, Ma 2020)."""

from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator

from subquad.tools.inspect.schema import InspectReport, Spectrum
from subquad.tools.report import drawing

NAMED = 8  # layers that a legend names one by one; more have a colour bar


def spectrum(report: InspectReport) -> Figure | None:
    """Left Y(j), a thin line a head and the median of each layer; right Y at one j, layers × heads."""
    measured = report.spectrum
    if measured is None:
        return None
    layers, heads = len(measured.layers), max(len(layer.curves) for layer in measured.layers.values())
    cell = max(0.26, min(0.5, 4.5 / heads))  # inches of a square of the heat map
    width = max(3.4, cell * heads + 1.6)
    height = max(4.4, 0.3 * layers + 1.5)
    figure = Figure(figsize=(6.2 + width, height), layout=ConstrainedLayoutEngine(wspace=0.04))
    curves, heat = figure.subplots(1, 2, width_ratios=(6.2, width))
    _curves(figure, curves, measured)
    _heat_map(figure, heat, measured, cell)
    s = report.settings
    shown = f"spectrum of attention, {s['sequences']} × {s['length']:,} tokens"
    return drawing.titled(figure, report.model["name"], shown)


def _curves(figure: Figure, ax: Any, measured: Spectrum) -> None:
    at, numbers = measured.at, list(measured.layers)
    few = len(numbers) <= NAMED
    colors = colormaps["viridis"](np.linspace(0.0, 0.9, len(numbers)))
    for color, (number, layer) in zip(colors, measured.layers.items(), strict=True):
        for curve in layer.curves:
            ax.plot(at, curve, color=color, linewidth=0.6, alpha=0.35 if few else 0.12, zorder=2)
        median, thick = np.median(layer.curves, 0), 2.2 if few else 1.5
        ax.plot(at, median, color=color, linewidth=thick, zorder=4, label=f"layer {number}")
    ax.plot((0, at[-1]), (0, 1), zorder=3, label="all equal", **drawing.GUIDE)
    ax.axvline(measured.index, color="#5b636b", linewidth=1.0, linestyle=":", zorder=1)
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.8}
    foot = (measured.index, 0.02)
    ax.annotate(f"j = {measured.index}", foot, (5, 0), textcoords="offset points", fontsize=8.5, bbox=box)
    ax.set(xlim=(0, at[-1]), xlabel="j, the largest singular values that are counted")
    ax.set(ylim=(0, 1.02), ylabel="Y(j), their share in the sum of all")
    ax.set_title("thin: heads; thick: the median of a layer's heads", fontsize=9.5, loc="left")
    if few:
        ax.legend(loc="lower right")
        return
    drawing.layer_bar(figure, ax, ListedColormap(colors), numbers)


def _heat_map(figure: Figure, ax: Any, measured: Spectrum, cell: float) -> None:
    numbers, column = list(measured.layers), measured.at.index(measured.index)
    shares = np.full((len(numbers), max(len(layer.curves) for layer in measured.layers.values())), np.nan)
    for row, layer in zip(shares, measured.layers.values(), strict=True):
        row[: len(layer.curves)] = [curve[column] for curve in layer.curves]
    low = min(0.9, np.floor(10 * np.nanmin(shares)) / 10)
    image = drawing.heat_map(ax, shares, cmap="Blues", vmin=low, vmax=1.0)
    if cell >= 0.34 and len(numbers) <= 16:  # room for figures
        middle = (low + 1) / 2
        for (y, x), share in np.ndenumerate(shares):
            if np.isfinite(share):
                color = "white" if share > middle else "#222222"
                ax.text(x, y, f"{share:.2f}".removeprefix("0"), ha="center", va="center", fontsize=7.5, color=color)
    ax.xaxis.set_major_locator(FixedLocator(range(0, shares.shape[1], 1 + shares.shape[1] // 17)))
    ax.yaxis.set_major_locator(FixedLocator(range(0, len(numbers), 1 + len(numbers) // 25)))
    ax.set_yticklabels(numbers[:: 1 + len(numbers) // 25])
    ax.set(xlabel="head", ylabel="layer")
    ax.set_title(f"Y({measured.index}) of each head", fontsize=9.5, loc="left")
    figure.colorbar(image, ax=ax, pad=0.02).ax.tick_params(labelsize=8)
