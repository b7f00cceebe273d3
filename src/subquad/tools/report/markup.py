"""Markdown from plain text and tables."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from subquad.tools.measure.noise import Noise
from subquad.tools.report.content import Line, ReportTable, sections_of


def table_of(table: ReportTable) -> str:
    """A table."""
    rows = [[table.first, *(column.title for column in table.columns)]]
    rows += [[_labelled(line), *(cell.text for cell in line.cells)] for line in table.lines]
    head, *body = (f"| {' | '.join(map(escaped, row))} |" for row in rows)
    return "\n".join([head, f"|:---|{'---:|' * len(table.columns)}", *body])


def _labelled(line: Line) -> str:
    return f"{line.name} ({', '.join(line.marks)})" if line.marks else line.name


def rows_of(rows: Sequence[Sequence[str]]) -> str:
    """A table of texts that are Markdown already, the first of them its head."""
    lines = ["|" + "".join(f" {cell} |" if cell else " |" for cell in row) for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])


def sections(parts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A heading and the facts below it, for each of some settings and the like."""
    return [text for title, pairs in sections_of(parts) for text in (f"## {title}", pairs_table(pairs))]


def pairs_table(pairs: Sequence[tuple[str, str]]) -> str:
    """Names with their values, one a line."""
    return bullets(f"{name}: {value}" for name, value in pairs)


def bullets(lines: Iterable[str]) -> str:
    """Lines of plain text, one a bullet."""
    return "\n".join(f"- {escaped(line)}" for line in lines)


def escaped(text: str) -> str:
    """Plain text that Markdown must not read as markup; in one line."""
    marked = "".join(f"\\{char}" if char in r"\`*[]<>|" else char for char in text)
    return " ".join(marked.split())


def fenced(text: str, language: str = "sh") -> str:
    """A code block whose fence is longer than any in the text."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text}\n{fence}"


def noise_line(noise: Noise | None) -> str:
    """A note on the noise; bold if the times are uncertain."""
    if noise is None:
        return ""
    return f"**{escaped(noise.says)}**" if noise.busy else escaped(noise.says)
