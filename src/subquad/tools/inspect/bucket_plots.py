"""The plots of bucket sizes (figures 1 and 6 of Sun, Yang, Yoo 2022)."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from subquad.tools.inspect.reading import hashing
from subquad.tools.inspect.schema import Inspected, InspectReport
from subquad.tools.report import drawing
from subquad.tools.report.cells import share

QUERIES, KEYS = "#0072B2", "#E69F00"
SIDES = (Patch(facecolor=QUERIES, label="queries"), Patch(facecolor=KEYS, label="keys"))
WIDEST = 4  # powers of 2 of a ratio that are drawn; beyond is in the outermost bars


def sizes(report: InspectReport) -> Figure | None:
    """Queries and keys of each bucket, a group of bars for each head of one layer, a panel for each method."""
    layer = str(report.settings["layer"])
    shown = hashing(report, layer)
    if not shown:
        return None
    figure = Figure(figsize=(9.6, 2.1 * len(shown) + 1.3), layout="constrained")
    axes = figure.subplots(len(shown), 1, squeeze=False, sharey=True)[:, 0]
    for ax, method in zip(axes, shown, strict=True):
        expected = _stacked(ax, method, layer)
        line = ax.axhline(expected, label="expected size", **drawing.EXPECTED)
        imbalance_text = _imbalance(method.layers[layer].imbalance)
        ax.set_title(f"{method.method}: {imbalance_text}, of all sequences", fontsize=9, loc="left")
        ax.set_ylabel("tokens")
    axes[-1].set_xlabel("head; its buckets from the largest to the smallest")
    figure.legend(handles=[*SIDES, line], loc="outside lower center", ncols=3)
    what = f"bucket sizes in layer {layer}, first sequence of {report.settings['length']:,} tokens"
    return drawing.titled(figure, report.model["name"], what)


def _stacked(ax: Any, method: Inspected, layer: str) -> float:
    """Draw the first sequence's buckets; returns their expected size."""
    queries, keys = (np.array(getattr(method.layers[layer], side)[0]) for side in ("queries", "keys"))
    heads, buckets = queries.shape
    order = np.argsort(-(queries + keys), axis=1, kind="stable")
    queries, keys = (np.take_along_axis(side, order, 1) for side in (queries, keys))
    step = 0.82 / buckets
    positions = (np.arange(heads)[:, None] + step * (np.arange(buckets) - (buckets - 1) / 2)).flatten()
    ax.bar(positions, queries.flatten(), step * 0.9, color=QUERIES)
    ax.bar(positions, keys.flatten(), step * 0.9, bottom=queries.flatten(), color=KEYS)
    ax.set_xticks(range(heads))
    ax.set_xlim(-0.6, heads - 0.4)
    ax.grid(axis="x", visible=False)
    ax.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    return float((queries + keys).sum() / queries.size)


def histograms(report: InspectReport) -> Figure | None:
    """Sizes, and ratios of queries to keys, of all buckets of all layers and sequences: a row for each method."""
    shown = hashing(report)
    if not shown:
        return None
    figure = Figure(figsize=(9.6, 2.1 * len(shown) + 1.1), layout="constrained")
    axes = figure.subplots(len(shown), 2, squeeze=False, sharex="col")
    largest = max((np.sum(_tokens(method), 0)).max() for method in shown)
    for row, method in zip(axes, shown, strict=True):
        queries, keys = _tokens(method)
        total = queries + keys
        row[0].hist(total, bins=np.linspace(0, largest, 41), color="#5b8fb9")
        row[0].axvline(total.mean(), **drawing.EXPECTED)
        both = (queries > 0) & (keys > 0)
        powers = np.log2(queries[both] / keys[both]).clip(-WIDEST, WIDEST)
        row[1].hist(powers, bins=np.linspace(-WIDEST, WIDEST, 41), color="#5b8fb9")
        row[1].axvline(0, **drawing.EXPECTED)
        row[0].set_ylabel("buckets")
        row[0].xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: f"{tokens:,.0f}"))
        row[0].set_title(method.method, fontsize=9, loc="left")
        row[1].set_title(_imbalance(method.imbalance), fontsize=9, loc="left")
    axes[-1, 0].set_xlabel("size of a bucket: queries and keys")
    axes[-1, 1].set_xlabel("queries / keys of a bucket that has both")
    axes[-1, 1].xaxis.set_major_locator(FixedLocator(range(-WIDEST, WIDEST + 1)))
    axes[-1, 1].xaxis.set_major_formatter(FuncFormatter(lambda power, _: _ratio(round(power))))
    figure.legend(handles=[axes[0, 0].lines[0]], labels=["balanced"], loc="outside lower center")
    return drawing.titled(figure, report.model["name"], "buckets of all heads in all layers")


def _tokens(method: Inspected) -> tuple[Any, Any]:
    """Queries and keys of all buckets."""
    layers = [layer for layer in method.layers.values() if layer.queries]
    queries, keys = (
        np.array([n for layer in layers for sequence in getattr(layer, side) for head in sequence for n in head])
        for side in ("queries", "keys")
    )
    return queries, keys


def _ratio(power: int) -> str:
    edge = {-WIDEST: "≤", WIDEST: "≥"}.get(power, "")
    return edge + (f"1/{2**-power}" if power < 0 else str(2**power))


def _imbalance(imbalance: Any) -> str:
    return f"{share(imbalance.size).text} unbalanced in size, {share(imbalance.ratio).text} in ratio"
