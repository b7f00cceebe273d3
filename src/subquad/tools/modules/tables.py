"""A table with sentences above and below it, as plain text and as Markdown."""

from collections.abc import Sequence

from rich.table import Table

from subquad.core.plain_tables import as_text
from subquad.tools.report.markup import escaped, rows_of

Columns = Sequence[tuple[str, bool]]  # titles, and whether a column holds numbers


def as_terminal(columns: Columns, lines: Sequence[Sequence[str]], sentences: Sequence[str]) -> str:
    """The first sentence, the table, and the other sentences."""
    table = Table(box=None)
    for title, is_number in columns:
        table.add_column(title, justify="right" if is_number else "left", no_wrap=is_number)
    for line in lines:
        table.add_row(*line)
    first, *others = sentences
    return "\n".join([first, as_text(table), *others])


def as_markdown(columns: Columns, lines: Sequence[Sequence[str]], sentences: Sequence[str]) -> str:
    """The first sentence, the table, and the other sentences as paragraphs."""
    titles = [title for title, _ in columns]
    first, *others = map(escaped, sentences)
    table = rows_of([titles, *([escaped(cell) for cell in line] for line in lines)])
    return "\n\n".join([first, table, *others])
