"""A run in the terminal and in Markdown."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

from subquad.tools.needle.plots import PLOTS
from subquad.tools.needle.reading import Groups, by_task, cells_of, difference_interval, mean_of, right_interval, shown
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
    "right: share of the prompts that greedy decoding answers correctly. "
    "Brackets are 95 % intervals; ≈: the interval of a difference contains 0, so no difference to exact attention was "
    "found. One prompt has no interval of its difference."
)


def rich_table(report: NeedleReport) -> RenderableType:
    """The means of each task and length; laid out by the width that there is when it is printed."""
    return _NeedleTerminal(report)


class _NeedleTerminal:
    """Settings are below the methods' names if the table would be too wide otherwise."""

    def __init__(self, report: NeedleReport):
        self.report = report

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        table = _narrow(summary(self.report))
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
    tasks, makers = report.settings["tasks"], list[Maker]()
    for length in report.settings["lengths"]:
        group, of_all = f"{length:,} tokens", partial(by_task, report, length=length)
        if len(tasks) > 1:
            makers.append((Column("mean", group), partial(_likelihood, of_all)))
        for task in tasks:
            makers.append((Column(task, group), partial(_likelihood, partial(_of_task, length=length, task=task))))
        makers.append((Column("right", group), partial(_right, of_all)))
    return _table(report, makers)


def of_task(report: NeedleReport, task: str) -> ReportTable:
    """For each length and depth of one task, its log-likelihood and its share of right answers."""
    makers: list[Maker] = []
    for length in report.settings["lengths"]:
        group, depths = f"{length:,} tokens", {cell.depth for cell in _all_cells(report, task)}
        for depth in sorted(depths, key=lambda each: each or 0.0):
            head = "all" if depth is None else f"{depth:g}"
            at_depth = partial(_at_depth, length=length, task=task, depth=depth)
            makers.append((Column(head, group), partial(_likelihood, at_depth)))
            makers.append((Column(f"{head}, right", group), partial(_right, at_depth)))
    return _table(report, makers)


def _table(report: NeedleReport, makers: Sequence[Maker]) -> ReportTable:
    lines = [Line(m.method, [make(m) for _, make in makers], MARKS[m.role]) for m in report.methods]
    return ReportTable([column for column, _ in makers], lines)


def _narrow(table: ReportTable) -> ReportTable:
    """The table with intervals below their figures."""
    lines = [
        replace(line, cells=[replace(cell, text=cell.text.replace(" [", "\n[")) for cell in line.cells])
        for line in table.lines
    ]
    return ReportTable(table.columns, lines)


def _all_cells(report: NeedleReport, task: str) -> list[NeedleCell]:
    return [cell for method in report.methods for cell in method.cells if cell.task == task]


def _likelihood(groups_of: Callable[[NeedleMethod], Groups], method: NeedleMethod) -> Cell:
    groups = groups_of(method)
    mean = mean_of(groups, partial(shown, method))
    return cells.number(mean) if method.role == "exact" else cells.difference(mean, difference_interval(groups))


def _right(groups_of: Callable[[NeedleMethod], Groups], method: NeedleMethod) -> Cell:
    groups = groups_of(method)
    return cells.share(mean_of(groups, lambda cell: cell.right), right_interval(groups))


def _of_task(method: NeedleMethod, length: int, task: str) -> Groups:
    return [cells_of(method, length, task)]


def _at_depth(method: NeedleMethod, length: int, task: str, depth: float | None) -> Groups:
    return [[cell for cell in cells_of(method, length, task) if cell.depth == depth]]
