"""Figures that README and the documentation quote from files of results are in these files."""

from pathlib import Path

import pytest

from tests.figures import citations_without_link, figures, unmarked_lines, wrong_figures
from tests.test_prose import ROOT, name_of

RESULTS = ROOT / "benchmarks" / "results"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), ROOT / "benchmarks" / "README.md"]


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_quoted_figures_are_in_the_files_that_markers_name(path: Path):
    text = path.read_text("utf-8")
    wrong = wrong_figures(text, ROOT) + unmarked_lines(text)
    assert not wrong, f"{name_of(path)}\n" + "\n".join(wrong)


@pytest.mark.parametrize("path", sorted((ROOT / "docs").rglob("*.md")), ids=name_of)
def test_files_of_results_are_linked(path: Path):
    wrong = citations_without_link(path.read_text("utf-8"))
    assert not wrong, f"{name_of(path)}\n" + "\n".join(wrong)


# ---------------------------------------------------------------------- the checks themselves


@pytest.fixture
def root(tmp_path: Path) -> Path:
    rows = ["tokens | speed-up | error", "2,048 | 1.7461× | 0.0712", "4096 | −3.2 % | 1.5e-3", "9 | 96 ms | 1.47·10¹⁴"]
    text = "".join(f"| {row} |\n" for row in rows) + "torch 2.13.0\n"
    (tmp_path / "sheet.md").write_text(text, "utf-8")
    (tmp_path / "other.json").write_text('{"seconds": 12.25}', "utf-8")
    return tmp_path


def marked(line: str, marker: str = "sheet.md") -> str:
    return f"{line} <!-- figures: {marker} -->\n"


@pytest.mark.parametrize(
    "line",
    [
        "It is 1.75× as fast at 2,048 tokens, with an error of 0.071.",
        "It is 1.746× as fast, at 4,096 tokens 3 % slower, −3.2 %.",
        "In 96 ms, an error of 0.0015; 17 texts on 2 threads of a Zen 5.",
        "A bound of 1.5·10¹⁴, and 1.47e14.",
        "With `window=0.33` and [another page](a_9.99.md), 1.7×.",
    ],
)
def test_figures_that_round_to_those_of_the_file_are_right(root: Path, line: str):
    assert wrong_figures(marked(line), root) == []


@pytest.mark.parametrize(
    ("line", "figure"),
    [
        ("It is 1.76× as fast.", "1.76×"),
        ("It is 1.74× as fast.", "1.74×"),
        ("It is 2× as fast at 1,024 tokens: 1.75×.", "1,024"),
        ("An error of 0.0713.", "0.0713"),
        ("It is +3.2 % slower.", "+3.2%"),
        ("It is ≈+3.2 % slower.", "+3.2%"),
        ("It is 4 % slower.", "4%"),
        ("In 97 ms.", "97ms"),
        ("With torch 2.13.", "2.13"),
        ("A bound of 1.4·10¹⁴.", "1.4e14"),
    ],
)
def test_a_figure_that_is_not_in_the_file_is_found(root: Path, line: str, figure: str):
    assert wrong_figures(marked(line), root) == [f"line 1: {figure} is not in sheet.md"]


def test_a_figure_may_be_in_any_of_several_files(root: Path):
    assert wrong_figures(marked("1.75× in 12.3 s.", "sheet.md, other.json"), root) == []
    assert wrong_figures(marked("1.75× in 12.4 s.", "sheet.md, other.json"), root) == [
        "line 1: 12.4s is not in sheet.md, other.json"
    ]


def test_a_marker_on_a_line_of_its_own_covers_the_block_that_follows(root: Path):
    text = "<!-- figures: sheet.md -->\n| speed |\n| --- |\n| 1.75× |\n| 1.85× |\n\nNot covered: 1.95×.\n"
    assert wrong_figures(text, root) == ["line 5: 1.85× is not in sheet.md"]


def test_an_exempted_figure_is_not_compared(root: Path):
    assert wrong_figures(marked("A floor of 0.99, 5× and 1,500: 1.75×.", "sheet.md; not 0.99, 5, 1,500"), root) == []


@pytest.mark.parametrize("line", ["1.75× as fast.", "1.75× and 0.071."])
def test_an_exemption_that_is_not_needed_is_an_error(root: Path, line: str):
    wrong = wrong_figures(marked(line, "sheet.md; not 0.071"), root)
    assert wrong == ["line 1: 0.071 need not be exempted: it is not quoted, or it is in the file"]


def test_a_marker_needs_a_file_and_a_figure(root: Path):
    assert wrong_figures(marked("1.75×.", "absent.md"), root) == [
        "line 1: the marker names absent.md, which is not a file"
    ]
    assert wrong_figures(marked("Faster, 5 times."), root) == ["line 1: the marker covers no figure"]
    assert wrong_figures("```text\n" + marked("9.99×") + "```\n", root) == []


def test_a_line_that_quotes_a_result_and_names_its_file_needs_a_marker():
    line = "It is 1.75× as fast ([all rows](../benchmarks/results/engines.md))."
    assert len(unmarked_lines(line)) == 1
    assert unmarked_lines(marked(line, "benchmarks/results/engines.md")) == []
    assert unmarked_lines("| 1.75× | [rows](../benchmarks/results/engines.md) |")
    assert unmarked_lines("All rows to 8,192 tokens are [here](../benchmarks/results/engines.md).") == []
    assert unmarked_lines(f"```text\n{line}\n```\n") == []


def test_a_file_of_results_in_inline_code_needs_a_link():
    assert citations_without_link("All rows are in `benchmarks/results/engines.md`.")
    assert not citations_without_link("All rows are [here](../benchmarks/results/engines.md).")
    assert not citations_without_link("`python benchmarks/engines.py --out benchmarks/results/engines.md`")


def test_figures_of_a_line():
    line = "| 2,048 | 1.75× | 12 × 64 | 30 % | 5 s | 19 | fp32 | 2.13.0 | 512,1024 | `0.5` |"
    assert [figure.text for figure in figures(line)] == ["2,048", "1.75", "30", "5"]
