"""A report in the terminal and in Markdown."""

from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.panel import Panel
from rich.table import Table as RichTable
from rich.text import Text

from subquad.tools.compare import reading, tables
from subquad.tools.compare.schema import Report
from subquad.tools.report import content
from subquad.tools.report.content import ReportTable
from subquad.tools.report.markup import bullets, escaped, fenced, noise_line, pairs_table, table_of
from subquad.tools.report.terminal import Parts, fits, rich_of


def rich_table(report: Report) -> RenderableType:
    """The main table and the recommendation, for a terminal; laid out by the width that there is when it is printed."""
    return _CompareTerminal(report)


def markdown(report: Report, plot_names: Sequence[str] = ()) -> str:
    """All of a report as Markdown. `figures` are the names of the plots that lie next to it."""
    parts = [
        f"# {escaped(tables.short_name(report))}: attention methods compared",
        _recommendation(report),
        "## Methods",
        table_of(tables.main_table(report)),
        escaped(tables.legend(report)),
        noise_line(report.noise) if not content.warning(report.noise) else "",
        bullets(f"Refused: {', '.join(names)}: {reason}" for reason, names in reading.refused(report).items()),
        bullets(reading.notes(report)),
        *(f"![{title}]({name})\n\n{about}" for name, (title, about) in tables.PLOTS.items() if name in plot_names),
        *_section(tables.REQUESTS, tables.request_table(report), tables.requests_caption(report)),
        *_section("Whole forward passes", tables.model_table(report)),
        *_section("Relative error of each layer's attention", tables.layer_table(report)),
        *_section("One attention call", tables.op_table(report), tables.OP_NOTE),
        *_section("Peak extra memory of one attention call, MiB", tables.op_memory_table(report)),
        *(text for title, pairs in tables.summary_sections(report) for text in (f"## {title}", pairs_table(pairs))),
        "## Notes",
        bullets(report.notes) or "None.",
        "## Command",
        f"{fenced(report.command)}\n\n{escaped(report.created)}",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


# ---------------------------------------------------------------------- terminal


class _CompareTerminal:
    """One table where it fits, else speed above quality; then settings under the names, and each table in parts."""

    def __init__(self, report: Report):
        self.report = report

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        for layout in self._layouts():
            if all(fits(console, options, table) for table in layout):
                break
        yield Text(f"{tables.short_name(self.report)}: {self.report.model.get('kind', 'model')}", "bold")
        yield from layout
        yield from self._requests(console, options)
        if reading.refused(self.report):
            yield _refusals(self.report)
        for line in (*reading.notes(self.report), tables.legend(self.report)):
            yield Text(line, "dim")
        for line in self.report.cautions or []:
            yield Text(line, "yellow")
        noise = self.report.noise
        if noise is not None and not noise.busy:
            yield Text(noise.says, "dim")
        yield _panel(self.report)

    def _requests(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        table = tables.request_table(self.report)
        if not table.columns:
            return
        whole, folded = rich_of(table, False), rich_of(table, True)
        yield Text(tables.REQUESTS, "bold")
        yield whole if fits(console, options, whole) else folded
        yield Text(tables.requests_caption(self.report), "dim")

    def _layouts(self) -> list[list[Parts]]:
        one = [tables.main_table(self.report)]
        parts = (tables.speed_table(self.report), tables.task_table(self.report), tables.quality_table(self.report))
        apart = [table for table in parts if table.columns]
        return [[rich_of(table, folded) for table in tables] for tables in (one, apart) for folded in (False, True)]


def _refusals(report: Report) -> RichTable:
    grid = RichTable.grid(padding=(0, 2, 0, 0))
    grid.add_column(overflow="fold")
    grid.add_column(overflow="fold")
    for reason, names in reading.refused(report).items():
        grid.add_row(Text("\n".join(names)), Text(f"refused: {reason}", "dim"))
    return grid


def _panel(report: Report) -> Panel:
    advice, warning = report.recommendation, content.warning(report.noise)
    lines = [Text(warning, "yellow")] if warning else []
    lines += [Text(advice.headline, "bold"), *(Text(f"• {reason}") for reason in advice.reasons)]
    code = tables.use(report)
    if code:
        lines.append(Text(code, "cyan"))
    if advice.next:
        lines += [Text(tables.NEXT), Text(advice.next, "cyan")]
    style = "yellow" if warning else "green" if code else "blue"
    return Panel(Group(*lines), title="Recommendation", title_align="left", border_style=style)


# ---------------------------------------------------------------------- Markdown


def _recommendation(report: Report) -> str:
    advice = report.recommendation
    code = tables.use(report)
    lines = [
        noise_line(report.noise) if content.warning(report.noise) else "",
        f"**{escaped(advice.headline)}**",
        bullets(advice.reasons),
        fenced(code, "python") if code else "",
        f"{tables.NEXT}\n\n{fenced(advice.next)}" if advice.next else "",
    ]
    return "\n\n".join(filter(None, lines))


def _section(title: str, table: ReportTable, caption: str = "") -> list[str]:
    return [part for part in (f"## {title}", escaped(caption), table_of(table)) if part] if table.columns else []
