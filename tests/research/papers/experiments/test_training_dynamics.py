"""The figures read from a model's hash functions while it trains; reading changes nothing."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from subquad import hf
from subquad.research.papers.base import Context
from subquad.research.papers.experiments.training_dynamics import (
    METRICS,
    SCALES,
    _settings,
    _watched,
    cells,
    dynamics_of,
    key,
    results,
)
from subquad.research.training.models.language import CausalLanguageModel, LanguageConfig
from subquad.research.training.run import train
from subquad.tools.measure.dynamics import hash_dynamics
from tests.research.training.small import Killed, killed_at

TINY = replace(SCALES["smoke"], training={"steps": 4, "batch": 2, "every": 2, "learning_rate": 0.01})


def context(folder: Path, progress=lambda what, done, total: None) -> Context:
    folder.mkdir(exist_ok=True)
    return Context(folder, None, "cpu", progress)


def model(layers=2) -> CausalLanguageModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": layers, "num_attention_heads": 2}
    method = "lha:buckets=3,hidden=8,selection=argmax"
    return CausalLanguageModel(LanguageConfig(**sizes, initializer_range=0.3, method=method))


def test_the_figures_are_the_means_over_the_layers():
    own, given = model().train(), []
    batch = {"input_ids": torch.randint(0, 256, (2, 20), generator=torch.Generator().manual_seed(1))}
    found = dynamics_of(own, batch)
    assert own.training
    for layer in hf.find_layers(own):
        attached = layer.module.get_submodule(hf.NAME)
        attached.register_forward_pre_hook(lambda m, args, options: given.append((m, args, options)), with_kwargs=True)
    own.eval()(**batch)
    want, largest = [], []
    for attached, (query, k, _), options in given:
        mask, bound = options["mask"], attached.bound
        want.append(asdict(hash_dynamics(bound, query, k, mask=mask, scale=options["scale"])))
        labels = sum(h(x * options["scale"] ** 0.5) for h, x in ((bound.learned.query, query), (bound.learned.key, k)))
        counts = torch.stack([(labels.argmax(-1) == b).sum(-1) for b in range(3)])
        largest.append(float(counts.amax(0).double().mean() / 20))
    for name in want[0]:
        assert found[name] == pytest.approx((want[0][name] + want[1][name]) / 2, rel=1e-5)
    assert found["largest"] == pytest.approx(sum(largest) / 2)
    assert want[0]["kl_query"] != pytest.approx(want[1]["kl_query"], rel=1e-3)


def test_watching_changes_nothing_and_a_killed_run_sees_the_same(tmp_path):
    whole = _watched(TINY, "balanced", 0, context(tmp_path / "whole"))
    assert whole["steps"] == [0, 2, 4]
    assert whole["figures"]["kl_query"][0] != whole["figures"]["kl_query"][2]
    settings = _settings(TINY, "balanced", 0, context(tmp_path / "alone"))
    alone = train(settings, tmp_path / "alone")
    assert alone.test == whole["test"]
    with pytest.raises(Killed):
        _watched(TINY, "balanced", 0, context(tmp_path / "cut", killed_at(3)))
    again = _watched(TINY, "balanced", 0, context(tmp_path / "cut"))
    assert {name: again[name] for name in ("steps", "figures", "test")} == {
        name: whole[name] for name in ("steps", "figures", "test")
    }


def test_a_run_that_goes_on_between_two_looks_has_the_same_points(tmp_path):
    scale = replace(TINY, training={"steps": 20, "batch": 2, "checkpoint_minutes": 1e-9}, every=6)
    with pytest.raises(Killed):
        _watched(scale, "balanced", 0, context(tmp_path / "cut", killed_at(15)))
    assert any((tmp_path / "cut").rglob("*-10")), "no checkpoint after step 10"
    assert _watched(scale, "balanced", 0, context(tmp_path / "cut"))["steps"] == [0, 6, 12, 18]


def test_curves_are_means_at_the_steps_of_all_seeds():
    base = {"test": {"bits_per_byte": 3.0}, "training_seconds": 1.0}
    whole = base | {"steps": [0, 2, 4], "figures": {name: [0.0, 1.0, 2.0] for name in METRICS}}
    more = base | {"steps": [0, 2, 3, 4], "figures": {name: [0.0, 3.0, 9.0, 4.0] for name in METRICS}}
    for pair in ((whole, more), (more, whole)):
        records = {key(m, seed): pair[seed] for m in ("balanced", "argmax") for seed in (0, 1)}
        curves = results(replace(TINY, seeds=(0, 1)), records).plots[0]
        assert set(map(tuple, curves.series.values())) == {((0.0, 0.0), (2.0, 2.0), (4.0, 3.0))}


def test_results_say_where_the_curves_turn():
    rising, turning = [-2.0, -1.5, -1.0], [0.1, 0.3, 0.2]
    figures = {"kl_query": turning, "kl_key": turning, "negative_entropy_query": rising}
    figures |= {"negative_entropy_key": rising, "largest": [0.2, 0.2, 1.0]}
    run = {"steps": [0, 2, 4], "figures": figures, "test": {"bits_per_byte": 3.0}, "training_seconds": 1.0}
    made = results(TINY, {key(m, 0): run for m in ("balanced", "argmax")})
    rows = {(row[0], row[1]): row[2:] for row in made.tables[0].rows}
    assert rows["balanced", "KL, queries"] == ["0.100", "0.300", "2", "0.200", "50%"]
    assert rows["balanced", "negative entropy, keys"] == ["-2.000", "-1.000", "4", "-1.000", "100%"]
    assert [cell.key for cell in cells(TINY)] == [key("balanced", 0), key("argmax", 0)]
