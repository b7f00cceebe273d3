"""A report in the terminal and in Markdown."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.panel import Panel
from rich.table import Table as RichTable
from rich.text import Text

from subquad.report import content, reading
from subquad.report.content import Column, Line, Table
from subquad.report.markup import bullets, escaped, facts, fenced, table_of
from subquad.report.schema import Report

TONES = {"": "", "faster": "green", "slower": "red", "low": "yellow", "tie": "not bold dim", "missing": "dim"}


def rich_table(report: Report) -> RenderableType:
    """The main table and the recommendation, for a terminal; laid out by the width that there is when it is printed."""
    return _Terminal(report)


def markdown(report: Report, figures: Sequence[str] = ()) -> str:
    """All of a report as Markdown. `figures` are the names of the plots that lie beside it."""
    parts = [
        f"# {escaped(content.short_name(report))}: attention methods compared",
        _recommendation(report),
        "## Methods",
        table_of(content.main_table(report)),
        escaped(content.legend(report)),
        noise_line(report),
        bullets(f"Refused: {', '.join(names)}: {reason}" for reason, names in reading.refused(report).items()),
        bullets(reading.remarks(report)),
        *(f"![{title}]({name})\n\n{about}" for name, (title, about) in content.FIGURES.items() if name in figures),
        *_section("Whole forward passes", content.model_table(report)),
        *_section("Relative error of each layer's attention", content.layer_table(report)),
        *_section("One attention call", content.op_table(report), content.OP_REMARK),
        *_section("Peak extra memory of one attention call, MiB", content.op_memory_table(report)),
        *(text for title, pairs in content.facts(report) for text in (f"## {title}", facts(pairs))),
        "## Notes",
        bullets(report["notes"]) or "None.",
        "## Command",
        f"{fenced(report['command'])}\n\n{escaped(report['created'])}",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


# ---------------------------------------------------------------------- terminal


class _Terminal:
    """One table where it fits, else speed above quality; settings under the methods' names where that is not enough."""

    def __init__(self, report: Report):
        self.report = report

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        for layout in self._layouts():
            if all(_width(console, options, table) <= options.max_width for table in layout):
                break
        yield Text(f"{content.short_name(self.report)}: {self.report['model'].get('kind', 'model')}", "bold")
        yield from layout
        if reading.refused(self.report):
            yield _refusals(self.report)
        for line in (*reading.remarks(self.report), content.legend(self.report)):
            yield Text(line, "dim")
        if noise := reading.noise(self.report):
            yield Text(noise[1], "yellow" if noise[0] else "dim")
        yield _panel(self.report)

    def _layouts(self) -> list[list[RichTable]]:
        one = [content.main_table(self.report)]
        parts = (content.speed_table(self.report), content.task_table(self.report), content.quality_table(self.report))
        apart = [table for table in parts if table.columns]
        return [[rich_of(table, folded) for table in tables] for tables in (one, apart) for folded in (False, True)]


def _width(console: Console, options: ConsoleOptions, table: RichTable) -> int:
    return Measurement.get(console, options.update(max_width=10_000), table).maximum


def ruled(gap: int = 1) -> RichTable:
    """An empty table for the terminal, with a line below its head."""
    padding = (0, gap, 0, 0)
    return RichTable(box=box.SIMPLE_HEAD, padding=padding, pad_edge=False, show_edge=False, header_style="bold")


def plain_table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> RichTable:
    """Texts as a table for the terminal, without lines; never "…" in the place of a figure."""
    table = RichTable(box=None, pad_edge=False)
    for column in columns:
        table.add_column(Text(column), overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def rich_of(table: Table, folded: bool) -> RichTable:
    """A table for the terminal; folded, with the settings of methods under their names."""
    drawn = ruled(0 if folded else 1)
    drawn.add_column(table.first, no_wrap=True)
    for column in table.columns:
        drawn.add_column(_head(column), justify="right", no_wrap=True, vertical="top")
    for line in table.lines:
        style = "bold" if "recommended" in line.marks else ""
        cells = [Text(cell.text, TONES[cell.tone]) for cell in line.cells]
        drawn.add_row(_name(line, folded), *cells, style=style)
    return drawn


def _head(column: Column) -> Text:
    """A column's head as narrow as possible: one word per line."""
    words = (column.short or column.head).split(" ")
    return Text("\n".join([column.group, *words] if column.group else words))


def _name(line: Line, folded: bool) -> Text:
    text = Text(_folded(line) if folded else line.name)
    if line.marks:
        text.append(f"{chr(10) if folded else ''} ({', '.join(line.marks)})", "cyan")
    return text


def _folded(line: Line) -> str:
    """The name with its settings below it, as many on a line as fit 22 columns."""
    name, *settings = line.pieces
    lines = [name]
    for setting in settings:
        joined = f"{lines[-1]}{setting}"
        lines[-1:] = [joined] if len(lines) > 1 and len(joined) <= 22 else [lines[-1], f"  {setting}"]
    return "\n".join(lines)


def _refusals(report: Report) -> RichTable:
    grid = RichTable.grid(padding=(0, 2, 0, 0))
    for reason, names in reading.refused(report).items():
        grid.add_row(Text("\n".join(names)), Text(f"refused: {reason}", "dim"))
    return grid


def _panel(report: Report) -> Panel:
    advice = report["recommendation"]
    lines = [Text(advice["headline"], "bold"), *(Text(f"• {reason}") for reason in advice["reasons"])]
    code = content.use(report)
    if code:
        lines.append(Text(code, "cyan"))
    if "next" in advice:
        lines += [Text(content.NEXT), Text(advice["next"], "cyan")]
    return Panel(Group(*lines), title="Recommendation", title_align="left", border_style="green" if code else "blue")


# ---------------------------------------------------------------------- Markdown


def _recommendation(report: Report) -> str:
    advice = report["recommendation"]
    code = content.use(report)
    lines = [
        f"**{escaped(advice['headline'])}**",
        bullets(advice["reasons"]),
        fenced(code, "python") if code else "",
        f"{content.NEXT}\n\n{fenced(advice['next'])}" if "next" in advice else "",
    ]
    return "\n\n".join(filter(None, lines))


def noise_line(report: Mapping[str, Any]) -> str:
    """What to say of the noise; bold where the machine was busy."""
    noise = reading.noise(report)
    if noise is None:
        return ""
    return f"**{escaped(noise[1])}**" if noise[0] else escaped(noise[1])


def _section(title: str, table: Table, remark: str = "") -> list[str]:
    return [part for part in (f"## {title}", escaped(remark), table_of(table)) if part] if table.columns else []
