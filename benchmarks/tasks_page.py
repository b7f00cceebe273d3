"""Fill the tables of docs/results/tasks.md with the rows that decide, from benchmarks/results/tasks.json.

python benchmarks/tasks_page.py
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import sheet
from task_cells import CHUNKED, DIFFERENCE, EXACT, Figures, named, written

from subquad.core.files import write

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "tasks.json"
PAGE = ROOT / "docs" / "results" / "tasks.md"
MARKED = re.compile(r"(?<=<!-- tables:begin -->\n\n).*?(?=\n\n<!-- tables:end -->)", re.DOTALL)
MARKER = "<!-- figures: benchmarks/results/tasks.md -->"

METHODS = (
    "clustered-tail", "i-clustered:clusters=100,topk=32", "clustered:clusters=25", "local:window=64",
    "smyrf:cluster_size=64", "nystrom", "performer",
)  # fmt: skip
DECODER = (
    "clustered-tail", "clustered-tail:clusters=48,topk=96", "i-clustered:clusters=64,topk=128", "local:window=512+keep",
)  # fmt: skip
TITLES = {
    "Sentences that the document has": "Sentences that are in the document",
    "Sentences that were taken out of the document": "Sentences that were removed from it",
}
EVERY = (*CHUNKED, *METHODS)
SHOWN = (  # task, title, rows, column of exact attention, column of the other rows
    ("retrieval", "Retrieval: nDCG@10, and differences to exact", EVERY, "nDCG@10", f"nDCG@10, {DIFFERENCE}"),
    (
        "classification",
        "Classification: accuracy, and differences to exact",
        EVERY,
        "accuracy",
        f"accuracy, {DIFFERENCE}",
    ),
    (
        "perplexity",
        "Perplexity, and differences to exact in nats per token",
        DECODER,
        "perplexity",
        f"{DIFFERENCE} in nats per token",
    ),
)
Rows = Mapping[str, Figures | None]


def short_tables(records: Sequence[Mapping[str, Any]]) -> str:
    """The tables of the page."""
    parts = []
    for task, title, names, value, difference in SHOWN:
        columns = {record["length"]: record["tables"] for record in records if record["task"] == task}
        parts.append(f"### {title}")
        for kind in next(iter(columns.values())):
            parts += [f"{TITLES.get(kind, kind)}:"] if kind else []
            parts.append(short({length: tables[kind] for length, tables in columns.items()}, names, value, difference))
    return "\n\n".join(parts)


def short(columns: Mapping[int, Rows], names: Sequence[str], value: str, difference: str) -> str:
    """One table: the value of exact attention, and the difference of each row that any of the columns has."""
    cells = {EXACT: [written(value, rows[EXACT]) for rows in columns.values()]}
    for name in names:
        if any(name in rows for rows in columns.values()):
            cells[name] = [written(difference, rows[name]) if name in rows else "–" for rows in columns.values()]
    head = ["attention", *(f"{length:,} tokens" for length in columns)]
    return f"{MARKER}\n{sheet.table(head, [[named(name), *line] for name, line in cells.items()])}"


if __name__ == "__main__":
    tables = short_tables(json.loads(RESULTS.read_text("utf-8")))
    filled, count = MARKED.subn(lambda _: tables, PAGE.read_text("utf-8"))
    if count != 1:
        raise SystemExit(f"{PAGE} has no place for the tables")
    write(PAGE, filled.encode())
