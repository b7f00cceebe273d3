"""The page of all model types: its table has every row of the file, its counts are right, and its filter works."""

import csv
import json
import re
import runpy
import shutil
import subprocess
from html import unescape
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.library.hf.survey.table import COUNTS, HEAD, PAGE, TABLE, WORDS, counts, rows, write

HOOK = runpy.run_path(str(PAGE.parent / "architectures.py"))
FILTER = PAGE.parent / "assets" / "architectures.js"


def on_site(uri: str, text: str) -> str:
    page = SimpleNamespace(file=SimpleNamespace(src_uri=uri))
    return HOOK["on_page_markdown"](text, page)


def test_the_site_has_every_row_without_javascript():
    shown = on_site("architectures.md", PAGE.read_text("utf-8"))
    cells = [re.findall(r"<t[dh]>(.*?)</t[dh]>", line) for line in shown.splitlines() if line.startswith("<t")]
    texts = [[unescape(re.sub("</?code>", "", cell)) for cell in row] for row in cells if row]
    with TABLE.open(encoding="utf-8", newline="") as file:
        assert texts == list(csv.reader(file))
    assert on_site("models.md", HOOK["PLACE"]) == HOOK["PLACE"]


def test_a_reason_cannot_be_markup():
    assert HOOK["cell"]("reason", "<module> & _x_") == "<td>&lt;module&gt; &amp; _x_</td>"
    assert HOOK["cell"]("class", "BertModel") == "<td><code>BertModel</code></td>"


def test_the_counts_are_those_of_the_file():
    text = COUNTS.search(PAGE.read_text("utf-8"))[0]
    assert text == counts(rows(), re.search(r"transformers ([\d.]+):", text)[1])


def test_results_become_rows_in_the_order_of_the_outcomes(tmp_path: Path):
    results = {
        "b": {
            "status": "refused at swap",
            "class": "B",
            "reason": "ValueError: layer 1 (x_y) of B: no | <mask> (a.py:3)",
        },
        "c": {"status": "equal", "class": "C", "by halves": {"status": "equal", "layers": [1, 2]}},
        "a": {"status": "equal", "class": "A", "reason": "none that is shown"},
    }
    table, page = tmp_path / "table.csv", tmp_path / "page.md"
    page.write_text("<!-- counts:begin -->\n\nold\n\n<!-- counts:end -->\n", "utf-8")
    write(results, table, page)
    assert [tuple(row.values()) for row in rows(table)] == [
        ("a", "A", "equal", "", ""),
        ("c", "C", "equal", "in 1 of 2 layers", ""),
        ("b", "B", "refused at swap", "", "layer 1 (x_y): no | <mask>"),
    ]
    assert "| equal | its outputs equal those of the model's own attention | 2 |" in page.read_text("utf-8")


def test_columns_and_outcomes_are_those_of_the_filter():
    assert list(rows()[0]) == list(HEAD)
    assert HEAD[2] == "full"
    assert {row["full"] for row in rows()} <= set(WORDS)


@pytest.mark.skipif(shutil.which("node") is None, reason="Node.js runs the script")
@pytest.mark.parametrize(
    ("text", "outcome", "shown"),
    [
        ("", "", True),
        ("LLAMA causallm", "", True),
        ("llama bert", "", False),
        ("llama", "equal", True),
        ("llama", "refused at swap", False),
    ],
)
def test_the_filter_shows_rows_with_all_words_and_the_outcome(text: str, outcome: str, shown: bool):
    cells = json.dumps(["llama", "LlamaForCausalLM", "equal", "yes", ""])
    call = f"architectureMatches({cells}, {json.dumps(text)}, {json.dumps(outcome)})"
    script = f"{FILTER.read_text('utf-8')}\nconsole.log({call})"
    done = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(shown).lower()
