import copy
from io import StringIO

import pytest
from rich.console import Console

from subquad.report import cells, content
from subquad.report.tables import markdown, rich_table
from tests.report import sample


def printed(report, width):
    out = StringIO()
    Console(file=out, width=width).print(rich_table(report))
    return out.getvalue()


@pytest.mark.parametrize("width", [200, 120, 80])
@pytest.mark.parametrize("make", [sample.encoder, sample.causal])
def test_terminal_fits_and_cuts_nothing(make, width):
    text = printed(make(), width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text


def test_terminal_is_one_table_at_120_and_several_at_80():
    report = sample.encoder()
    assert printed(report, 120).count("baseline") == 1
    assert printed(report, 80).count("baseline") == 3  # quality, task, speed
    del report["task"]
    for method in report["methods"]:
        method.pop("task", None)
    assert printed(report, 80).count("baseline") == 2


def test_terminal_says_what_it_must():
    text = printed(sample.encoder(), 200)
    row = next(line for line in text.splitlines() if line.startswith("i-clustered:clusters=100,topk=32"))
    for figure in ("recommended", "0.9958", "0.9908", "↓0.88×", "1.13×", "0.9920", "24.0", "1,200"):
        assert figure in row
    for fact in ("'lha' has learned parameters", "(4 of 6 layers)", "layers 4, 5 stay exact", "Recommendation"):
        assert fact in text
    methods = [line.split()[0] for line in text.splitlines() if line.startswith(("full", "shared", "oracle"))]
    assert methods == ["full", "shared-full", "oracle-top:topk=32"]


def test_language_models_have_perplexity_and_fidelity_and_no_cosine():
    text = printed(sample.causal(), 120)
    assert "perplexity" in text
    assert "24.65" in text
    assert "0.9861" in text
    assert "cosine" not in text
    assert text.count("looks at the future") == 1


def test_untrusted_text_is_no_markup():
    report = sample.encoder()
    report["model"]["name"] = "[red]x[/red] | <script>`*"
    assert "[red]x[" in printed(report, 120).replace("\n", "") or "red]" in printed(report, 120)
    assert "\\|" in markdown(report).splitlines()[0]
    assert "<script" not in markdown(report).replace("\\<", "")


@pytest.mark.parametrize("make", [sample.encoder, sample.causal])
def test_markdown_holds_every_fact(make):
    report = make()
    text = markdown(report, list(content.FIGURES)).replace("\\", "")
    facts = [report["command"], report["created"], report["recommendation"]["headline"], "0.99"]
    facts += [*report["notes"], *report["recommendation"]["reasons"], *report["versions"].values()]
    facts += [m["method"] for m in report["methods"]] + [m["reason"] for m in report["methods"] if "reason" in m]
    facts += [cells.size(c["ms"]).text for m in report["methods"] for c in m.get("op", {}).values()]
    facts += [f"({name})" for name in content.FIGURES]
    assert [fact for fact in facts if fact not in text] == []


def test_markdown_tables_are_rectangular():
    for block in markdown(sample.encoder()).split("\n\n"):
        if block.startswith("|"):
            assert len({line.count("|") for line in block.splitlines()}) == 1


@pytest.mark.parametrize(
    ("value", "text", "tone"),
    [
        (1.42, "1.42×", "faster"),
        (0.62, "↓0.62×", "slower"),
        (0.996, "1.00×", ""),
        (1.004, "1.00×", ""),
        (0.0123, "↓0.012×", "slower"),
        (float("nan"), "–", "missing"),
        (None, "–", "missing"),
    ],
)
def test_speedup(value, text, tone):
    assert cells.speedup(value) == cells.Cell(text, tone)


@pytest.mark.parametrize(
    ("crossover", "text"), [(3142.0, "3,100"), (512.0, "≤512"), (None, "none"), (16000.0, "16,000"), (987.0, "990")]
)
def test_crossover(crossover, text):
    method = copy.deepcopy(sample.encoder()["methods"][4]) | {"crossover": crossover}
    assert cells.crossover(method).text == text


def test_fidelity_below_what_was_asked_for_is_told():
    assert cells.kept(0.98, 0.99).tone == "low"
    assert cells.kept(0.99, 0.99).tone == ""
    assert cells.kept(0.98, None).tone == ""
