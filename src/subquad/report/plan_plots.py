"""A plan's plots, as PNGs."""

from typing import Any

from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch, Rectangle

from subquad.report import drawing
from subquad.report.plan_schema import PlanReport
from subquad.report.plan_tables import EXACT, FIGURES, title


def plots(report: PlanReport) -> dict[str, bytes]:
    """PNGs by name; a plot without figures to draw is left out."""
    with drawing.look():
        made = dict(zip(FIGURES, (layers_figure(report), front_figure(report)), strict=True))
        return {name: drawing.png(figure) for name, figure in made.items() if figure is not None}


def layers_figure(report: PlanReport) -> Figure | None:
    """A square for each layer and length, in its method's colour, with its share of exact attention's time."""
    numbers = list(dict.fromkeys(number for p in report["lengths"] for number in p["layers"]))
    used = list(dict.fromkeys(found["method"] for p in report["lengths"] for found in p["layers"].values()))
    methods = [name for name in used if name != EXACT]
    if not numbers:
        return None
    looks = drawing.styles([EXACT, *methods])
    figure = Figure(
        figsize=(2.4 + 0.75 * len(numbers) + 3.2, 1.6 + 0.62 * len(report["lengths"]) + 0.12 * len(methods)),
        layout=ConstrainedLayoutEngine(),
    )
    ax = figure.subplots()
    for row, planned in enumerate(report["lengths"]):
        for column, number in enumerate(numbers):
            found = planned["layers"].get(number)
            exact = found is None or found["method"] == EXACT
            color = "#ffffff" if found is None or exact else looks[found["method"]].color
            ax.add_patch(Rectangle((column, row), 1, 1, facecolor=color, edgecolor="#7a828a", linewidth=0.8))
            if found is not None:
                text = "exact" if exact else f"{100 * found['time']:.0f} %"
                ink = "#59636e" if exact else "#ffffff"
                ax.text(column + 0.5, row + 0.5, text, ha="center", va="center", color=ink, fontsize=8.5)
    ax.set_xlim(0, len(numbers))
    ax.set_ylim(len(report["lengths"]), 0)
    ax.set_xticks([i + 0.5 for i in range(len(numbers))], numbers)
    ax.set_yticks([i + 0.5 for i in range(len(report["lengths"]))], [f"{p['length']:,}" for p in report["lengths"]])
    ax.set_xlabel("layer")
    ax.set_ylabel("tokens")
    ax.grid(False)
    ax.tick_params(length=0)
    handles = [Patch(facecolor=looks[name].color, label=drawing.broken(name)) for name in methods]
    handles.append(Patch(facecolor="#ffffff", edgecolor="#7a828a", label="exact attention"))
    ax.legend(handles=handles, loc="center left", bbox_to_anchor=(1.01, 0.5))
    return drawing.titled(figure, _model(report), f"what runs where, fidelity ≥ {report['settings']['floor']:g}")


def front_figure(report: PlanReport) -> Figure | None:
    """Speed-up against the loss that is accepted, a panel for each length."""
    able = [planned for planned in report["lengths"] if planned["floors"]]
    if not able:
        return None
    figure = Figure(figsize=(4.2 * len(able) + 0.6, 3.8), layout=ConstrainedLayoutEngine())
    axes: Any = figure.subplots(1, len(able), squeeze=False, sharey=True)[0]
    for ax, planned in zip(axes, able, strict=True):
        floors = [f for f in planned["floors"] if f["floor"] < 1]  # a loss of 0 has no place on a logarithmic axis
        accepted = [1 - f["floor"] for f in floors]
        plan, best = ([f[name] for f in floors] for name in ("speedup", "uniform_speedup"))
        ax.plot(accepted, plan, color="#0b6b50", marker="o", label="plan (predicted)", linewidth=1.7)
        ax.plot(accepted, best, color="#8C564B", marker="s", label="best single method (predicted)", linewidth=1.7)
        if "verified" in planned:
            ax.plot(planned["verified"]["loss"], planned["verified"]["speedup"], "*", color="#D55E00", markersize=13,
                    label="the plan, verified")  # fmt: skip
        ax.axhline(1.0, color="#222222", linewidth=0.9)
        ax.set_xscale("log")
        drawing.ticks_at(ax.xaxis, sorted(accepted), lambda x: f"{1 - x:.4g}")
        ax.invert_xaxis()
        ax.set_xlabel("fidelity")
        ax.set_title(f"{planned['length']:,} tokens", fontsize=10)
    axes[0].set_ylabel("speed-up of the whole model")
    axes[0].legend(loc="best")
    return drawing.titled(figure, _model(report), "what other floors would give")


def _model(report: PlanReport) -> str:
    return title(report).partition(":")[0]
