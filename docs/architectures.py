"""The table of all model types on its page, from docs/assets/architectures.csv. A MkDocs hook."""

import csv
from html import escape
from pathlib import Path
from typing import Any

PAGE = "architectures.md"
PLACE = '<div id="architectures"></div>'
TABLE = Path(__file__).parent / "assets" / "architectures.csv"
CODE = ("class",)  # columns in the type of code


def html_table(path: Path = TABLE) -> str:
    """The file as a table in HTML, with the place of its filter (docs/assets/architectures.js) before it."""
    with path.open(encoding="utf-8", newline="") as file:
        head, *rows = csv.reader(file)
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "\n".join(f"<tr>{''.join(map(cell, head, row))}</tr>" for row in rows)
    table = f"<table>\n<thead><tr>{cells}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"
    return f'<div id="architecture-filter"></div>\n<div id="architectures">\n{table}\n</div>'


def cell(column: str, text: str) -> str:
    """One cell of the table."""
    shown = escape(text)
    return f"<td><code>{shown}</code></td>" if column in CODE and text else f"<td>{shown}</td>"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put the table into its page; MkDocs calls this with the text of every page."""
    return markdown.replace(PLACE, html_table()) if page.file.src_uri == PAGE else markdown
