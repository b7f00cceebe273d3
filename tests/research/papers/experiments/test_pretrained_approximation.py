"""Changes against exact attention: ours, and the published ones."""

import math
from statistics import fmean

import pytest

from subquad.research.papers.experiments import pretrained_approximation as experiment
from subquad.research.papers.experiments.pretrained_approximation import Replacement, change, published_change, seeds


def test_a_change_is_taken_text_by_text_and_over_the_runs():
    exact = [1, 1, 0, 0]
    assert change([exact], exact) == (0.0, 0.0)
    mean, error = change([[1, 0, 0, 0]], exact)
    assert mean == -25.0
    assert error == pytest.approx(100 * math.sqrt(3 / 16) / 2)
    assert change([[1, 0, 0, 0], [1, 1, 1, 0]], exact)[0] == 0.0


def test_published_changes_are_against_the_exact_model_of_the_same_table():
    clustered, lha = published_change("clustered-25"), published_change("LHA, C=45")
    assert clustered["MRPC"] == pytest.approx(-43.2)
    assert lha["MRPC"] == pytest.approx(0.4)
    assert fmean(lha.values()) == pytest.approx(0.2, abs=0.05)  # 84.5 against 84.3 in the paper's last column


def test_every_counterpart_is_published_and_in_a_table():
    labels = {row.label for row in experiment.rows(experiment.SCALES["paper"])}
    assert set(experiment.COUNTERPARTS) <= labels
    assert set(experiment.COUNTERPARTS.values()) == set(experiment.PUBLISHED)


def test_only_what_is_drawn_runs_with_several_seeds():
    scale = experiment.PretrainedApproximationScale(seeds=(0, 1, 2))
    assert seeds(scale, Replacement("lsh:buckets=4")) == (0, 1, 2)
    assert seeds(scale, Replacement("linformer:projection=mean-pool")) == (0,)
    assert seeds(scale, Replacement("lha-tail", True)) == (0,)
