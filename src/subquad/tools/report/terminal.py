"""Tables for a terminal, laid out by its width: one that is too wide comes in parts, and no figure is cut."""

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from rich import box
from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from subquad.tools.report.content import Column, Line, ReportTable

TONES = {"": "", "faster": "green", "slower": "red", "low": "yellow", "tie": "not bold dim", "missing": "dim"}
NAME = 24  # columns of the marks below a name that is folded
HEAD = 16  # columns of a head that is longer than its cells
_WORDS = re.compile(r"[^\W\d]{3}")  # what a figure with its unit does not have


class Parts:
    """A table in as many parts, one below the other, as it takes to fit; each has the first column.

    Args:
        part: makes the table with the columns of these numbers, which do not count the first one.
        groups: the group of each column; a part ends with a group where it can.
    """

    def __init__(self, part: Callable[[Sequence[int]], RichTable], groups: Sequence[str]):
        self.part, self.groups = part, groups

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        whole = self.part(range(len(self.groups)))
        return Measurement.get(console, options.update(max_width=10_000), whole)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RichTable | str]:
        columns = list(range(len(self.groups)))
        if not columns:
            yield self.part([])
        while columns:
            count = self._fitting(columns, console, options)
            yield self.part(columns[:count])
            columns = columns[count:]
            if columns:
                yield ""

    def _fitting(self, columns: Sequence[int], console: Console, options: ConsoleOptions) -> int:
        """The number of these columns that fit, at least one; a group is not taken apart if that leaves another one."""
        count = 1
        while count < len(columns) and self._width(columns[: count + 1], console, options) <= options.max_width:
            count += 1
        whole = count
        while 0 < whole < len(columns) and self._together(columns[whole - 1], columns[whole]):
            whole -= 1
        return whole or count

    def _together(self, one: int, other: int) -> bool:
        return bool(self.groups[one]) and self.groups[one] == self.groups[other]

    def _width(self, columns: Sequence[int], console: Console, options: ConsoleOptions) -> int:
        return Measurement.get(console, options.update(max_width=10_000), self.part(columns)).maximum


def fits(console: Console, options: ConsoleOptions, table: Parts) -> bool:
    """True if a table fits without being taken apart."""
    return Measurement.get(console, options.update(max_width=10_000), table).maximum <= options.max_width


def ruled(gap: int = 1) -> RichTable:
    """An empty table for the terminal, with a line below its head."""
    padding = (0, gap, 0, 0)
    return RichTable(box=box.SIMPLE_HEAD, padding=padding, pad_edge=False, show_edge=False, header_style="bold")


def rich_of(table: ReportTable, folded: bool) -> Parts:
    """A table for the terminal; folded, with the settings of methods under their names."""
    return Parts(partial(_drawn, table, folded), [column.group for column in table.columns])


def _drawn(table: ReportTable, folded: bool, columns: Sequence[int]) -> RichTable:
    drawn, shown = ruled(0 if folded else 1), table.only(lambda i: i in columns)
    drawn.add_column(table.first, overflow="fold")
    for i, column in enumerate(shown.columns):
        add_column(drawn, _head(column), [line.cells[i].text for line in shown.lines], justify="right")
    for line in shown.lines:
        style = "bold" if line.recommended else ""
        cells = [Text(cell.text, TONES[cell.tone]) for cell in line.cells]
        drawn.add_row(_name(line, folded), *cells, style=style)
    return drawn


def plain_table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Parts:
    """Texts as a table for the terminal, without lines."""
    heads, cells = list(columns), [list(row) for row in rows]

    def part(numbers: Sequence[int]) -> RichTable:
        table = RichTable(box=None, pad_edge=False)
        table.add_column(Text(heads[0]), overflow="fold")
        for number in numbers:
            column = [row[number + 1] for row in cells]
            width = max(HEAD, *map(len, column)) if column else HEAD
            add_column(table, Text(textwrap.fill(heads[number + 1], width, break_long_words=False)), column)
        for row in cells:
            table.add_row(Text(row[0]), *(Text(row[number + 1]) for number in numbers))
        return table

    return Parts(part, [""] * (len(heads) - 1))


def add_column(table: RichTable, head: Text | str, cells: Iterable[str], justify: str = "left") -> None:
    """Add a column: one of figures is as wide as they are, and texts may fold."""
    words = any(len(cell) > HEAD and _WORDS.search(cell) for cell in cells)
    table.add_column(head, justify=justify, no_wrap=not words, overflow="fold", vertical="top")  # type: ignore[arg-type]


def _head(column: Column) -> Text:
    """A column's head as narrow as possible: one word per line."""
    words = (column.short or column.head).split(" ")
    return Text("\n".join([column.group, *words] if column.group else words))


def _name(line: Line, folded: bool) -> Text:
    text = Text(_folded(line) if folded else line.name)
    if line.marks:
        marks = f"({', '.join(line.marks)})"
        text.append("\n " + textwrap.fill(marks, NAME, subsequent_indent="  ") if folded else f" {marks}", "cyan")
    return text


def _folded(line: Line) -> str:
    """The name with its settings below it, as many on a line as fit 22 columns."""
    name, *settings = line.pieces
    lines = [name]
    for setting in settings:
        joined = f"{lines[-1]}{setting}"
        lines[-1:] = [joined] if len(lines) > 1 and len(joined) <= 22 else [lines[-1], f"  {setting}"]
    return "\n".join(lines)
