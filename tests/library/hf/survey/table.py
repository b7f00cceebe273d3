"""docs/assets/architectures.csv: what the survey found, written from its results and read back by the tests."""

import csv
import io
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers

DOCS = Path(__file__).parents[4] / "docs"
TABLE = DOCS / "assets" / "architectures.csv"
PAGE = DOCS / "architectures.md"
COUNTS = re.compile(r"(?<=<!-- counts:begin -->\n\n).*?(?=\n\n<!-- counts:end -->)", re.DOTALL)
HEAD = ("model type", "class", "full", "long prompts", "reason")
WORDS = {
    "equal": "its outputs equal those of the model's own attention",
    "refused at swap": "refused when swapped in, with the reason",
    "refused at first forward": "refused only at the first forward pass",
    "silently wrong": "silently wrong",
    "crashed": "crashed",
    "not on the interface": "attention outside of transformers' attention interface, which `swap` refuses",
    "cannot be built": "not surveyed: no small model of this type could be built or fed",
}


def write(results: Mapping[str, Mapping[str, Any]], table: Path = TABLE, page: Path = PAGE) -> None:
    """Write the table, and the counts on the page."""
    text = io.StringIO()
    order = list(WORDS)
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(HEAD)
    for model_type, result in sorted(results.items(), key=lambda item: (order.index(item[1]["status"]), item[0])):
        status, reason = result["status"], result.get("reason", "")
        cells = result.get("class", ""), status, long_prompts(result), "" if status == "equal" else _short(reason)
        lines.writerow((model_type, *cells))
    table.write_text(text.getvalue(), encoding="utf-8")
    version = ".".join(transformers.__version__.split(".")[:2])
    page.write_text(COUNTS.sub(lambda _: counts(rows(table), version), page.read_text("utf-8")), encoding="utf-8")


def rows(table: Path = TABLE) -> list[dict[str, str]]:
    """The rows of the table by its columns."""
    with table.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def counts(table: list[dict[str, str]], version: str) -> str:
    """A table of the number of model types with each outcome."""
    statuses = Counter(row["full"] for row in table)
    halves = Counter(_kind(row["long prompts"]) for row in table if row["long prompts"])
    lines = [
        f"Model types of transformers {version}: {len(table):,}.",
        "",
        "| `full` | | model types |",
        "|---|---|---|",
    ]
    lines += [f"| {status} | {WORDS[status]} | {statuses[status]:,} |" for status in WORDS if statuses[status]]
    causal = (
        f"Of the {halves.total():,} equal model types with causal self-attention, {halves['yes']:,} run "
        f"`clustered-tail` in long prompts, {halves['refused']:,} refuse it with the reason, {halves['no effect']:,} "
        f"show no effect, and {halves['not surveyed']:,} accept no prompts of 27 tokens."
    )
    return "\n".join([*lines, "", causal])


def _kind(cell: str) -> str:
    return cell if cell in ("not surveyed", "no effect") else "refused" if cell.startswith("refused") else "yes"


def long_prompts(result: Mapping[str, Any]) -> str:
    """The table's entry for a model by halves; empty where there is no causal self-attention."""
    halves = result.get("by halves")
    if halves is None:
        return ""
    if halves["status"] in ("not surveyed", "no effect"):
        return str(halves["status"])
    if halves["status"] != "equal":
        return f"{halves['status']}: {_short(halves['reason'])}"
    swapped, layers = halves["layers"]
    return "yes" if swapped == layers else f"in {swapped} of {layers} layers"


def _short(reason: str) -> str:
    text = re.sub(r"^\w*(Error|Exception): | \([\w.<> ]+:\d+\)$", "", reason)
    text = re.sub(r"^layer (\d+ \([^)]*\)) of \w+", r"layer \1", text)
    text = text.split("; pass a mapping")[0].split("; architectures that can")[0]
    return text if len(text) <= 240 else text[:239].rsplit(" ", 1)[0] + " …"


def documented_long_prompts() -> dict[str, str]:
    """The column for long prompts, without empty cells."""
    return {row["model type"]: row["long prompts"] for row in rows() if row["long prompts"]}


def documented() -> dict[str, str]:
    """The status of each model type."""
    return {row["model type"]: row["full"] for row in rows()}
