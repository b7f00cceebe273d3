"""Fill the tables of docs/results/tasks.md with the rows that decide, from benchmarks/results/tasks.md.

python benchmarks/tasks_page.py
"""

import re
from pathlib import Path

from subquad.core.files import write

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "tasks.md"
PAGE = ROOT / "docs" / "results" / "tasks.md"
MARKED = re.compile(r"(?<=<!-- tables:begin -->\n\n).*?(?=\n\n<!-- tables:end -->)", re.DOTALL)
MARKER = "<!-- figures: benchmarks/results/tasks.md -->"

EXACT = "exact"
CHUNKS = ("first 512 tokens", "mean of chunks", "best chunk")
METHODS = (
    "`clustered-tail`", "`i-clustered:clusters=100,topk=32`", "`clustered:clusters=25`", "`local:window=64`",
    "`smyrf:cluster_size=64`", "`nystrom`", "`performer`",
)  # fmt: skip
DECODER = (
    "`clustered-tail`", "`clustered-tail:clusters=48,topk=96`", "`i-clustered:clusters=64,topk=128`",
    "`local:window=512+keep`",
)  # fmt: skip

Row = dict[str, str]


def sections(results: str) -> dict[str, list[dict[str, Row]]]:
    """The tables below each heading, each by the name of its rows; a column that repeats follows the one before it."""
    return {
        part.partition("\n")[0]: [table(block) for block in re.findall(r"(?:^\|.*\n)+", part, re.MULTILINE)]
        for part in f"{results}\n".split("\n## ")[1:]
    }


def table(block: str) -> dict[str, Row]:
    """The rows of a table. The columns called "difference" are named after the column before them."""
    head, _, *rows = [[cell.strip() for cell in line.strip().strip("|").split(" | ")] for line in block.splitlines()]
    names = [f"{head[i - 1]}, difference" if name == "difference" else name for i, name in enumerate(head)]
    return {row[0]: dict(zip(names[1:], row[1:], strict=True)) for row in rows}


def short_tables(results: str) -> str:
    """The tables of the page."""
    parts = sections(results)
    retrieval = [(f"{n} tokens", parts[f"Retrieval, {n} tokens"]) for n in ("512", "2,048", "4,096")]
    reviews = [(f"{n} tokens", parts[f"Classification, {n} tokens"][0]) for n in ("512", "2,048")]
    novels = [(f"{n} tokens", parts[f"Perplexity, {n} tokens"][0]) for n in ("2,048", "4,096")]
    rows = (*CHUNKS, *METHODS)
    shown = [
        f"### Retrieval: nDCG@10, and differences to exact\n\n{title}:\n\n"
        + short([(length, tables[kind]) for length, tables in retrieval], rows, "nDCG@10", "nDCG@10, difference")
        for kind, title in enumerate(("Sentences that are in the document", "Sentences that were removed from it"))
    ]
    shown[1] = shown[1].partition("\n\n")[2]
    shown.append("### Classification: accuracy, and differences to exact")
    shown.append(short(reviews, rows, "accuracy", "accuracy, difference"))
    shown.append("### Perplexity, and differences to exact in nats per token")
    shown.append(short(novels, DECODER, "perplexity", "difference in nats per token"))
    return "\n\n".join(shown)


def short(columns: list[tuple[str, dict[str, Row]]], names: tuple[str, ...], value: str, difference: str) -> str:
    """One table: the value of exact attention, and the difference of each row that any of the columns has."""
    lines = [["attention", *(title for title, _ in columns)], [":---", *["---:"] * len(columns)]]
    lines.append([EXACT, *(rows[EXACT][value] for _, rows in columns)])
    lines += [
        [name, *(rows[name][difference] if name in rows else "–" for _, rows in columns)]
        for name in names
        if any(name in rows for _, rows in columns)
    ]
    return f"{MARKER}\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    filled, count = MARKED.subn(short_tables(RESULTS.read_text("utf-8")), PAGE.read_text("utf-8"))
    if count != 1:
        raise SystemExit(f"{PAGE} has no place for the tables")
    write(PAGE, filled.encode())
