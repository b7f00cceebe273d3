import math
from io import StringIO

import pytest
from rich.console import Console

from subquad.tools.compare import tables
from subquad.tools.compare.printed import markdown, rich_table
from subquad.tools.compare.schema import MethodReport
from subquad.tools.compare.settings import COMPARED
from subquad.tools.measure.noise import MachineLoad, noise_of
from subquad.tools.report import cells
from subquad.tools.report.content import text_of
from subquad.tools.runs.records import from_plain, to_plain
from tests.tools.report import sample


def printed(report, width):
    out = StringIO()
    Console(file=out, width=width).print(rich_table(sample.record(report)))
    return out.getvalue()


def test_large_figures_have_all_their_digits():
    assert text_of("batch tokens", {"16384": 16384.0, "8192": 8191.6}) == "16384 16,384, 8192 8192"
    assert [text_of("", x) for x in (12345.6, 0.12345, 1e-5, math.inf, 30.0)] == [
        "12,346",
        "0.1235",
        "1e-05",
        "inf",
        "30",
    ]
    assert list(map(cells.significant, (1650.0, 999.6, 99.96, 0.0651))) == ["1,650", "1,000", "100", "0.0651"]


@pytest.mark.parametrize("width", [200, 120, 80])
@pytest.mark.parametrize("make", [sample.encoder, sample.causal])
def test_terminal_fits_and_cuts_nothing(make, width):
    text = printed(make(), width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text


def test_terminal_is_one_table_at_160_and_several_at_80():
    report = sample.encoder()
    assert printed(report, 160).count("baseline") == 1
    assert printed(report, 80).count("baseline") == 4  # quality, task, and speed in two parts
    del report["task"]
    for method in report["methods"]:
        method.pop("task", None)
    assert printed(report, 80).count("baseline") == 3


def test_terminal_says_what_it_must():
    text = printed(sample.encoder(), 200)
    row = next(line for line in text.splitlines() if line.startswith("i-clustered:clusters=100,topk=32"))
    for figure in ("(recommended at 2,048 and 4,096 tokens)", "0.9958", "0.9908", "↓0.88×", "1.13×", "0.9920", "24.0"):
        assert figure in row
    for fact in ("'lha' has learned parameters", "(4 of 6 layers)", "layers 4, 5 stay exact", "Recommendation"):
        assert fact in text
    methods = [line.split()[0] for line in text.splitlines() if line.startswith(("full", "shared", "oracle"))]
    assert methods == ["full", "shared-full", "oracle-top:topk=32"]


def test_a_report_that_does_not_say_the_lengths_marks_its_one_choice():
    report = sample.encoder()
    del report["recommendation"]["by_length"]
    marked = [line for line in tables.main_table(sample.record(report)).lines if line.recommended]
    assert [(line.name, line.marks) for line in marked] == [(report["recommendation"]["choice"], ["recommended"])]


def test_a_column_of_sizes_has_one_number_of_decimals():
    report = sample.encoder()
    for method, ms in zip(report["methods"], (0.0412, 9.876, 41.25, 640.4), strict=False):
        method["model"]["512"] |= {"ms": ms, "ms_low": ms, "ms_high": 2 * ms, "extra_mib": 100 * ms}
    table = tables.model_table(sample.record(report))
    place = {(column.group, column.head): i for i, column in enumerate(table.columns)}
    shown = {
        head: [line.cells[place["512 tokens", head]].text for line in table.lines[:4]]
        for head in ("ms", "quartiles", "extra MiB")
    }
    assert shown["ms"] == ["0.04", "9.88", "41.25", "640.40"]
    assert shown["quartiles"][2:] == ["41.25 to 82.50", "640.40 to 1,280.80"]
    assert shown["extra MiB"] == ["4.12", "987.60", "4,125.00", "64,040.00"]
    assert cells.size(640.4).text == "640"


def test_the_default_rows_fit_80_columns_and_nothing_is_cut():
    report = sample.encoder()
    report["recommendation"] |= {"choice": "full", "by_length": {"512": "full"}}
    for method, name in zip(report["methods"][1:], COMPARED, strict=False):
        method["method"] = name
    report["methods"][4]["method"] = "lsh:buckets=16,bucket_size=80,tail=16"  # the longest
    text = printed(report, 80)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert "  buckets=16," in text


def test_language_models_have_perplexity_and_fidelity_and_no_cosine():
    text = printed(sample.causal(), 120)
    assert "perplexity" in text
    assert "24.65" in text
    assert "0.9861" in text
    assert "cosine" not in text
    assert text.count("looks at the future") == 1


@pytest.mark.parametrize("make", [sample.causal, sample.encoder])
def test_tokens_a_second_are_those_without_padding(make):
    report = make()
    length = tables.model_length(sample.record(report))
    rates = rates_of(report)
    report["settings"]["batch_tokens"] = {length: 2.5 * int(length)}
    assert rates_of(report) == pytest.approx([2.5 * rate for rate in rates], abs=2)


def rates_of(report):
    """The column of tokens a second at the model's own length, which without batches are the length / the time."""
    table = tables.model_table(sample.record(report))
    at = next(i for i, column in enumerate(table.columns) if column.head == "tokens/s")
    length = tables.model_length(sample.record(report))
    ms = [method["model"][length]["ms"] for method in report["methods"] if method["status"] != "refused"]
    rates = [float(line.cells[at].text.replace(",", "")) for line in table.lines]
    if "batch_tokens" not in report["settings"]:
        assert sorted(rates) == pytest.approx(sorted(1e3 * int(length) / each for each in ms), abs=1)
    return rates


def test_untrusted_text_is_no_markup():
    report = sample.encoder()
    report["model"]["name"] = "[red]x[/red] | <script>`*"
    assert "[red]x[" in printed(report, 120).replace("\n", "") or "red]" in printed(report, 120)
    assert "\\|" in markdown(sample.record(report)).splitlines()[0]
    assert "<script" not in markdown(sample.record(report)).replace("\\<", "")


@pytest.mark.parametrize(
    ("make", "milliseconds"),
    [
        (sample.encoder, ["0.78", "9.01", "0.92", "3.52", "13.49", "2,255.06", "644.4", "91.3"]),
        (sample.causal, ["0.78", "9.01", "35.43", "10.2", "141.1", "563.9", "161", "2,255", "644"]),
    ],
)
def test_markdown_holds_every_fact(make, milliseconds):
    report = make()
    text = markdown(sample.record(report), list(tables.PLOTS)).replace("\\", "")
    facts = [report["command"], report["created"], report["recommendation"]["headline"], "0.99"]
    facts += [*report["notes"], *report["recommendation"]["reasons"], *report["versions"].values()]
    facts += [m["method"] for m in report["methods"]] + [m["reason"] for m in report["methods"] if "reason" in m]
    facts += [f"| {time} |" for time in milliseconds]
    facts += [f"({name})" for name in tables.PLOTS]
    assert [fact for fact in facts if fact not in text] == []


def test_markdown_tables_are_rectangular():
    for block in markdown(sample.record(sample.encoder())).split("\n\n"):
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


@pytest.mark.parametrize(("value", "text"), [(1.3, "≈1.30×"), (0.7, "≈0.70×"), (1.0, "≈1.00×"), (None, "–")])
def test_a_speedup_within_the_noise_is_neither_faster_nor_slower(value, text):
    assert cells.speedup(value, "within the noise") == cells.Cell(text, "missing" if value is None else "tie")
    assert cells.speedup(1.3, "faster") == cells.speedup(1.3)


def test_no_tie_is_green_or_bold_in_the_terminal_even_in_the_recommended_row():
    report = noisy()
    segments = list(
        Console(width=300, color_system="standard", file=StringIO()).render(rich_table(sample.record(report)))
    )
    ties = [segment for segment in segments if "≈" in segment.text and "×" in segment.text]
    assert len(ties) == 3 * len(sample.ENCODER)
    assert not any(
        segment.style.bold or (segment.style.color and segment.style.color.name == "green") for segment in ties
    )
    clear = [
        s
        for s in Console(width=300, file=StringIO()).render(rich_table(sample.record(sample.encoder())))
        if "1.34×" in s.text
    ]
    assert clear[0].style.bold  # as elsewhere in that row
    assert clear[0].style.color.name == "green"


def noisy():
    """A run in which everything lies within the noise."""
    report = sample.encoder()
    for method in report["methods"]:
        for part in ("model", "op"):
            for costs in method.get(part, {}).values():
                costs |= {} if method["status"] == "exact" else {"verdict": "within the noise"}
        if "crossover" in method:
            method["crossover"] = None
    load = MachineLoad(0.61, 7.4, 2)
    report["noise"] |= to_plain(noise_of(load, [1.4])) | {
        part: dict.fromkeys(report["noise"][part], 1.4) for part in ("model", "op")
    }
    return report


def test_a_busy_machine_is_said_in_the_box_of_the_terminal_and_above_the_advice_in_markdown():
    said = "The machine was busy: exact attention timed against itself differs by up to 40 %"
    text = printed(noisy(), 300)
    assert text.index("Recommendation ─") < text.index(said) < text.index(noisy()["recommendation"]["headline"])
    text = markdown(sample.record(noisy()))
    assert text.index(f"**{said}") < text.index("## Methods")
    assert text.count(said) == 1
    for text in (printed(noisy(), 80), markdown(sample.record(noisy()))):
        assert "other processes used 61 % of the processors' time" in " ".join(text.split())
        assert "Repeat the command on an idle machine" in " ".join(text.split())
    quiet = markdown(sample.record(sample.encoder()))
    assert "busy" not in quiet
    assert "Noise: exact attention timed against itself differs by up to 3.0 %" in quiet


@pytest.mark.parametrize("make", [sample.encoder, sample.causal])
def test_every_length_with_a_speed_of_the_model_has_a_fidelity(make):
    report = make()
    for table in (
        tables.speed_table(sample.record(report)),
        tables.main_table(sample.record(report)),
        tables.model_table(sample.record(report)),
    ):
        heads = {(column.group.split()[0], column.head) for column in table.columns if column.group}
        lengths = {group for group, head in heads if head == "speed-up"}
        assert lengths == {f"{int(n):,}" for n in report["methods"][0]["model"]}
        assert {group for group, head in heads if head in ("fidelity", "cosine mean")} == lengths
        for line in table.lines:
            cells_of = {
                (c.group.split()[0], c.head): cell for c, cell in zip(table.columns, line.cells, strict=True) if c.group
            }
            timed = [n for n in lengths if cells_of[n, "speed-up"].tone != "missing"]
            near = [cells_of.get((n, "fidelity")) or cells_of[n, "cosine mean"] for n in timed]
            assert timed
            assert all(cell.tone != "missing" for cell in near)


def test_the_number_of_texts_behind_a_fidelity_is_said():
    legend = tables.legend(sample.record(sample.encoder()))
    assert "over 48 passages at 512, 5 sequences at 2,048, 1 sequence at 4,096" in legend
    assert "exact perplexity / this one's" in tables.legend(sample.record(sample.causal()))


def test_times_without_fidelity_say_so():
    text = markdown(sample.record(sample.encoder()), list(tables.PLOTS))
    section = text[text.index("## One attention call") :].split("\n\n")
    assert section[1] == tables.OP_NOTE
    assert "these times have no fidelity" in tables.PLOTS["time-vs-length.png"][1]
    assert not any(
        column.head == "faster from" for column in tables.main_table(sample.record(sample.encoder())).columns
    )


@pytest.mark.parametrize(
    ("crossover", "text"),
    [
        (3142.0, "3,100"),
        (512.0, "≤512"),
        (None, "none"),
        (16000.0, "16,000"),
        (987.0, "990"),
        (2048.0, "≤2,048"),  # a measured length: below it the noise hides where
    ],
)
def test_crossover(crossover, text):
    method = from_plain(MethodReport, sample.encoder()["methods"][4] | {"crossover": crossover})
    assert tables.crossover(method).text == text


def test_fidelity_below_what_was_asked_for_is_told():
    assert cells.kept(0.98, 0.99).tone == "low"
    assert cells.kept(0.99, 0.99).tone == ""
    assert cells.kept(0.98, None).tone == ""
