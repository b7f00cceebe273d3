"""The plot of attention maps (figure 8 of Vyas, Katharopoulos, Fleuret 2020)."""

import math
from typing import Any

from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from subquad.tools.inspect.schema import InspectReport, Maps
from subquad.tools.report import drawing


def attention_maps(report: InspectReport) -> Figure | None:
    """A panel for each method, on one scale; tokens on both axes."""
    maps = report.maps
    names = list(maps.weights)
    if not names:
        return None
    tokens = len(maps.tokens)
    columns = _columns(len(names)) if tokens <= 48 else min(len(names), 2)
    rows = math.ceil(len(names) / columns)
    side = max(2.6, 0.098 * tokens)  # inches: room for a token's name in each row
    figure = Figure(figsize=(columns * (side + 0.35) + 1.9, rows * (side + 0.45) + 1.3), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    largest = max(weight for weights in maps.weights.values() for row in weights for weight in row)
    scale = PowerNorm(0.5, 0.0, max(largest, 1e-6))
    for i, ax in enumerate(axes.flat):
        if i >= len(names):
            ax.set_visible(False)
            continue
        image = _map(ax, maps, names[i], scale, left=i % columns == 0, bottom=i + columns >= len(names))
    bar = figure.colorbar(image, ax=axes, shrink=0.7 / rows, aspect=18, pad=0.015)
    bar.set_label("attention weight (colours by its square root)", fontsize=8.5)
    bar.ax.tick_params(labelsize=8)
    shown = f"layer {maps.layer}, head {maps.head}, first {tokens} of {report.settings['length']:,} tokens"
    return drawing.titled(figure, report.model["name"], f"attention from rows to columns; {shown}")


def _columns(panels: int) -> int:
    """3 in a row, or 4 where that leaves fewer places empty."""
    return min(panels, 3 if -panels % 3 <= -panels % 4 else 4)


def _map(ax: Any, maps: Maps, name: str, scale: PowerNorm, *, left: bool, bottom: bool) -> Any:
    weights, tokens = maps.weights[name], [_short(token) for token in maps.tokens]
    image = drawing.heat_map(ax, weights, cmap="Blues", norm=scale)
    inside = sum(map(sum, weights)) / len(weights)
    ax.set_title(f"{name}\n{100 * inside:.0f} % of the weight is on these keys", fontsize=8.5, loc="left")
    ax.tick_params(pad=1.5)
    size = 6.0 if len(tokens) <= 48 else 5.0
    positions = range(len(tokens))
    ax.set_yticks(positions if left else [], tokens if left else [], fontsize=size)
    ax.set_xticks(positions if bottom else [], tokens if bottom else [], fontsize=size, rotation=90)
    return image


def _short(token: str) -> str:
    return token if len(token) <= 12 else f"{token[:11]}…"
