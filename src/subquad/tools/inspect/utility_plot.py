"""The plot of attention utilities (figure 2 of Sun, Yang, Yoo 2022)."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from subquad.tools.inspect.reading import bounds, choices, widens
from subquad.tools.inspect.schema import InspectReport, Variant
from subquad.tools.report import drawing

BOUND, RANDOM = "#5b636b", "#9aa2aa"
WIDTH = 0.34  # of a box; methods are 1 apart


def utility(report: InspectReport) -> Figure | None:
    """A box of the layers for each method, with N/B keys and as given, next to the bound and random buckets."""
    shown = [method for method in report.methods if choices(method, "n_b")]
    if not shown:
        return None
    s = report.settings
    looks = drawing.styles([method.method for method in shown])
    figure = Figure(figsize=(max(6.4, 1.5 * len(shown) + 3.2), 4.6), layout="constrained")
    ax = figure.subplots()
    for position, method in enumerate(shown):
        color, two = looks[method.method].color, widens(method)
        shifts: dict[Variant, float] = {"n_b": -WIDTH / 1.8, "given": WIDTH / 1.8} if two else {"n_b": 0.0}
        for variant, shift in shifts.items():
            shares = list(choices(method, variant).values())
            _box(ax, position + shift, [one.utility for one in shares], color, solid=variant == "n_b")
            keys = sum(one.keys for one in shares) / len(shares)
            _below(ax, position + shift, min(one.utility for one in shares), f"{keys:,.0f}")
    best = list(bounds(report).values())
    _box(ax, float(len(shown)), best, BOUND, solid=True)
    _below(ax, float(len(shown)), min(best), f"{s['keys']:,}")
    ax.axhline(1 / s["buckets"], **drawing.EXPECTED | {"color": RANDOM})
    ax.set_xticks(range(len(shown) + 1), [*(drawing.broken(m.method) for m in shown), "upper\nbound"], fontsize=8.5)
    ax.set(xlim=(-0.6, len(shown) + 0.6), ylim=(0, 1.02), ylabel="attention utility")
    ax.grid(axis="x", visible=False)
    handles: list[Any] = [
        Patch(facecolor="#8a929a", label="buckets of N/B, one round"),
        Patch(facecolor="#8a929a44", edgecolor="#8a929a", label="as given"),
        ax.lines[-1],
    ]
    handles[-1].set_label(f"random buckets: 1/{s['buckets']}")
    handles = handles if any(map(widens, shown)) else handles[::2]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    layers = f"{len(best)} layer{'' if len(best) == 1 else 's'}"
    what = f"attention utility, {layers}; below each box, keys per query"
    return drawing.titled(figure, report.model["name"], what)


def _box(ax: Any, position: float, values: Sequence[float], color: str, *, solid: bool) -> None:
    """A box of the quartiles and a point for each value."""
    props = {
        "boxprops": {"facecolor": f"{color}{'cc' if solid else '44'}", "edgecolor": color},
        "medianprops": {"color": "#222222", "linewidth": 1.4},
        "whiskerprops": {"color": color},
        "capprops": {"color": color},
    }
    ax.boxplot([values], positions=[position], widths=WIDTH, showfliers=False, patch_artist=True, **props)
    shifts = [WIDTH * 0.22 * (i % 3 - 1) for i in range(len(values))]
    at = [position + shift for shift in shifts]
    ax.plot(at, values, linestyle="", marker="o", markersize=3.2, color="#222222", alpha=0.75, zorder=4)


def _below(ax: Any, position: float, lowest: float, text: str) -> None:
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.8}
    ax.annotate(
        text, (position, lowest), (0, -6), textcoords="offset points", ha="center", va="top", fontsize=8, bbox=box
    )
