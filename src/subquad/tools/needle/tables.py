"""A run in the terminal and in Markdown."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

from subquad.tools.needle.plots import PLOTS
from subquad.tools.needle.reading import cells_of, mean_over, over_tasks, shown
from subquad.tools.needle.schema import NeedleCell, NeedleMethod, NeedleReport
from subquad.tools.report import cells
from subquad.tools.report.cells import Cell
from subquad.tools.report.content import Column, Line, ReportTable
from subquad.tools.report.markup import bullets, escaped, fenced, sections, table_of
from subquad.tools.report.terminal import fits, rich_of

MARKS = {"exact": ["baseline"], "measured": [], "oracle": ["oracle"]}
LEGEND = (
    "Log-likelihood of the answer's tokens, in nats per token, as a mean: of exact attention itself, of the other "
    "methods minus that of exact attention on the same prompts; 0 is as good as exact, below 0 is worse. "
    "right: share of the prompts that greedy decoding answers correctly."
)


def rich_table(report: NeedleReport) -> RenderableType:
    """The means of each task and length; laid out by the width that there is when it is printed."""
    return _NeedleTerminal(report)


class _NeedleTerminal:
    """Settings are below the methods' names if the table would be too wide otherwise."""

    def __init__(self, report: NeedleReport):
        self.report = report

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        table = summary(self.report)
        yield Text(title(self.report), "bold")
        full = rich_of(table, False)
        yield full if fits(console, options, full) else rich_of(table, True)
        for line in (LEGEND, *self.report.notes):
            yield Text(line, "dim")


def markdown(report: NeedleReport, plots: Sequence[str] = ()) -> str:
    """All of a run as Markdown. `plots` are the names of the plots that lie next to it."""
    parts = [
        f"# {escaped(title(report))}",
        table_of(summary(report)),
        escaped(LEGEND),
        *(f"![{name}]({name})\n\n{escaped(PLOTS[name])}" for name in plots),
        "## By depth",
    ]
    for task in report.settings["tasks"]:
        parts += [f"### {escaped(task)}", table_of(of_task(report, task))]
    parts += sections({t: getattr(report, t.lower()) for t in ("Settings", "Model", "Text", "Hardware", "Versions")})
    parts += ["## Notes", bullets(report.notes)]
    parts += ["## Command", fenced(report.command), escaped(report.created)]
    return "\n\n".join(parts) + "\n"


def title(report: NeedleReport) -> str:
    """The title of a run."""
    name = report.model["name"].rstrip("/").rpartition("/")[2]
    samples = report.settings["samples"]
    return f"{name}: retrieval from long prompts, {samples} prompt{'' if samples == 1 else 's'} per task and depth"


# ---------------------------------------------------------------------- tables

Maker = tuple[Column, Callable[[NeedleMethod], Cell]]


def summary(report: NeedleReport) -> ReportTable:
    """For each length, the mean of all tasks, of each task over its depths, and the share of right answers."""
    tasks, makers = report.settings["tasks"], []
    for length in report.settings["lengths"]:
        group = f"{length:,} tokens"
        if len(tasks) > 1:
            makers.append((Column("mean", group), partial(_mean, report, length)))
        makers += [(Column(task, group), partial(_of_cells, length=length, task=task)) for task in tasks]
        makers.append((Column("right", group), partial(_right, report, length)))
    return _table(report, makers)


def of_task(report: NeedleReport, task: str) -> ReportTable:
    """For each length and depth of one task, its log-likelihood and its share of right answers."""
    makers: list[Maker] = []
    for length in report.settings["lengths"]:
        group, depths = f"{length:,} tokens", {cell.depth for cell in _all_cells(report, task)}
        for depth in sorted(depths, key=lambda each: each or 0.0):
            head = "all" if depth is None else f"{depth:g}"
            at: dict[str, Any] = {"length": length, "task": task, "depth": depth}
            makers.append((Column(head, group), partial(_of_cells, **at)))
            makers.append((Column(f"{head}, right", group), partial(_share_of_cell, **at)))
    return _table(report, makers)


def _table(report: NeedleReport, makers: Sequence[Maker]) -> ReportTable:
    lines = [Line(m.method, [make(m) for _, make in makers], MARKS[m.role]) for m in report.methods]
    return ReportTable([column for column, _ in makers], lines)


def _all_cells(report: NeedleReport, task: str) -> list[NeedleCell]:
    return [cell for method in report.methods for cell in method.cells if cell.task == task]


def _mean(report: NeedleReport, length: int, method: NeedleMethod) -> Cell:
    return cells.number(over_tasks(report, method, length, partial(shown, method)))


def _right(report: NeedleReport, length: int, method: NeedleMethod) -> Cell:
    return cells.share(over_tasks(report, method, length, lambda cell: cell.right))


def _of_cells(method: NeedleMethod, length: int, task: str, **depth: Any) -> Cell:
    return cells.number(mean_over(_at_depth(cells_of(method, length, task), **depth), partial(shown, method)))


def _share_of_cell(method: NeedleMethod, length: int, task: str, depth: float | None) -> Cell:
    return cells.share(mean_over(_at_depth(cells_of(method, length, task), depth=depth), lambda cell: cell.right))


def _at_depth(listed: list[NeedleCell], **depth: Any) -> list[NeedleCell]:
    return [cell for cell in listed if not depth or cell.depth == depth["depth"]]
