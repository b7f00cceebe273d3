"""An inspection's tables and plots."""

import io
import json
import math
from dataclasses import replace

import matplotlib
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.image import imread
from matplotlib.patches import PathPatch
from rich.console import Console

from subquad.tools.inspect import bucket_plots
from subquad.tools.inspect.dynamics_plot import dynamics_figure
from subquad.tools.inspect.plots import DRAW, PLOTS, plots
from subquad.tools.inspect.schema import LayerMetrics, LayerSpectrum
from subquad.tools.inspect.tables import markdown, of_layer, rich_table, spectrum, summary
from subquad.tools.inspect.write import write_inspection
from subquad.tools.report import drawing
from subquad.tools.runs.records import to_plain
from tests.tools.report import sample_inspect as sample

pytestmark = pytest.mark.filterwarnings("ignore:Glyph")  # the sample has a token that the font has not


def printed(report, width):
    out = io.StringIO()
    Console(file=out, width=width).print(rich_table(report))
    return out.getvalue()


def rows(table):
    return {line.name + "".join(line.marks): [cell.text for cell in line.cells] for line in table.lines}


def drawn(name, report=None):
    with drawing.look():
        figure = DRAW[name](report or sample.report())
        FigureCanvasAgg(figure).draw()
    return figure


# ---------------------------------------------------------------------- tables


def test_rows_are_methods_that_choose_or_hash_then_the_bound_and_random():
    found = rows(summary(sample.report()))
    assert list(found) == [
        "lsh:buckets=4",
        "smyrf:clusters=4,rounds=1",
        "lha:buckets=4not calibrated",
        "lha:buckets=4@fitted",
        "upper bound",
        "random buckets",
    ]
    shares = ["25.0 %", "0.0 %", "75.0 %", "–"]
    assert found["lsh:buckets=4"] == ["20", "0.400", "0.900", "30", "0.600", "0.900", *shares]
    assert found["smyrf:clusters=4,rounds=1"] == ["16", "0.300", "0.900", "16", "0.300", "0.900", *["–"] * 4]
    assert found["upper bound"][:3] == ["16", "0.850", "–"]
    assert found["random buckets"][:3] == ["16", "0.250", "–"]


def test_a_layer_has_its_own_figures():
    found = rows(of_layer(sample.report(), "2"))
    assert found["lsh:buckets=4"][:2] == ["20", "0.500"]
    assert found["upper bound"][1] == "0.900"


def test_without_figures_a_layer_of_a_method_is_blank():
    report = sample.report()
    report.methods[0].layers["2"] = LayerMetrics("it cannot run there")
    assert "lsh:buckets=4" not in rows(of_layer(report, "2"))
    assert rows(summary(report))["lsh:buckets=4"][1] == "0.350"  # the mean of those two that are there


@pytest.mark.parametrize("width", [80, 120])
def test_the_terminal_needs_80_columns_and_cuts_nothing(width):
    text = printed(sample.report(), width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for figure in ("0.400", "0.600", "25.0 %", "75.0 %", "not calibrated", "chooses no keys [of its own]"):
        assert figure in text


def test_markdown_holds_every_fact_and_its_tables_are_rectangular():
    report = sample.report()
    text = markdown(report, list(PLOTS)).replace("\\", "")
    facts = [report.command, report.created, *report.notes, *report.versions.values(), "a [text]"]
    facts += [*report.hardware.values(), *(f"({name})" for name in PLOTS), "### Layer 2", "| 0.500 |"]
    assert [fact for fact in facts if fact not in text] == []
    for block in markdown(report).split("\n\n"):
        if block.startswith("|"):
            assert len({line.count("|") for line in block.splitlines()}) == 1


def test_the_spectrum_has_a_line_a_layer_where_it_was_asked_for():
    table = spectrum(sample.report().spectrum)
    assert (table.first, table.columns[0].title) == ("layer", "Y(16): median")
    ys = [4 ** (-1 / p) for p in (2, 3, 4, 5)]  # layer 1, heads 0 to 3
    expected = [(ys[1] + ys[2]) / 2, ys[0], ys[3]]
    assert rows(table)["1"] == [*(f"{y:.3f}" for y in expected), "12", "11", "14"]
    both = (printed(sample.report(), 80), markdown(sample.report()))
    neither = (printed(sample.report(spectrum=False), 80), markdown(sample.report(spectrum=False)))
    assert all("Y(16)" in text for text in both)
    assert not any("Y(16)" in text for text in neither)


# ---------------------------------------------------------------------- plots


def test_pngs_are_neither_blank_nor_a_blot():
    before = dict(matplotlib.rcParams)
    pngs = plots(sample.report())
    assert list(pngs) == list(PLOTS)
    assert dict(matplotlib.rcParams) == before
    for png in pngs.values():
        pixels = imread(io.BytesIO(png), format="png")
        assert pixels.shape[1] >= 800
        assert 0.005 < np.mean(pixels[..., :3].min(-1) < 0.9) < 0.8


def test_what_is_unknown_is_not_drawn_and_an_earlier_plot_is_removed(tmp_path, unpainted):
    written = {path.name for path in write_inspection(sample.report(), tmp_path)}
    assert written == {"results.json", "results.md", *PLOTS}
    assert json.loads((tmp_path / "results.json").read_text()) == to_plain(sample.report())
    write_inspection(sample.report(hashing=(), choosing={}, spectrum=False), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "results.md", "attention-maps.png"}


def test_utility_has_a_box_of_layers_for_each_method_and_variant_and_for_the_bound():
    (ax,) = drawn("utility.png").axes
    boxes = [patch for patch in ax.patches if isinstance(patch, PathPatch)]
    assert len(boxes) == 2 + 1 + 2 + 2 + 1  # smyrf with one round is the same as given
    points = [line.get_ydata() for line in ax.lines if line.get_marker() == "o"]
    assert points[0] == pytest.approx([0.3, 0.4, 0.5])
    assert points[1] == pytest.approx([0.5, 0.6, 0.7])
    assert points[-1] == pytest.approx([0.8, 0.85, 0.9])
    assert [text.get_text() for text in ax.texts] == ["20", "30", "16", "18", "25", "18", "25", "16"]
    assert [label.get_text() for label in ax.get_xticklabels()][2:] == [
        "lha:\nbuckets=4\n(not calibrated)", "lha:\nbuckets=4\n@fitted", "upper\nbound"
    ]  # fmt: skip
    assert ax.lines[-1].get_ydata() == [0.25, 0.25]


def test_bars_are_the_queries_and_keys_of_each_head_largest_bucket_first():
    figure = drawn("bucket-sizes.png")
    assert len(figure.axes) == 2
    ax = figure.axes[0]
    queries, keys = ([bar.get_height() for bar in container] for container in ax.containers)
    assert queries == [40, 14, 10, 0] * sample.HEADS  # sizes 44, 44, 40 and 0
    assert keys == [4, 30, 30, 0] * sample.HEADS
    assert list(ax.lines[0].get_ydata()) == [32.0, 32.0]
    assert "25.0 % unbalanced in size, 75.0 % in ratio" in ax.get_title(loc="left")


def test_histograms_count_every_bucket_and_only_ratios_that_there_are():
    figure = drawn("bucket-histograms.png")
    sizes, ratios = figure.axes[:2]
    buckets = 2 * sample.LAYERS * sample.HEADS
    assert sum(bar.get_height() for bar in sizes.patches) == 4 * buckets
    assert sum(bar.get_height() for bar in ratios.patches) == 3 * buckets  # one of four is empty
    assert sizes.lines[0].get_xdata()[0] == pytest.approx(32.0)
    assert bucket_plots._ratio(-2) == "1/4"
    assert bucket_plots._ratio(bucket_plots.WIDEST) == "≥16"


def test_maps_show_the_weights_with_tokens_on_both_axes():
    report = sample.report()
    figure = drawn("attention-maps.png", report)
    panels = [ax for ax in figure.axes if ax.images and ax.get_visible()]
    assert len(panels) == 6
    for ax, weights in zip(panels, report.maps.weights.values(), strict=False):
        np.testing.assert_allclose(ax.images[0].get_array(), weights)
        assert ax.images[0].norm is panels[0].images[0].norm
    left = [label.get_text() for label in panels[0].get_yticklabels()]
    assert left == ["[CLS]", "a$b", "##ing", "注意", "a-very-long…", "'"]
    assert [label.get_text() for label in panels[-1].get_xticklabels()] == left
    shown = sum(map(sum, report.maps.weights["full"])) / 6
    assert panels[0].get_title(loc="left") == f"full\n{100 * shown:.0f} % of the weight is on these keys"


def test_the_spectrum_has_a_thin_line_a_head_a_thick_one_a_layer_and_a_square_for_both():
    report = sample.report()
    curves, heat, *_ = drawn("spectrum.png", report).axes
    found = report.spectrum.layers
    thick = [line for line in curves.lines if line.get_label().startswith("layer")]
    for line, layer in zip(thick, found.values(), strict=True):
        assert list(line.get_ydata()) == pytest.approx(np.median(layer.curves, 0))
    thin = [line for line in curves.lines if line.get_linewidth() < 1]
    assert len(thin) == sample.LAYERS * sample.HEADS
    shares = [[curve[2] for curve in layer.curves] for layer in found.values()]  # at j = 16
    np.testing.assert_allclose(heat.images[0].get_array(), shares)
    assert [text.get_text() for text in heat.texts][:2] == [".25", ".50"]


def test_layers_with_fewer_heads_leave_squares_empty_and_many_layers_have_a_bar():
    report = sample.report()
    layers = report.spectrum.layers
    layers["2"] = LayerSpectrum(layers["2"].curves[:2], layers["2"].needed[:2])
    heat = drawn("spectrum.png", report).axes[1]
    assert heat.images[0].get_array().mask.sum() == 2
    layers |= {str(n): layers["1"] for n in range(30)}
    figure = drawn("spectrum.png", report)
    assert not figure.axes[0].get_legend()
    assert [ax.get_ylabel() for ax in figure.axes].count("layer") == 2  # the bar's and the heat map's


@pytest.mark.parametrize("name", PLOTS)
def test_all_text_is_inside_the_picture(name):
    report = sample.report()
    report.model["name"] = "x" * 90
    report.settings["layer"] = 2
    figure = drawn(name, replace(report, maps=replace(report.maps, layer=2)))
    renderer = FigureCanvasAgg(figure).get_renderer()
    for part in [figure._suptitle, *figure.legends, *(ax for ax in figure.axes if ax.get_visible())]:
        box = part.get_tightbbox(renderer)  # of axes with their titles, labels and ticks
        assert box.x0 >= -1
        assert box.y0 >= -1
        assert box.x1 <= figure.bbox.x1 + 1
        assert box.y1 <= figure.bbox.y1 + 1


def test_a_long_title_takes_another_line():
    report = sample.report()
    del report.methods[1:]
    report.model["name"] = "a-model-of-thirty-six-letters-in-all"
    figure = drawn("utility.png", report)
    title = figure._suptitle
    assert title.get_text().replace("\n", " ").endswith("below each box, keys per query")
    assert title.get_text().count("\n") == 1
    assert "\n" not in drawn("bucket-sizes.png")._suptitle.get_text()
    renderer = FigureCanvasAgg(figure).get_renderer()
    assert title.get_window_extent(renderer).y0 >= figure.axes[0].get_tightbbox(renderer).y1


def test_one_head_one_layer_one_token():
    report = sample.report()
    methods = [replace(method, layers={"1": method.layers["1"]}) for method in report.methods]
    maps = replace(report.maps, tokens=["a"], weights={"full": [[1.0]]})
    assert list(plots(replace(report, bounds={"1": [0.5]}, methods=methods, maps=maps))) == list(PLOTS)


# ---------------------------------------------------------------------- dynamics


def test_dynamics_have_a_line_a_layer_and_their_mean():
    with drawing.look():
        figure = dynamics_figure(sample.record(), "a-model", buckets=4)
    kl_query, _, _, entropy_key = figure.axes[:4]
    assert len(kl_query.lines) == 4
    assert list(kl_query.lines[1].get_xdata()) == [0, 10, 20, 30, 40]
    assert kl_query.lines[1].get_ydata() == pytest.approx([1.0 / (1 + n) for n in range(5)])
    assert kl_query.lines[3].get_ydata() == pytest.approx([1.0 / (1 + n) for n in range(5)])  # the mean is layer 1's
    assert entropy_key.lines[0].get_ydata() == pytest.approx([-0.5 / (1 + n) for n in range(5)])
    assert entropy_key.lines[-1].get_ydata() == pytest.approx([-math.log(4)] * 2)
    with drawing.look():
        many = drawing.png(dynamics_figure(sample.record(layers=30), "a-model"))
    assert imread(io.BytesIO(many), format="png").shape[1] > 1000


def test_a_layer_that_is_not_in_every_entry_is_drawn_where_it_is():
    record = sample.record(layers=2)
    del record[1]["layers"]["1"], record[2]["layers"]["1"]["kl_query"]
    with drawing.look():
        lines = dynamics_figure(record, "a-model").axes[0].lines
    assert list(lines[1].get_xdata()) == [0, 30, 40]
    assert list(lines[2].get_xdata()) == [0, 10, 20, 30, 40]


def test_each_fit_has_its_plot_and_an_earlier_one_is_removed(tmp_path, unpainted):
    write_inspection(sample.report(fits=2), tmp_path)
    both = {"hash-dynamics.png", "hash-dynamics-2.png"}
    assert both <= {path.name for path in tmp_path.iterdir()}
    assert "the hash functions of lha:buckets=4@fitted" in (tmp_path / "results.md").read_text()
    write_inspection(sample.report(fits=1), tmp_path)
    assert both & {path.name for path in tmp_path.iterdir()} == {"hash-dynamics.png"}


def test_a_record_without_such_figures_has_no_plot():
    assert dynamics_figure([{"step": 0, "layers": {"0": {"loss": 1.0}}}], "a-model") is None
