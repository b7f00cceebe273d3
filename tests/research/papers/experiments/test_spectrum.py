"""The spectrum of a model's weights: what is averaged, and what is said of it."""

from dataclasses import replace

import pytest
import torch

from subquad.research.papers.base import Context
from subquad.research.papers.experiments.spectrum import SCALES, UNTRAINED, at_index, cells, key, results, sources
from subquad.tools.measure.singular_values import cumulative, singular_values

SMOKE = SCALES["smoke"]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cells")
    context = Context(folder / "own", None, "cpu", lambda what, done, total: None)
    return {cell.key: cell.run(context) for cell in cells(SMOKE)}


def test_curves_rise_to_one_for_every_head(found):
    for source in sources(SMOKE):
        own = found[key(source)]
        assert own["at"][-1] == SMOKE.length
        for curve in (head for layer in own["curves"] for head in layer):
            assert curve[-1] == pytest.approx(1.0, abs=1e-5)
            assert curve == sorted(curve)


def test_random_weights_are_not_those_of_the_model(found):
    assert found[key(UNTRAINED)]["curves"] != found[key(SMOKE.texts[0])]["curves"]


def made(curves):
    """Made-up results of the cells for two layers of one head each, with Y(8) as given."""
    at = [4, 8, 32]
    return {
        key(source): {
            "at": at,
            "curves": [[[share / 2, share, 1.0]] for share in curves[i]],
            "needed": [[7.0], [9.0]],
        }
        for i, source in enumerate(sources(SMOKE))
    }


def test_lower_and_upper_layers_stand_beside_each_other():
    came = results(SMOKE, made([(0.6, 0.8), (0.9, 0.7)]))
    rows = {row[0]: list(row[1:]) for row in came.tables[0].rows}
    assert rows["read"] == ["0.700", "0.600", "0.800", "8", "0.600", "0.800"]
    assert rows[UNTRAINED][-2:] == ["0.900", "0.700"]
    assert list(came.tables[1].rows[0]) == ["read", "0.600", "0.800"]


def test_texts_in_one_folder_are_told_apart():
    scale = replace(SMOKE, texts=("wikitext-2/test.txt", "wikitext-2/valid.txt", "reviews/reviews.zip"))
    shares = dict(zip(sources(scale), (0.5, 0.6, 0.7, 0.8), strict=True))
    figures = {"at": [8, 32], "needed": [[7.0], [7.0]]}
    records = {key(source): figures | {"curves": [[[share, 1.0]]] * 2} for source, share in shares.items()}
    came = results(scale, records)
    assert {row[0]: row[1] for row in came.tables[0].rows} == {
        "wikitext-2_test.txt": "0.500", "wikitext-2_valid.txt": "0.600", "reviews": "0.700", UNTRAINED: "0.800"
    }  # fmt: skip
    assert len({plot.file for plot in came.plots}) == len(came.plots) == 7


def test_heat_maps_have_a_row_for_each_layer_and_one_scale_of_colours():
    came = results(SMOKE, made([(0.35, 0.8), (0.95, 0.97)]))
    maps = {plot.file: plot for plot in came.plots if plot.file.startswith("heat-map")}
    assert maps["heat-map-read"].values == [[0.35], [0.8]]
    assert [plot.low for plot in maps.values()] == pytest.approx([0.3, 0.3])
    curves = next(plot for plot in came.plots if plot.file == "curves-read")
    assert curves.series["layer 1"] == [(4.0, 0.4), (8.0, 0.8), (32.0, 1.0)]
    assert curves.series[UNTRAINED][1] == (8.0, pytest.approx(0.96))


def test_the_index_is_looked_up():
    own = {"at": [1, 8], "curves": [[[0.1, 0.5], [0.2, 0.6]]]}
    assert at_index(own, 8) == [[0.5, 0.6]]
    equal = cumulative(singular_values(torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 4, 2))[0])
    torch.testing.assert_close(equal, torch.ones_like(equal))  # uniform weights have rank 1
