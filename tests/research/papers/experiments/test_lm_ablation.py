"""Tests of the attention in each row of LHA's table 1, and of the sentences on the figures."""

from dataclasses import replace

import pytest

from subquad.methods import MixedHeads, parse_method
from subquad.research.papers.experiments.lm_ablation import ROWS, SCALES, cells, key, methods, results

SMALL = SCALES["small"]
BY_NAME = {row.name: row for row in ROWS}
PUBLISHED = {"local, wide": 22.89, "LSH, half, upper layers": 23.53, "(a) random": 26.05, "(d) MLP, half": 22.79}


def of(name: str) -> list:
    return [parse_method(method) for method in methods(SMALL, BY_NAME[name])]


def test_the_rows_have_the_published_figures():
    assert {name: BY_NAME[name].published for name in PUBLISHED} == PUBLISHED
    assert len({row.name for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("scale", SCALES)
def test_every_layer_of_every_row_is_strictly_causal(scale):
    for row in ROWS:
        layers = methods(SCALES[scale], row)
        assert len(layers) == SCALES[scale].model["layers"]
        assert {parse_method(method).traits.causal for method in layers} == {"strict"}


def test_sizes_heads_and_layers():
    assert [m.window for m in of("local, wide")] == [63, 63]
    assert [m.window for m in of("local")] == [31, 31]
    assert {m.positions for m in of("local")} == {"relative"}
    below, above = of("(e) MLP, upper layers")
    assert (below.name, above.name, above.buckets, above.hash) == ("local", "lha", 128 // 32, "mlp")
    for layer in of("LSH, half, all layers"):
        assert isinstance(layer, MixedHeads)
        assert [(part.method.name, part.share) for part in layer.parts] == [("local", 1), ("lsh", 1)]
    assert {m.hash for m in of("(a) random")} == {"random"}
    assert {m.hash for m in of("(b) linear")} == {"linear"}


def test_systems_without_a_published_figure_are_alone_in_all_layers():
    names = {row.name: of(row.name) for row in ROWS if row.family in ("pattern", "all keys")}
    assert {name: {m.name for m in layers} for name, layers in names.items()} == {
        name: {name.lower()}
        for name in ("strided", "fixed", "BigBird", "Longformer", "LogSparse", "Synthesizer", "linear", "Performer")
    }
    assert all(BY_NAME[name].published is None for name in names)
    assert [m.window for m in names["Longformer"]] == [31, 31]


def test_results_say_how_the_rows_compare_with_the_seeds():
    found = {"baselines": {"uniform": {"bits_per_byte": 8.0}}}
    for i, row in enumerate(ROWS):
        for seed, shift in zip(SMALL.seeds, (0.0, 0.2), strict=True):
            figures = {"bits_per_byte": 3.0 + shift + (row.published or 20 + i) / 100}
            run = {"validation": figures, "test": figures, "steps": 10, "training_seconds": 1.0}
            found[key(row.name, seed)] = run
    made = results(SMALL, found)
    note = made.tables[0].note
    assert "agree to a rank correlation of 1.00" in note
    assert "that between the seeds of a row is 0.141" in note
    assert made.tables[0].rows[2][5:8] == [22.89, "3.329 ± 0.141 (2)", "3.329 ± 0.141 (2)"]
    of_pattern = next(row for row in made.tables[0].rows if row[0] == "BigBird")
    assert of_pattern[:6] == ["BigBird", "all", "all", "–", 32, "not published"]
    few = results(replace(SMALL, rows=("local", "BigBird", "linear")), found).tables[0].note
    assert "rank correlation" not in few
    shared = "All seeds share what a method draws"
    assert shared in note
    one = {name: found[name] for name in found if not name.endswith("=1")}
    assert shared not in results(replace(SMALL, seeds=(0,)), one).tables[0].note
    assert "With one row there" in results(replace(SMALL, rows=("local",)), found).tables[0].note
    assert {cell.key for cell in cells(SMALL)} == set(found)
