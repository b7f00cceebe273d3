import re
from dataclasses import replace
from pathlib import Path

import pytest

from subquad.core.errors import InputError
from subquad.research.papers import speech
from subquad.research.papers.base import Context, JobResults
from subquad.research.papers.experiments import approximation_matrix, convergence, speed_accuracy
from subquad.research.papers.results import Lines


def found_of(keys: list[str], labels: list[str]) -> JobResults:
    """Made-up results of the cells of models and times: an update of the n-th takes n + 1 tenths of a second."""
    quartiles = {
        label: {"update": [0.1 * n, 0.1 * (n + 1), 0.1 * (n + 2)], "forward": [0.01, 0.02 * (n + 1), 0.03]}
        for n, label in enumerate(labels)
    }
    figures = {speech.RATE: 0.25, speech.HELD_OUT: 0.5}
    record = {
        "test": figures,
        "steps": 20,
        "seconds": 9.0,
        "losses": [[10, 1.0, 2.0], [20, 2.0, 1.5]],
        "rates": [[10, 1.0, 0.4, 1.0], [20, 2.0, 0.2, 1.0]],
    }
    others = {speech.TIMES: {"seconds": quartiles, "batch": 8, "tokens": 570}, speech.BASELINES: {"nothing": figures}}
    return dict.fromkeys(keys, record) | others


def test_curves_by_time_are_those_by_update_at_the_time_of_one() -> None:
    scale = convergence.SCALES["smoke"]
    keys = [cell.key for cell in convergence.cells(scale) if cell.key.startswith("train")]
    results = convergence.results(scale, found_of(keys, list(scale.methods)))
    by_update, by_time, errors = (plot for plot in results.plots if isinstance(plot, Lines))
    assert by_update.series["i-clustered-100"] == [(10, 2.0), (20, 1.5)]
    assert by_time.series["i-clustered-100"] == [(pytest.approx(2.0), 2.0), (pytest.approx(4.0), 1.5)]
    assert errors.series["full"][-1] == (pytest.approx(2.0), pytest.approx(20.0))
    times = next(table for table in results.tables if table.title.startswith("Time"))
    assert times.rows[1] == ["i-clustered-100", "200 (100 to 300)", "25", "0.50", "20 of 20", "4", "9"]


def test_smoke_runs_read_tones_where_a_data_folder_is_given_too(tmp_path) -> None:
    (tmp_path / "data").mkdir()
    context = Context(tmp_path / "cells" / "one", tmp_path / "data", "cpu", lambda what, done, total: None)
    for experiment in (convergence, speed_accuracy, approximation_matrix):
        first = experiment.cells(experiment.SCALES["smoke"])[0]
        assert speech.RATE in next(iter(first.run(context).values()))
        with pytest.raises(InputError, match="no recordings at"):
            experiment.cells(experiment.SCALES["small"])[0].run(context)


def test_the_page_names_what_each_curve_shows() -> None:
    scale = convergence.SCALES["smoke"]
    keys = [cell.key for cell in convergence.cells(scale) if cell.key.startswith("train")]
    page = (Path(__file__).parents[4] / "docs" / "results" / "speech.md").read_text("utf-8")
    for plot in convergence.results(scale, found_of(keys, list(scale.methods))).plots:
        assert isinstance(plot, Lines)
        (shown,) = re.findall(rf"!\[(.*)\]\({plot.file}\.png\)", page)
        assert ("loss" in shown, "by update" in shown) == (plot.y == "loss", plot.x == "updates")
        assert ("validation" in shown) == plot.title.startswith("validation")


def test_without_exact_attention_no_speed_is_relative_to_it() -> None:
    scale = replace(convergence.SCALES["smoke"], methods=("clustered-100", "i-clustered-100"))
    keys = [cell.key for cell in convergence.cells(scale) if cell.key.startswith("train")]
    results = convergence.results(scale, found_of(keys, list(scale.methods)))
    times = next(table for table in results.tables if table.title.startswith("Time"))
    assert [row[3] for row in times.rows] == [None, None]


def test_every_model_of_the_figure_is_a_point_with_its_layers_and_clusters() -> None:
    scale = speed_accuracy.SCALES["small"]
    labels = [variant.label for variant in speed_accuracy.variants(scale)]
    keys = [cell.key for cell in speed_accuracy.cells(scale) if cell.key.startswith("train")]
    assert len(set(keys)) == len(keys)
    plot = speed_accuracy.results(scale, found_of(keys, labels)).plots[0]
    assert isinstance(plot, Lines)
    assert plot.labels["i-clustered"] == ["2-100", "3-100", "3-200"]
    assert plot.labels["full"] == ["2", "3"]
    assert plot.series["full"] == [(pytest.approx(20.0), 25.0), (pytest.approx(40.0), 25.0)]


def test_models_with_more_clusters_start_from_those_with_100() -> None:
    scale = speed_accuracy.SCALES["paper"]
    keys = [cell.key for cell in speed_accuracy.cells(scale)]
    for method, layers in scale.tuned:
        start = speech.model_key(f"{method.rpartition('-')[0]}-100", 0, layers)
        assert keys.index(start) < keys.index(speech.model_key(method, 0, layers))
