"""The plot of a run: depth against length, a panel for each method and task."""

from typing import Any

from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

from subquad.tools.needle.schema import NeedleCell, NeedleMethod, NeedleReport
from subquad.tools.report import drawing

# file name -> what it shows
PLOTS = {
    "needle.png": "Log-likelihood of the answers minus that of exact attention, in nats per token: blue is as good as "
    "exact or better, red is worse; ≈: its 95 % interval contains 0; empty: not measured. The share of right answers "
    "is below each figure.",
}
CELL_WIDTH, CELL_HEIGHT = 0.85, 0.5  # inches of a cell
LEAST = 0.1  # nats: the range of colours at least, so that noise is pale


def plots(report: NeedleReport) -> dict[str, bytes]:
    """PNGs by name."""
    return drawing.pngs({"needle.png": grid}, report)


def grid(report: NeedleReport) -> Figure:
    """Rows of panels are methods, columns are tasks; a panel has a cell for each length and depth."""
    tasks, lengths = report.settings["tasks"], report.settings["lengths"]
    methods = [method for method in report.methods if method.role != "exact"]
    depths = {task: _depths(report, task) for task in tasks}
    tallest = max(map(len, depths.values()))
    size = (len(tasks) * (len(lengths) * CELL_WIDTH + 0.75) + 1.8, len(methods) * (tallest * CELL_HEIGHT + 0.95) + 0.9)
    figure = Figure(figsize=(max(size[0], 5.5), max(size[1], 3.2)), layout="constrained")
    axes = figure.subplots(len(methods), len(tasks), squeeze=False)
    scale = _scale(methods)
    image: Any = None
    for row, method in zip(axes, methods, strict=True):
        for ax, task in zip(row, tasks, strict=True):
            image = _panel(ax, method, task, lengths, depths[task], scale)
        row[0].set_ylabel(f"{drawing.broken(method.method)}\n\ndepth", fontsize=8.5)
    for top, bottom, task in zip(axes[0], axes[-1], tasks, strict=True):
        top.set_title(task, fontsize=10, loc="left")
        bottom.set_xlabel("tokens", fontsize=8.5)
    bar = figure.colorbar(image, ax=axes, shrink=min(1.0, 0.9 / len(methods) + 0.2), aspect=25, pad=0.015)
    bar.set_label("difference, nats per token", fontsize=8.5)
    bar.ax.tick_params(labelsize=8)
    return drawing.titled(figure, report.model["name"], "retrieval from long prompts, against exact attention")


def _depths(report: NeedleReport, task: str) -> list[float | None]:
    depths = {cell.depth for method in report.methods for cell in method.cells if cell.task == task}
    return sorted(depths, key=lambda depth: depth or 0.0)


def _scale(methods: list[NeedleMethod]) -> TwoSlopeNorm:
    """Colours that are symmetric around 0."""
    differences = [abs(cell.difference or 0.0) for method in methods for cell in method.cells]
    most = max([LEAST, *differences])
    return TwoSlopeNorm(0.0, -most, most)


def _panel(
    ax: Any, method: NeedleMethod, task: str, lengths: list[int], depths: list[float | None], scale: TwoSlopeNorm
) -> Any:
    by_cell = {(cell.depth, cell.length): cell for cell in method.cells if cell.task == task}
    values = [[_difference(by_cell.get((depth, length))) for length in lengths] for depth in depths]
    image = drawing.heat_map(ax, values, cmap="RdBu", norm=scale)
    for y, depth in enumerate(depths):
        for x, length in enumerate(lengths):
            cell = by_cell.get((depth, length))
            if cell is not None:
                value = cell.difference
                dark = value is not None and abs(scale(value) - 0.5) > 0.35
                figure = "–" if value is None else f"{_tie(cell)}{round(value, 2) + 0.0:+.2f}"
                caption = f"{figure}\n{100 * cell.right:.0f} %"
                ax.text(x, y, caption, ha="center", va="center", fontsize=7.5, color="white" if dark else "black")
    ax.tick_params(labelsize=8)
    ax.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    ax.set_yticks(range(len(depths)), ["all" if depth is None else f"{depth:g}" for depth in depths])
    return image


def _tie(cell: NeedleCell) -> str:
    return "≈" if cell.interval is not None and cell.interval[0] <= 0 <= cell.interval[1] else ""


def _difference(cell: NeedleCell | None) -> float:
    return float("nan") if cell is None or cell.difference is None else cell.difference
