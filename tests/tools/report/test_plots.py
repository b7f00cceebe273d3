import io
from itertools import pairwise

import matplotlib
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imread

from subquad.tools.calibrate.settings import LEARNED
from subquad.tools.compare import tables
from subquad.tools.compare.plots import model_time, pareto, plots, quality_vs_speed, styles, time_vs_length
from subquad.tools.compare.settings import COMPARED
from subquad.tools.report import drawing
from tests.tools.report import sample
from tests.tools.report.test_tables import noisy


@pytest.mark.parametrize("make", [sample.encoder, sample.causal])
def test_all_are_drawn(make):
    before = dict(matplotlib.rcParams)
    drawn = plots(sample.record(make()))
    assert list(drawn) == list(tables.PLOTS)
    assert dict(matplotlib.rcParams) == before
    for png in drawn.values():
        pixels = imread(io.BytesIO(png), format="png")
        assert pixels.shape[1] >= 1000
        assert 0.005 < np.mean(pixels[..., :3].min(-1) < 0.9) < 0.5  # neither blank nor a blot


def test_only_exact_attention_has_nothing_but_its_time():
    report = sample.encoder()
    report["methods"] = report["methods"][:1]
    assert list(plots(sample.record(report))) == ["time-vs-length.png"]


def test_one_method_and_no_exact_row():
    report = sample.encoder()
    report["methods"] = report["methods"][5:6]
    assert len(plots(sample.record(report))) == 3


def test_a_name_is_no_formula():
    report = sample.encoder()
    report["model"]["name"] = "a$\\frac$_" * 20
    assert len(plots(sample.record(report))) == 4


def test_the_legend_of_many_methods_is_inside_the_picture():
    report = sample.encoder()
    report["methods"] += [report["methods"][4] | {"method": f"performer:features={n}"} for n in range(16)]
    with drawing.look():
        figure = time_vs_length(sample.record(report))
        renderer = FigureCanvasAgg(figure).get_renderer()
        figure.draw(renderer)
    box = figure.legends[0].get_window_extent(renderer)
    assert box.y0 >= 0
    assert box.y1 <= figure.bbox.y1


def test_pareto():
    points = [(1.0, 1.0), (0.5, 0.9), (2.0, 0.9), (2.0, 0.8), (3.0, 0.5), (1.5, 0.7)]
    assert pareto(points) == [(1.0, 1.0), (2.0, 0.9), (3.0, 0.5)]


def test_methods_look_different_and_families_alike():
    looks = styles(sample.record(sample.encoder()))
    assert len({look.marker for look in looks.values()}) == len(looks)
    assert len({look.color for look in looks.values()}) == len(looks)
    assert looks["full"].color == "#222222"


def test_all_methods_of_a_whole_comparison_look_different():
    names = ["full", *COMPARED, *(f"{name}@folder" for name in LEARNED)]
    looks = drawing.styles(names)
    assert len({look.marker for look in looks.values()}) == len({look.color for look in looks.values()}) == len(names)


@pytest.mark.parametrize(
    ("low", "high"), [(0.2, 0.29), (0.93, 0.97), (0.9, 1.1), (0.1, 1.6), (3.0, 5000.0), (0.05, 0.051)]
)
def test_a_logarithmic_axis_has_two_to_seven_ticks(low, high):
    axes = Figure().add_subplot()
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    drawing.ticks(axes.yaxis, (low, high), "{:g}".format)
    inside = [tick for tick in axes.get_yticks() if low <= tick <= high]
    assert (2 if high / low > 1.05 else 1) <= len(inside) <= 7


def test_values_that_hardly_differ_have_ticks_too():
    axes = Figure().add_subplot()
    axes.set_yscale("log")
    for low, high in ((1.0312, 1.0387), (0.021301, 0.021302)):
        axes.set_ylim(low, high)
        drawing.ticks(axes.yaxis, (low, high), "{:g}".format)
        assert 1 <= len(axes.get_yticks()) <= 2
        assert axes.get_yticks() == pytest.approx([low, high][: len(axes.get_yticks())], rel=1e-3)


def drawn(make, report):
    with drawing.look():
        figure = make(sample.record(report))
        FigureCanvasAgg(figure).draw()
    return figure


def marks_in(axes, width):
    """The marks with an edge so wide, and whether they are hollow."""
    lines = [line for line in axes.lines if line.get_linestyle() == "None" and line.get_markeredgewidth() == width]
    return [(*line.get_xydata()[0], line.get_markerfacecolor() == "none") for line in lines]


def test_marks_within_the_noise_are_hollow_and_its_band_is_not_green():
    axes = drawn(quality_vs_speed, sample.encoder()).axes[0]
    hollow, filled = marks_in(axes, 1.3), marks_in(axes, 0.8)
    assert all(is_hollow for *_, is_hollow in hollow)
    assert not any(is_hollow for *_, is_hollow in filled)
    assert len(hollow) == 2  # shared-full and clustered:clusters=100
    assert len(hollow) + len(filled) == 1 + len(sample.ENCODER)
    assert all(1 / sample.NOISE <= x <= sample.NOISE for x, *_ in hollow)
    green = axes.collections[0].get_paths()[0].vertices
    assert green[:, 0].min() == sample.NOISE


def test_rows_in_16_bits_are_drawn_at_their_speed_over_exact_fp32():
    report = sample.encoder()
    length = str(sample.LENGTHS[0])
    report["methods"][1]["model"][length] |= {"speedup_fp32": 3.5, "verdict_fp32": "faster"}
    axes = drawn(quality_vs_speed, report).axes[0]
    assert axes.get_xlabel() == "speed-up of a forward pass over exact fp32"
    assert 3.5 in [x for x, *_ in marks_in(axes, 0.8) + marks_in(axes, 1.3)]
    assert drawn(quality_vs_speed, sample.encoder()).axes[0].get_xlabel() == "speed-up of a forward pass"


@pytest.mark.parametrize("name", ["full", "clustered-tail:clusters=48,topk=96,cells=16,refine=2 in bf16"])
def test_the_legend_and_the_ticks_fit_into_the_figure(name):
    report = sample.encoder()
    report["methods"][2]["method"] = name
    figure = drawn(quality_vs_speed, report)
    (legend,) = figure.legends
    assert figure.bbox.x0 <= legend.get_window_extent().x0
    assert legend.get_window_extent().x1 <= figure.bbox.x1
    axes = figure.axes[0]
    labels = [label for label in axes.get_xticklabels() if label.get_text()]
    boxes = sorted((label.get_window_extent() for label in labels), key=lambda box: box.x0)
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes))


def test_a_tie_is_no_gain_on_the_front():
    report = noisy()
    for method in report["methods"][1:9]:
        method["model"]["512"]["speedup"] = 1.3
        method["fidelity"]["512"] = 0.995
    axes = drawn(quality_vs_speed, report).axes[0]
    front = next(line for line in axes.lines if line.get_color() == "#8a929a")
    assert front.get_xydata().tolist() == [[1.0, 1.0]]


def rings(report, make=time_vs_length):
    axes = drawn(make, report).axes[0]
    return {round(line.get_xdata()[0]) for line in axes.lines if line.get_markeredgewidth() == 1.8}


def test_no_ring_where_no_crossing_is_known():
    report = sample.encoder()
    known = {
        round(m["crossover"]) for m in report["methods"] if m.get("crossover") and m["crossover"] not in (512, 2048)
    }
    assert {m.get("crossover") for m in report["methods"]} >= {None, 512.0, 2048.0}
    assert len(known) == 3
    assert rings(report) == known
    assert rings(noisy()) == set()
    legends = [text.get_text() for text in drawn(time_vs_length, report).legends[0].get_texts()]
    assert any("faster from at most 2,048 tokens" in text for text in legends)
    assert not any("faster" in text.get_text() for text in drawn(time_vs_length, noisy()).legends[0].get_texts())


EXACT_MS = {1024: 300.0, 2048: 738.0, 4096: 1760.0, 8192: 5451.0}


@pytest.mark.parametrize(
    ("block", "ms", "at"),
    [
        (1024, {2048: 800.0, 8192: 3500.0}, {3216}),
        (4096, {2048: 800.0, 8192: 3500.0}, set()),  # it is exact attention up to 4,096 tokens
        (512, {1024: 400.0, 2048: 700.0, 8192: 3500.0}, {1875}),  # at 2,048 faster as measured
        (1024, {2048: 700.0, 8192: 3500.0}, set()),  # never slower
        (1024, {2048: 800.0, 8192: 30000.0}, set()),
    ],
)
def test_a_ring_marks_where_a_method_overtakes_exact_attention(block, ms, at):
    report = sample.causal()
    exact, method = report["methods"][:2]
    exact["model"] = {str(n): {"ms": each} for n, each in EXACT_MS.items()}
    method |= {"method": "clustered-tail", "settings": {"name": "clustered-tail", "block": block, "last": 64}}
    method["model"] = {str(n): {"ms": each} for n, each in ms.items()}
    report["methods"] = [exact, method]
    report["settings"]["floor"] = {"figure": "kl", "bound": 0.002}
    assert rings(report, model_time) == at


@pytest.mark.parametrize("ms", [{2048: 1764.0, 8192: 10173.0, 16384: 26758.0}, {512: 9.0, 2048: 3.0, 8192: 900.0}])
def test_the_solid_line_passes_through_every_measured_time(ms):
    report = sample.causal()
    report["methods"] = report["methods"][:2]
    for method in report["methods"]:
        method["model"] = {str(n): {"ms": each} for n, each in ms.items()}
    solid = [line.get_xydata().T for line in drawn(model_time, report).axes[0].lines if line.get_linestyle() == "-"]
    assert len(solid) == 2
    for lengths, seconds in solid:
        assert np.interp(list(ms), lengths, seconds) == pytest.approx([each / 1e3 for each in ms.values()], rel=0.01)
