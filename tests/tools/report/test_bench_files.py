"""A benchmark's tables, CSV and plots."""

import csv
import io
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.image import imread
from rich.console import Console

from subquad.tools.bench.changes import changes
from subquad.tools.bench.crossovers import crossovers
from subquad.tools.bench.plots import PLOTS, figure, plots
from subquad.tools.bench.schema import BenchCell
from subquad.tools.bench.tables import markdown, rich_table
from subquad.tools.bench.write import COLUMNS, csv_of, write_bench
from subquad.tools.measure.noise import MachineLoad, noise_of
from subquad.tools.report import drawing
from subquad.tools.runs.records import to_plain
from tests.tools.report import sample_bench

LEFT_OUT = [("full", 4096), ("clustered", 512)]


def printed(report, width=80):
    out = io.StringIO()
    Console(file=out, width=width).print(rich_table(report))
    return out.getvalue()


def compared():
    """A report in which every sort of change is."""
    report = sample_bench.report()
    old = sample_bench.report(lengths=(256, 512, 128))
    for i, factor in ((1, 0.1), (2, 10.0)):
        names = ("speedup", "speedup_low", "speedup_high")
        old.cells[i] = replace(old.cells[i], **{name: factor * getattr(old.cells[i], name) for name in names})
    return replace(report, changes=changes(replace(old, backend="reference"), report, "old.json"))


# ---------------------------------------------------------------------- text


@pytest.mark.parametrize("width", [80, 120])
def test_the_terminal_needs_80_columns_and_cuts_nothing(width):
    text = printed(compared(), width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text.replace("tokens …", "")


def test_the_terminal_says_all_of_a_cell():
    text = printed(sample_bench.report(not_run=LEFT_OUT))
    block = text[text.index("i-clustered:") :]
    row = next(line for line in block.splitlines() if line.strip().startswith("2,048"))
    assert row.split() == ["2,048", "20.5", "2%", "2.05×", "2.01–2.09", "5.00", "1.00", "5.86"]
    exact = next(line for line in text.splitlines() if line.strip().startswith("2,048"))
    assert exact.split() == ["2,048", "41.9", "2%", "10.2", "2.00", "5.86"]


def test_conclusions():
    for text in (printed(sample_bench.report(not_run=LEFT_OUT), 200), markdown(sample_bench.report(not_run=LEFT_OUT))):
        assert "clustered: faster than SDPA at every length, from 256 tokens on" in text
        assert "topk=64: faster than SDPA from about 1,000 tokens on" in text
        assert "full at 4,096 tokens: not run: predicted 71 s per call" in text
        assert "clustered at 512 tokens: not run: predicted 71 s per call" in text
    short = printed(sample_bench.report(lengths=(256, 512)), 200)
    assert "topk=64: not clearly faster than SDPA up to 512 tokens" in short
    alone = printed(sample_bench.report(lengths=(256,), not_run=[("full", 256)]), 200)
    assert "clustered: no speed-up is known" in alone


def test_a_method_that_was_never_run_is_named_once_with_the_reason():
    never = [("clustered", n) for n in (256, 512)]
    for text in (
        printed(sample_bench.report((256, 512), never), 200),
        markdown(sample_bench.report((256, 512), never)),
    ):
        lines = [line for line in text.partition("Settings")[0].splitlines() if re.search(r"(?<!i-)clustered\b", line)]
        panels = len(sample_bench.PANELS)
        assert [line.strip("•- ") for line in lines] == [
            "clustered at 256, 512 tokens: not run: predicted 71 s per call"
        ] * panels


def test_ties_are_said_and_not_green():
    report = sample_bench.report()
    for i, cell in enumerate(report.cells):
        if cell.method == "clustered" and cell.length in (256, 512):
            report.cells[i] = replace(cell, verdict="within the noise")
    report = replace(report, crossovers=crossovers(report.cells))
    for text in (printed(report, 200), markdown(report)):
        assert "clustered: faster than SDPA from at most 1,024 tokens on; within the noise at 256, 512" in text
        assert text.count("≈2.56×") == text.count("≈5.12×") == len(sample_bench.PANELS)
    segments = Console(width=200, color_system="standard", file=io.StringIO()).render(rich_table(report))
    colors = {
        segment.text.strip(): segment.style.color and segment.style.color.name for segment in segments if segment.style
    }
    assert (colors["≈2.56×"], colors["10.24×"]) == (None, "green")


def test_a_busy_machine_is_said():
    noise = noise_of(MachineLoad(0.61, 7.4, 2), [1.4])
    report = replace(sample_bench.report(), noise=noise)
    for text in (printed(report, 1000), markdown(report)):
        assert "The machine was busy: exact attention timed against itself differs by up to 40 %" in text
        assert "Repeat the command on an idle machine" in text
    for text in (printed(sample_bench.report(), 1000), markdown(sample_bench.report())):
        assert "Noise: exact attention timed against itself differs by up to 2.0 %" in text
        assert "The inputs are random, so these times have no fidelity." in text


def test_no_ring_where_the_noise_hides_the_crossing_and_a_band_shows_it():
    report = sample_bench.report()
    for i, cell in enumerate(report.cells):
        if cell.method.startswith("i-") and cell.length <= 1024:
            report.cells[i] = replace(cell, verdict="within the noise", speedup=1.01)
    report = replace(report, crossovers=crossovers(report.cells))
    with drawing.look():
        ax = figure(report, "speedup.png").axes[0]
    assert [line for line in ax.lines if len(line.get_xdata()) == 1] == []
    band = ax.collections[-1].get_paths()[0].vertices
    assert {round(y, 6) for _, y in band} == {1.02, round(1 / 1.02, 6)}


def test_changes_are_told():
    report = compared()
    for text in (printed(report, 200), markdown(report)):
        assert "1 faster; 1 slower; 10 within the noise" in text
        assert "9 cells are in the earlier run only: full, float32, forward, 128 tokens" in text
        assert "differs: backend: reference then, cpu now" in text
    rows = [line for line in printed(report, 200).splitlines() if ", float32, forward " in line and "256" in line]
    assert [row.split()[4:] for row in rows] == [
        ["↓0.26×", "2.56×", "10.00", "1.00"],
        ["2.56×", "↓0.26×", "0.10", "1.00"],
    ]
    assert "| clustered | float32 | forward | 256 | faster | ↓0.26× | 2.56× | 10.00 | 1.00 | 1.00 |" in markdown(report)


def test_markdown_holds_every_fact_and_its_tables_are_rectangular():
    report = compared()
    text = markdown(report, list(PLOTS)).replace("\\", "")
    facts = [report.command, report.created, *report.notes, *report.versions.values()]
    facts += [*report.hardware.values(), "triton: there is no GPU", *(f"({name})" for name in PLOTS)]
    assert [fact for fact in facts if fact not in text] == []
    for block in markdown(report).split("\n\n"):
        if block.startswith("|"):
            assert len({line.count("|") for line in block.splitlines()}) == 1


def test_csv_has_a_row_a_cell_and_a_column_a_figure():
    report = sample_bench.report(not_run=LEFT_OUT)
    rows = list(csv.DictReader(io.StringIO(csv_of(report))))
    assert len(rows) == len(report.cells) == 45
    assert list(rows[0]) == list(COLUMNS)
    assert set(COLUMNS) == set(BenchCell.__annotations__)
    for row, cell in zip(rows, report.cells, strict=True):
        assert {name: value for name, value in row.items() if value} == {n: str(v) for n, v in to_plain(cell).items()}


# ---------------------------------------------------------------------- plots


def lines(report, name):
    """{panel title: {label: (x, y)}} of a plot."""
    with drawing.look():
        drawn = figure(report, name)
    return {
        ax.get_title(): {
            line.get_label(): (list(line.get_xdata()), list(line.get_ydata()))
            for line in ax.lines
            if not line.get_label().startswith("_")
        }
        for ax in drawn.axes
        if ax.get_visible()
    }


def test_every_panel_has_a_line_for_each_method():
    for name in PLOTS:
        drawn = lines(sample_bench.report(), name)
        assert list(drawn) == ["forward, float32", "forward+backward, float32", "forward, bfloat16"]
        for panel in drawn.values():
            assert set(panel) == {*sample_bench.CROSS} | ({"full (SDPA)"} if name != "speedup.png" else set())
            assert all(x == list(sample_bench.LENGTHS) for x, _ in panel.values())


def test_lines_show_the_figures():
    report = sample_bench.report()
    times = lines(report, "time-per-token.png")["forward, float32"]
    assert times["full (SDPA)"][1] == pytest.approx([5e-3 * n for n in sample_bench.LENGTHS])
    assert times["clustered"][1] == pytest.approx([0.5] * 5)
    assert lines(report, "memory-per-token.png")["forward, bfloat16"]["clustered"][1] == [1500.0] * 5
    assert lines(report, "speedup.png")["forward, float32"]["clustered"][1] == pytest.approx(
        [n / 100 for n in sample_bench.LENGTHS]
    )


def test_bands_are_the_quartiles_and_rings_the_crossovers():
    with drawing.look():
        ax = figure(sample_bench.report(), "speedup.png").axes[0]
    band = ax.collections[0].get_paths()[0].vertices
    assert {round(y / (x / 100), 6) for x, y in band} == {0.98, 1.02}
    with drawing.look():
        times = figure(sample_bench.report(), "time-per-token.png").axes[0]
    flat = times.collections[1].get_paths()[0].vertices  # of `clustered`, after SDPA's
    assert {round(y / 0.5, 6) for _, y in flat} == {0.98, 1.02}
    rings = [line.get_xydata()[0] for line in ax.lines if len(line.get_xdata()) == 1]
    assert [list(ring) for ring in rings] == [[pytest.approx(1000), 1.0]]


def test_what_was_not_run_is_not_drawn():
    report = sample_bench.report(not_run=LEFT_OUT)
    times = lines(report, "time-per-token.png")["forward, float32"]
    assert times["clustered"][0] == [256, 1024, 2048, 4096]
    assert times["full (SDPA)"][0] == [256, 512, 1024, 2048]
    assert lines(report, "speedup.png")["forward, float32"]["clustered"][0] == [256, 1024, 2048]


def test_pngs_are_neither_blank_nor_a_blot():
    drawn = plots(sample_bench.report())
    assert list(drawn) == list(PLOTS)
    for png in drawn.values():
        pixels = imread(io.BytesIO(png), format="png")
        assert pixels.shape[1] >= 1000
        assert 0.005 < np.mean(pixels[..., :3].min(-1) < 0.9) < 0.5


def test_one_length_and_one_panel_are_drawn():
    report = sample_bench.report(lengths=(256,))
    cells = [cell for cell in report.cells if (cell.dtype, cell.passes) == ("float32", "forward")]
    assert list(plots(replace(report, cells=cells))) == list(PLOTS)


@pytest.mark.parametrize("name", PLOTS)
@pytest.mark.parametrize("passes", [("forward",), ("forward", "forward+backward")])
def test_title_and_legend_are_inside_the_picture(name, passes):
    report = sample_bench.report()
    cells = [cell for cell in report.cells if cell.dtype == "float32" and cell.passes in passes]
    long = "i-clustered:clusters=200,bits=31,iterations=20,topk=64"
    cells[2::3] = [replace(cell, method=long) for cell in cells[2::3]]
    with drawing.look():
        drawn = figure(replace(report, cells=cells, crossovers=[]), name)
        renderer = FigureCanvasAgg(drawn).get_renderer()
        drawn.draw(renderer)
        for part in (drawn._suptitle, *drawn.legends):
            box = part.get_window_extent(renderer)
            assert box.x0 >= 0
            assert box.x1 <= drawn.bbox.x1
            assert box.y0 >= 0


def test_without_memory_its_plot_is_left_out_and_an_earlier_one_removed(tmp_path, unpainted):
    report = sample_bench.report()
    assert {path.name for path in write_bench(report, tmp_path)} == {"bench.json", "bench.csv", "bench.md", *PLOTS}
    assert json.loads((tmp_path / "bench.json").read_text()) == to_plain(report)
    cells = [replace(cell, extra_bytes=None, bytes_per_token=None) for cell in report.cells]
    write_bench(replace(report, cells=cells), tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"bench.json", "bench.csv", "bench.md", "time-per-token.png", "speedup.png"}
    assert "memory-per-token.png" not in (tmp_path / "bench.md").read_text()
