"""At every width of a terminal all figures are there: a table that is too wide comes in parts."""

import io

import pytest
from rich.console import Console
from rich.table import Table as RichTable

from subquad.research.papers import write as experiment_write
from subquad.research.papers.results import Header, Results
from subquad.research.papers.results import Table as ExperimentTable
from subquad.research.training import model_card as training_card
from subquad.tools.bench import tables as bench_tables
from subquad.tools.calibrate import adapter_card
from subquad.tools.compare import tables
from subquad.tools.compare.printed import rich_table
from subquad.tools.inspect import tables as inspect_tables
from subquad.tools.plan import tables as plan_tables
from subquad.tools.report.content import Column, Line, ReportTable
from subquad.tools.report.terminal import Parts, plain_table, rich_of
from tests.tools.report import sample, sample_bench, sample_inspect, sample_plan


def printed(table, width):
    out = io.StringIO()
    Console(file=out, width=width).print(table)
    return out.getvalue()


def figures(*found):
    """The figures of tables: cells that do not fold."""
    return {cell.text for table in found for line in table.lines for cell in line.cells if len(cell.text) < 12}


def compared():
    report = sample.record(sample.encoder())
    found = (tables.speed_table(report), tables.task_table(report), tables.quality_table(report))
    return rich_table(report), figures(*found)


def inspected():
    report = sample_inspect.report()
    return inspect_tables.rich_table(report), figures(
        inspect_tables.summary(report), inspect_tables.spectrum(report.spectrum)
    )


def planned():
    report = sample_plan.report()
    return plan_tables.rich_table(report), figures(plan_tables.verified(report), plan_tables.layers(report))


def benched():
    report = sample_bench.report()
    cells = [cell.text for each in report.cells if each.status == "measured" for cell in bench_tables._row(each)]
    return bench_tables.rich_table(report), set(cells)


def calibrated():
    layers = {str(n): {"error": n / 7 + 0.1, "utility": 0.5, "keys": 40.0 * (n + 1)} for n in range(3)}
    record = {
        "history": [{"step": 0, "layers": layers}], "best": dict.fromkeys(layers, 0), "ended": "all steps done",
        "seconds": 9.0, "passages": {"tokens": 64}, "refused": {"3": "it has a window"},
    }  # fmt: skip
    return adapter_card.rich_record(record), {cell for row in adapter_card.layer_rows(record) for cell in row}


def trained():
    test = {f"metric_{n}": 1 / (n + 3) for n in range(12)}
    record = {
        "task": {"summary": "A task", "metric": "metric_3"}, "settings": {"model": {"method": "full"}}, "test": test,
        "baselines": {"chance": dict.fromkeys(test, 0.125)}, "steps": 1234, "training_seconds": 5.5,
    }  # fmt: skip
    return training_card.rich_record(record), {f"{value:.4f}" for value in test.values()} | {"0.1250", "1,234"}


def reproduced():
    columns = ["method", *(f"published accuracy at {2**n:,} tokens" for n in range(9))]
    rows = [[name, *((n + 1) / 7 for n in range(9))] for name in ("full", "clustered")]
    header = Header(
        name="x", title="X", source="a paper", scale="small", command="c", settings={}, deviations=(), machine={},
        seconds=1.0,
    )  # fmt: skip
    results = Results(summary="What.", tables=[ExperimentTable(title="T", columns=columns, rows=rows)])
    record = experiment_write.as_record(header, results, {})
    return experiment_write.rich_record(record), {f"{(n + 1) / 7:.4g}" for n in range(9)}


@pytest.mark.parametrize("width", [60, 80, 120, 240])
@pytest.mark.parametrize("make", [compared, inspected, planned, benched, calibrated, trained, reproduced])
def test_every_figure_is_there(make, width):
    table, wanted = make()
    text = printed(table, width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert [figure for figure in wanted if figure not in text] == []
    assert len(wanted) > 3


def test_a_table_that_fits_is_in_one_part_and_a_wider_one_repeats_its_first_column():
    table = plain_table(["name", *"abcdef"], [["first", *(f"{n}.{'5' * 8}" for n in range(6))]])
    assert printed(table, 120).count("first") == 1
    assert printed(table, 40).count("first") == 3


def test_a_part_ends_with_a_group_where_it_can():
    columns = [Column(head, group) for group in ("g1", "g2") for head in ("aaaa", "bbbb", "cccc")]
    table = rich_of(ReportTable(columns, [Line("row", [plan_tables.Cell("0.123456")] * 6)], first="name"), False)
    parts = printed(table, 45).split("\n\n")
    assert [part.count("g1") for part in parts] == [3, 0]
    assert [part.count("g2") for part in parts] == [0, 3]


def test_a_group_that_is_too_wide_is_taken_apart():
    table = rich_of(ReportTable([Column("head", "g")] * 6, [Line("row", [plan_tables.Cell("0.123456")] * 6)]), False)
    text = printed(table, 30)
    assert text.count("0.123456") == 6
    assert max(map(len, text.splitlines())) <= 30


def test_a_table_without_columns_of_figures_shows_its_rows():
    def part(columns):
        table = RichTable()
        table.add_column("name")
        table.add_row("alone")
        return table

    assert "alone" in printed(Parts(part, []), 60)
