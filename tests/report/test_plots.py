import io

import matplotlib
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imread

from subquad.report import content, drawing
from subquad.report.plots import pareto, plots, styles, time_vs_length
from subquad.workflows.compare import DEFAULT_METHODS, LEARNED_METHODS
from tests.report import sample


@pytest.mark.parametrize("make", [sample.encoder, sample.causal])
def test_all_three_are_drawn(make):
    before = dict(matplotlib.rcParams)
    drawn = plots(make())
    assert list(drawn) == list(content.FIGURES)
    assert dict(matplotlib.rcParams) == before
    for png in drawn.values():
        pixels = imread(io.BytesIO(png), format="png")
        assert pixels.shape[1] >= 1000
        assert 0.005 < np.mean(pixels[..., :3].min(-1) < 0.9) < 0.5  # neither blank nor a blot


def test_only_exact_attention_has_nothing_but_its_time():
    report = sample.encoder()
    report["methods"] = report["methods"][:1]
    assert list(plots(report)) == ["time-vs-length.png"]


def test_one_method_and_no_exact_row():
    report = sample.encoder()
    report["methods"] = report["methods"][5:6]
    assert len(plots(report)) == 3


def test_a_name_is_no_formula():
    report = sample.encoder()
    report["model"]["name"] = "a$\\frac$_" * 20
    assert len(plots(report)) == 3


def test_the_legend_of_many_methods_is_inside_the_picture():
    report = sample.encoder()
    report["methods"] += [report["methods"][4] | {"method": f"performer:features={n}"} for n in range(16)]
    with drawing.look():
        figure = time_vs_length(report)
        renderer = FigureCanvasAgg(figure).get_renderer()
        figure.draw(renderer)
    box = figure.legends[0].get_window_extent(renderer)
    assert box.y0 >= 0
    assert box.y1 <= figure.bbox.y1


def test_pareto():
    points = [(1.0, 1.0), (0.5, 0.9), (2.0, 0.9), (2.0, 0.8), (3.0, 0.5), (1.5, 0.7)]
    assert pareto(points) == [(1.0, 1.0), (2.0, 0.9), (3.0, 0.5)]


def test_methods_look_different_and_families_alike():
    looks = styles(sample.encoder())
    assert len({look.marker for look in looks.values()}) == len(looks)
    assert len({look.color for look in looks.values()}) == len(looks)
    assert looks["full"].color == "#222222"


def test_all_methods_of_a_whole_comparison_look_different():
    names = ["full", *DEFAULT_METHODS, *(f"{name}@folder" for name in LEARNED_METHODS)]
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
