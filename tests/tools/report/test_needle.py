"""The tables and the plot of `subquad needle`."""

import io
import json
import math
from dataclasses import replace

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from rich.console import Console

from subquad.tools.needle.plots import PLOTS, grid
from subquad.tools.needle.schema import NeedleReport
from subquad.tools.needle.tables import markdown, of_task, rich_table, summary
from subquad.tools.needle.write import write_needle
from subquad.tools.report import drawing
from subquad.tools.runs.records import from_plain
from tests.tools.report import sample_needle as sample


def printed(report, width):
    out = io.StringIO()
    Console(file=out, width=width).print(rich_table(report))
    return out.getvalue()


def rows(table):
    return {line.name: [cell.text for cell in line.cells] for line in table.lines}


@pytest.fixture(scope="module")
def figure():
    with drawing.look():
        made = grid(sample.report())
        FigureCanvasAgg(made).draw()
    return made


# ---------------------------------------------------------------------- tables


def test_rows_are_methods_with_means_over_tasks_and_depths():
    table = summary(sample.report())
    heads = ["mean", "niah_single", "fwe", "right"]
    assert [(column.group, column.head) for column in table.columns] == [
        (group, head) for group in ("2,048 tokens", "4,096 tokens") for head in heads
    ]
    assert rows(table) == {
        "full": ["-0.400", "-0.200", "-0.600", "100.0 % [51.0, 100.0]"] * 2,
        "clustered-tail": [
            "≈-0.015 [-0.065, 0.035]", "≈-0.010 [-0.060, 0.040]", "≈-0.020 [-0.070, 0.030]", "100.0 % [51.0, 100.0]",
            "≈-0.030 [-0.080, 0.020]", "≈-0.020 [-0.070, 0.030]", "≈-0.040 [-0.090, 0.010]", "100.0 % [51.0, 100.0]",
        ],
        "local:window=512+keep": [
            "-3.000 [-3.050, -2.950]", "-2.000 [-2.050, -1.950]", "-4.000 [-4.050, -3.950]", "58.3 % [19.5, 89.0]",
            "-6.000 [-6.050, -5.950]", "-4.000 [-4.050, -3.950]", "-8.000 [-8.050, -7.950]", "58.3 % [19.5, 89.0]",
        ],
        "oracle-top": [
            "≈0.030 [-0.020, 0.080]", "≈0.020 [-0.030, 0.070]", "≈0.040 [-0.010, 0.090]", "100.0 % [51.0, 100.0]",
            *["–"] * 4,
        ],
    }  # fmt: skip
    assert [line.marks for line in table.lines] == [["baseline"], [], [], ["oracle"]]


def test_one_task_has_no_mean():
    report = sample.report()
    report.settings["tasks"] = ["niah_single"]
    assert [column.head for column in summary(report).columns] == ["niah_single", "right"] * 2


def test_the_table_of_a_task_has_its_depths():
    table = of_task(sample.report(), "niah_single")
    assert [column.head for column in table.columns[:6]] == ["0", "0, right", "0.5", "0.5, right", "1", "1, right"]
    figures = rows(table)
    half, all_right = "50.0 % [9.5, 90.5]", "100.0 % [34.2, 100.0]"
    assert figures["local:window=512+keep"][:6] == [
        *("-4.000 [-4.050, -3.950]", half),
        *("-2.000 [-2.050, -1.950]", half),
        *("≈0.000 [-0.050, 0.050]", all_right),
    ]
    assert figures["full"][:2] == ["-0.200", all_right]
    assert [column.head for column in of_task(sample.report(), "fwe").columns] == ["all", "all, right"] * 2


def test_what_is_not_finite_is_missing_and_makes_no_mean():
    report = sample.report()
    cells = report.methods[1].cells
    cells[0] = replace(cells[0], log_likelihood=None, difference=None, differences=None, interval=None)
    figures = rows(summary(report))["clustered-tail"]
    assert figures[:3] == ["–", "–", "≈-0.020 [-0.070, 0.030]"]
    assert figures[4] == "≈-0.030 [-0.080, 0.020]"


def test_one_sample_has_no_interval_of_its_difference():
    report = sample.report()
    for each in report.methods[1].cells:
        each.differences[:] = [each.difference]
    figures = rows(summary(report))["clustered-tail"]
    assert figures[:3] == ["-0.015", "-0.010", "-0.020"]


def test_depths_of_one_sample_are_not_independent():
    """Differences of opposite depths cancel out in each sample, so their mean has no spread."""
    report = sample.report()
    for each in report.methods[1].cells:
        each.differences[:] = {0.0: [-0.3, 0.3], 0.5: [0.0, 0.0], 1.0: [0.3, -0.3], None: [0.0, 0.0]}[each.depth]
    assert rows(summary(report))["clustered-tail"][1] == "≈-0.010 [0.000, 0.000]"


def test_a_report_of_an_earlier_version_has_its_tasks_and_no_intervals_of_differences(tmp_path):
    report = sample.earlier()
    table = summary(report)
    assert [column.head for column in table.columns[:4]] == ["mean", "passkey", "frequent", "right"]
    assert rows(table)["clustered-tail"][:4] == ["-0.015", "-0.010", "-0.020", "100.0 % [51.0, 100.0]"]
    assert "### passkey" in markdown(report)
    assert panels(grid(report))[0].texts[0].get_text() == "-0.02\n100 %"
    assert from_plain(NeedleReport, json.loads(write_needle(report, tmp_path)[-1].read_text())) == report


@pytest.mark.parametrize("width", [240, 80, 50])
def test_the_table_fits_every_terminal(width):
    lines = printed(sample.report(), width).splitlines()
    assert all(len(line) <= width for line in lines)
    words = " ".join(lines)
    for word in ("clustered-tail", "-0.015", "-6.000", "58.3 %", "2,048", "baseline", "oracle", "a-model"):
        assert word in words


def test_markdown_has_all_tables_the_plot_the_notes_and_the_command():
    page = markdown(sample.report(), ["needle.png"])
    assert page.startswith("# a-model: retrieval from long prompts, 2 prompts per task and depth\n")
    for part in (
        "![needle.png](needle.png)",
        "### niah_single",
        "### fwe",
        r"oracle-top \[was\] left out",
        "--samples 2",
        r"≈-0.015 \[-0.065, 0.035\]",
        "Brackets are 95 % intervals",
    ):
        assert part in page


# ---------------------------------------------------------------------- the plot


def panels(figure):
    return [ax for ax in figure.axes if ax.images and ax.texts]


def test_a_panel_for_each_method_and_task_with_a_cell_for_each_depth_and_length(figure):
    assert len(panels(figure)) == 6  # exact attention has none
    local = panels(figure)[2]
    assert local.get_ylabel().startswith("local:")
    values = local.images[0].get_array().tolist()
    assert values == [[-4.0, -8.0], [-2.0, -4.0], [0.0, 0.0]]
    assert [label.get_text() for label in local.get_yticklabels()] == ["0", "0.5", "1"]
    assert [label.get_text() for label in local.get_xticklabels()] == ["2,048", "4,096"]
    assert [text.get_text() for text in local.texts][:2] == ["-4.00\n50 %", "-8.00\n50 %"]
    assert local.texts[-1].get_text() == "≈+0.00\n100 %"


def test_tasks_stand_above_the_columns(figure):
    assert [ax.get_title(loc="left") for ax in panels(figure)] == ["niah_single", "fwe", *[""] * 4]


def test_what_was_not_measured_is_empty(figure):
    oracle = panels(figure)[4]
    shown = oracle.images[0].get_array().filled(math.nan)
    assert [math.isnan(value) for value in shown[0]] == [False, True]
    assert len(oracle.texts) == 3


def test_colours_are_symmetric_and_noise_is_pale(figure):
    assert {(ax.images[0].norm.vmin, ax.images[0].norm.vmax) for ax in panels(figure)} == {(-8.0, 8.0)}
    report = sample.report()
    pale = grid(replace(report, methods=report.methods[:2]))
    assert {(ax.images[0].norm.vmin, ax.images[0].norm.vmax) for ax in panels(pale)} == {(-0.1, 0.1)}


def test_a_difference_that_rounds_to_0_has_no_minus():
    report = sample.report()
    cells = report.methods[1].cells
    cells[0] = replace(cells[0], difference=-0.001)
    assert panels(grid(report))[0].texts[0].get_text() == "≈+0.00\n100 %"


@pytest.mark.parametrize("methods", [2, 4])
def test_figures_stay_inside_the_picture(methods):
    report = sample.report()
    with drawing.look():
        figure = grid(replace(report, methods=report.methods[:methods]))
        FigureCanvasAgg(figure).draw()
    renderer = FigureCanvasAgg(figure).get_renderer()
    label = figure.axes[-1].yaxis.label.get_window_extent(renderer)
    assert figure.bbox.y0 <= label.y0
    assert label.y1 <= figure.bbox.y1
    for ax in panels(figure):
        for text in ax.texts:
            box = text.get_window_extent(renderer)
            assert figure.bbox.x0 <= box.x0
            assert box.x1 <= figure.bbox.x1
            assert box.width < ax.get_window_extent(renderer).width / len(sample.LENGTHS)


# ---------------------------------------------------------------------- files


def test_files_are_written_with_the_json_last(tmp_path):
    report = sample.report()
    paths = write_needle(report, tmp_path)
    assert [path.name for path in paths] == ["report.md", *PLOTS, "report.json"]
    assert from_plain(NeedleReport, json.loads(paths[-1].read_text())) == report
    assert paths[1].read_bytes().startswith(b"\x89PNG")
