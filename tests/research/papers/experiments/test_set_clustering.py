import pytest

from subquad.research.papers.experiments import set_clustering
from subquad.research.papers.experiments.set_clustering import SCALES, cells, key, results
from subquad.research.training.settings import settings_of


def test_figures_are_shown_as_distances_to_the_oracle() -> None:
    scale = SCALES["small"]
    found = {"baselines": {"oracle": {"log_likelihood": -1.5}, "one Gaussian": {"log_likelihood": -4.0}}}
    found |= {
        key(model, 0): {"test": {"log_likelihood": -2.0 - at}, "steps": 9, "training_seconds": 3.0}
        for at, model in enumerate(scale.models)
    }
    assert set(found) == {cell.key for cell in cells(scale)}
    (table,) = results(scale, found).tables
    above = {row[0]: row[1] for row in table.rows}
    assert above["one Gaussian"] == pytest.approx(-2.5)
    assert [above[model] for model in scale.models] == pytest.approx([-0.5, -1.5, -2.5, -3.5])
    assert {row[3] for row in table.rows} == {None}


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_every_model_of_a_scale_can_be_made(scale) -> None:
    for model in scale.models:
        method, _, points = model.partition(" points=")
        given = {"task": {**scale.task, "points": int(points)}, "model": {**scale.model, "method": method}}
        settings = settings_of("clusters", given, {"training": dict(scale.training)})
        assert settings.task.outline(settings.model).config.points == int(points)
    assert set_clustering.EXPERIMENT.scales is SCALES
