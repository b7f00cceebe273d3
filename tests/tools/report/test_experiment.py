"""Tables and plots of experiments: nothing is lost, cut off or unreadable."""

import json
import re
from dataclasses import asdict, replace
from io import BytesIO
from itertools import pairwise

import matplotlib
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.image import imread
from matplotlib.text import Text
from rich.console import Console

from subquad.research.papers.catalogue import NAMES, load
from subquad.research.papers.plots import drawn, plots
from subquad.research.papers.results import Bars, Header, HeatMap, Lines, Results, Table
from subquad.research.papers.write import markdown, rich_results, setting, write_results
from subquad.tools.report.drawing import look

LENGTHS = [2.0**power for power in range(9, 16)]
METHODS = ["full", "i-clustered:clusters=100,topk=32", "clustered:clusters=100", "reformer:rounds=4", "lha@adapter"]
LONG = "a title that says so much of what is shown that it cannot stand in one line above a figure of usual width"


def lines(**others):
    kinds = {
        "file": "time",
        "title": "time per token",
        "x": "tokens",
        "y": "µs per token",
        "log_x": True,
        "log_y": True,
    }
    series = {name: [(n, (i + 1) * n**0.5) for n in LENGTHS] for i, name in enumerate(METHODS)}
    bands = {"full": [(0.9 * y, 1.2 * y) for _, y in series["full"]]}
    return Lines(**kinds | {"series": series, "bands": bands} | others)


def heat_map(**others):
    values = [[i / 9, None, 1 - i / 9] for i in range(len(METHODS))]
    kinds = {"file": "heat", "title": "accuracy", "x": "tokens N", "y": "setting", "columns": ["64", "128", "256"]}
    return HeatMap(**kinds | {"rows": METHODS, "values": values} | others)


def bars(**others):
    series = {name: [1.0 + i, None, 3.0] for i, name in enumerate(METHODS)}
    kinds = {"file": "bars", "title": "error rate", "y": "%", "groups": ["all the digits", "one speaker held out", "c"]}
    return Bars(**kinds | {"series": series, "levels": {"majority": 2.5}} | others)


SHAPES = {
    "lines": lines(),
    "linear": lines(log_x=False, log_y=False, levels={"published, on a graphics card": 120.0, "zero": 0.0}),
    "many-decades": lines(series={"error": [(float(i), 10.0**-i) for i in range(1, 15)]}, bands={}),
    "one-point": lines(series={"full": [(512.0, 3.0)]}, bands={}),
    "labelled": lines(joined=False, labels={"full": [f"full {n:.0f}" for n in LENGTHS]}),
    "many-points": lines(series={"full": [(i + 1.0, 1.0 + i % 7) for i in range(200)]}, bands={}),
    "many-series": lines(series={f"{name} {i}": [(1.0, 2.0), (4.0, 3.0)] for i in range(9) for name in METHODS}),
    "empty-series": lines(series={"full": [(1.0, 2.0), (2.0, 3.0)], "clustered": []}, bands={}),
    "nothing": lines(series={}, bands={}),
    "long-title": lines(title=LONG),
    "heat-map": heat_map(),
    "wide-heat-map": heat_map(columns=[f"i-clustered:clusters={c}" for c in (25, 50, 100)], format=".4f"),
    "small-heat-map": heat_map(columns=["a"], rows=["b"], values=[[None]], title=LONG),
    "flat-heat-map": heat_map(low=1.0, high=1.0),
    "empty-heat-map": heat_map(columns=[], rows=[], values=[]),
    "bars": bars(),
    "many-bars": bars(groups=["recall at 1"] * 9, series={f"lha:buckets={b}": [0.5] * 9 for b in range(9)}),
    "negative-bars": bars(series={"ridge": [-1.0, 2.0, None]}, levels={}),
    "empty-bars": bars(groups=[], series={}, levels={}),
}


@pytest.fixture(scope="module", params=SHAPES)
def figure(request):
    """A figure as it is saved, with its renderer."""
    with look():
        made = drawn("time-memory", SHAPES[request.param])
        renderer = FigureCanvasAgg(made).get_renderer()
        made.draw(renderer)
        yield made, renderer


def boxes(made, renderer):
    written = [text for text in made.findobj(Text) if text.get_visible() and text.get_text().strip()]
    return [(text.get_text(), text.get_window_extent(renderer)) for text in written]


def inside(outer, box, slack=2.0):
    return (
        box.x0 >= outer.x0 - slack
        and box.y0 >= outer.y0 - slack
        and box.x1 <= outer.x1 + slack
        and box.y1 <= outer.y1 + slack
    )


def test_no_text_is_cut_off(figure):
    made, renderer = figure
    ticks = {label for ax in made.axes for axis in (ax.xaxis, ax.yaxis) for label in off_axis(axis)}
    cut = [text for text, box in boxes(made, renderer) if text not in ticks and not inside(made.bbox, box)]
    assert not cut


def off_axis(axis):
    """Labels of ticks beyond the limits, which are not drawn."""
    low, high = sorted(axis.get_view_interval())
    ticks = zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=True)
    return {label.get_text() for at, label in ticks if not low <= at <= high}


def test_axes_keep_most_of_the_figure(figure):
    made, _ = figure
    ax = made.axes[0].get_window_extent()
    assert ax.width > 0.25 * made.bbox.width
    assert ax.height > 0.25 * made.bbox.height


def test_a_title_that_just_fits_is_inside_the_saved_picture():
    """Letters are a little wider in the PNG than where the title is measured."""
    title = "mean square error of the output, entries of q and k of deviation 1"
    saved = plots("performer-approximation", Results(summary="", tables=[], plots=[lines(title=title)]))["time.png"]
    dark = imread(BytesIO(saved), format="png")[..., :3].min(-1) < 0.5
    assert dark.any()
    assert not dark[:, -8:].any()


def test_ticks_do_not_overlap(figure):
    made, renderer = figure
    for axis, side in ((made.axes[0].xaxis, 0), (made.axes[0].yaxis, 1)):
        low, high = sorted(axis.get_view_interval())
        shown = [
            label.get_window_extent(renderer)
            for at, label in zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=True)
            if low <= at <= high and label.get_text() and not label.get_rotation()
        ]
        ends = sorted((box.min[side], box.max[side]) for box in shown)
        assert all(before <= after for (_, before), (after, _) in pairwise(ends))


def test_legend_and_title_are_beside_the_axes(figure):
    made, renderer = figure
    axes = made.axes[0].get_window_extent(renderer)
    outside = [made._suptitle, *made.legends]
    assert not any(axes.overlaps(artist.get_window_extent(renderer)) for artist in outside)


def test_a_logarithmic_axis_has_its_numbers_written_out():
    with look():
        ax = drawn("time-memory", lines()).axes[0]
        assert [label.get_text() for label in ax.get_xticklabels()][-1] == "32,768"
        decades = drawn("time-memory", SHAPES["many-decades"]).axes[0]
        assert 2 <= len(decades.get_yticks()) <= 7


def test_an_empty_series_is_not_in_the_legend():
    with look():
        names = [text.get_text() for text in drawn("x", SHAPES["empty-series"]).legends[0].get_texts()]
        assert names == ["full"]
        assert drawn("x", SHAPES["nothing"]).legends == []


def test_what_was_not_measured_is_marked():
    with look():
        assert [text.get_text() for text in drawn("x", heat_map()).axes[0].texts[:3]] == ["0.00", "–", "1.00"]
        assert [text.get_text() for text in drawn("x", bars()).axes[0].texts] == ["–"] * len(METHODS)


def test_numbers_in_squares_stand_out_against_them():
    with look():
        texts = drawn("x", heat_map(values=[[0.0, 0.5, 1.0]] * len(METHODS))).axes[0].texts[:3]
    assert [text.get_color() for text in texts] == ["white", "white", "black"]


def test_plots_are_pngs_that_show_something_and_leave_matplotlib_as_it_was():
    before = dict(matplotlib.rcParams)
    drawings = plots("time-memory", Results(summary="", tables=[], plots=[lines(), heat_map(), bars()]))
    assert dict(matplotlib.rcParams) == before
    assert list(drawings) == ["time.png", "heat.png", "bars.png"]
    for png in drawings.values():
        assert 0.005 < np.mean(imread(BytesIO(png), format="png")[..., :3].min(-1) < 0.9) < 0.7


# ---------------------------------------------------------------------- text


HEADER = Header(
    name="time-memory",
    title="Time and memory",
    source="Vyas et al. 2020, figure 4",
    scale="small",
    command="subquad reproduce time-memory --scale small",
    settings={"lengths": (512, 1024), "model": None},
    deviations=("A processor.",),
    machine={"processor": "one"},
    seconds=1234.5,
)
TABLE = Table(
    title="Times",
    columns=["method", "a | b", "[x]"],
    rows=[["full", 1.0, None], ["two\nlines | bar", 12345.678, 7]],
    note="A note.",
)


def test_bars_and_new_lines_do_not_break_a_table():
    page = markdown(HEADER, Results(summary="What.", tables=[TABLE]), ["time.png"])
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert rows == [
        r"| method | a \| b | [x] |",
        "| --- | --- | --- |",
        "| full | 1 | – |",
        r"| two lines \| bar | 12,346 | 7 |",
    ]


def test_a_page_says_all_that_a_reader_must_know():
    page = markdown(HEADER, Results(summary="What.", tables=[TABLE]), ["time.png"])
    for said in (
        "# Time and memory", "figure 4", "`subquad reproduce time-memory --scale small`", "What.", "A note.",
        "![time](time.png)", "- lengths: 512, 1,024", "- model: none", "- A processor.", "processor one; 1,234 seconds",
    ):  # fmt: skip
        assert said in page
    assert "Deviations" not in markdown(replace(HEADER, deviations=()), Results(summary="", tables=[]), [])


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("model", "", "model: the encoder of the extra `demo`"),
        ("head_dim", 64, "head dim: 64"),
        ("lengths", (512, 4096), "lengths: 512, 4,096"),
        ("training", {"learning_rate": 5e-05, "stop_at": 0.998}, "training: learning rate 5e-05, stop at 0.998"),
        ("recipe", {"task": {"most": 40}, "effort": 10.0}, "recipe: task (most 40); effort 10"),
        ("models", (("full", 2), ("lsh-4", 0)), "models: (full, 2); (lsh-4, 0)"),
        ("methods", ["full", "i-clustered:clusters=8,topk=8"], "methods: full, `i-clustered:clusters=8,topk=8`"),
        ("rows", ("local, wide", "local"), "rows: local, wide; local"),
        ("variants", {"ours": {"subtract_last": False}}, "variants: ours (subtract last no)"),
        ("seeds", (), "seeds: none"),
    ],
)
def test_settings_are_readable(name, value, line):
    assert setting(name, value) == line


@pytest.mark.parametrize("experiment", NAMES)
def test_settings_of_every_experiment_are_readable(experiment):
    python = re.compile(r"[\[\]{}\"]|'\w+'|\b(None|True|False)\b")
    for scale in load(experiment).scales.values():
        lines = [setting(name, value) for name, value in asdict(scale).items()]
        assert [
            line for line in lines if python.search(re.sub("`[^`]*`", "", line)) or "_" in line.partition(":")[0]
        ] == []


def test_a_terminal_shows_brackets_as_they_are():
    console = Console(width=120, record=True)
    console.print(rich_results(HEADER, Results(summary="[bold]", tables=[TABLE])))
    shown = console.export_text()
    assert "[x]" in shown
    assert "[bold]" in shown
    assert "12,346" in shown


def test_all_files_are_written_and_not_a_number_is_null(tmp_path):
    cells = {"one": {"result": {"loss": float("nan")}, "seconds": 1.0}}
    results = Results(summary="What.", tables=[TABLE], plots=[heat_map()])
    paths = write_results(HEADER, results, cells, tmp_path / "out")
    assert {path.name for path in paths} == {"results.json", "results.md", "heat.png"}
    written = json.loads((tmp_path / "out" / "results.json").read_text())
    assert written["cells"]["one"]["result"] == {"loss": None}
    assert written["results"]["tables"][0]["rows"][0] == ["full", 1.0, None]
    assert written["experiment"]["settings"]["lengths"] == [512, 1024]
