"""Every figure that docs/models.md gives of a measured model stands in the results that the line names."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = (ROOT / "docs" / "models.md").read_text("utf-8")
FIGURE = re.compile(r"\d[\d,.]*\d[%×]?|\d[%×]?")


def cells(line: str) -> list[str]:
    """The cells of a line of a table."""
    return [cell.strip() for cell in line.strip().strip("|").split(" | ")]


def tables(text: str) -> Iterator[tuple[list[str], list[list[str]]]]:
    """The head and the lines of each table of a page."""
    for block in re.findall(r"(?:^\|.*\n)+", text + "\n", re.MULTILINE):
        head, _, *rows = block.splitlines()
        yield cells(head), [cells(row) for row in rows]


(MEASURED,) = (rows for head, rows in tables(PAGE) if head[-1] == "results")


def figures(results: str, method: str, tokens: str) -> set[str]:
    """All figures of a method at a length, in tables with a line for each length, or columns for each."""
    found: set[str] = set()
    for head, rows in tables(results):
        for row in rows:
            line = dict(zip(head, row, strict=True))
            name = line.get("method", "").split(" (")[0].strip("`")
            if name != method or line.get("tokens", tokens) != tokens:
                continue
            lengths = {key: re.match(r"([\d,]+)(?: tokens)?:", key) for key in line}
            at_length = [cell for key, cell in line.items() if (own := lengths[key]) is None or own[1] == tokens]
            found |= {each for cell in at_length for each in FIGURE.findall(cell)}
    return found


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row[0]}-{row[1]}")
def test_every_figure_is_in_the_results(row):
    _, length, method, fidelity, task, speed, command, results = row
    text = (RESULTS / re.search(r"results/([\w-]+\.md)\)$", results)[1]).read_text("utf-8")
    tokens = re.findall(r"([\d,]+) (?:tokens|positions)", length)[-1]
    shown = [*FIGURE.findall(re.sub(r"recall@10|fp32", "", f"{fidelity} {task}")), *FIGURE.findall(speed)]
    assert len(shown) >= 2
    assert {*shown} <= figures(text, method.strip("`"), tokens)
    assert command.strip("`").partition(" --")[0] in text


def test_a_figure_of_another_length_is_not_taken():
    text = "| method | 512: cosine | 1,024: cosine |\n|---|---|---|\n| `full` | 0.5 | 0.25 |\n"
    assert figures(text, "full", "512") == {"0.5"}
    text = "| tokens | method | speed |\n|---|---|---|\n| 512 | `full` | 2.0× |\n| 64 | `full` | 3.0× |\n"
    assert figures(text, "full", "64") == {"3.0×", "64"}
