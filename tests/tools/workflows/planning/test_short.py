"""The worth of a plan on short texts, against the original model."""

from pathlib import Path

import pytest
import torch

import subquad as sq
from subquad.hf.adapters import describe_model
from subquad.hf.plans import Plan
from subquad.tools.plan.prepared import prepare
from subquad.tools.plan.settings import PlanSettings
from subquad.tools.plan.short import PASSAGES, short_fidelities
from subquad.tools.runs.floor import Floor
from subquad.tools.runs.jobs import silent

ROUGH = sq.Clustered(clusters=4)


@pytest.fixture(scope="module")
def prepared(model, text, tmp_path_factory):
    made: dict[str, object] = {}

    def of_kind(name: str):
        if name not in made:
            settings = PlanSettings(model=model(name), text=(Path(text),), lengths=(64, 80))
            made[name] = prepare(settings, tmp_path_factory.mktemp("out"), silent)
        return made[name]

    return of_kind


def fidelities(given, methods, figure="fidelity"):
    plan = Plan(describe_model(given.pretrained.model), (64, 80), methods, {})
    return short_fidelities(given.pretrained, given.loads, plan, Floor(figure, 0.5))


@pytest.mark.parametrize(("name", "figure"), [("bert", "fidelity"), ("masked", "fidelity"), ("gpt2", "kl")])
def test_a_plan_that_is_exact_on_short_texts_is_the_original_model_there(prepared, name, figure):
    given = prepared(name)
    methods = dict.fromkeys(range(2), sq.ByLength({0: "full", 65: ROUGH if name != "gpt2" else sq.Local(window=4)}))
    found = fidelities(given, methods, figure)
    assert list(found) == ["16", "64"]  # the model has 64 positions
    assert all(entry["fidelity"] == pytest.approx(1.0, abs=1e-5) for entry in found.values())
    assert all(1 <= entry["passages"] <= PASSAGES for entry in found.values())


def test_a_plan_that_approximates_short_texts_says_how_well(prepared):
    given = prepared("bert")
    found = fidelities(given, dict.fromkeys(range(2), ROUGH))
    load = given.loads[0]
    before = len(given.pretrained.first_tokens)
    texts = [given.pretrained.wrap(passage[before:], 16) for (passage,) in load.held_out[:PASSAGES]]
    exact = given.pretrained.embed(texts)
    sq.hf.swap(given.pretrained.model, ROUGH)
    rough = given.pretrained.embed(texts)
    sq.hf.restore(given.pretrained.model)
    assert found["16"]["fidelity"] == pytest.approx(float(torch.cosine_similarity(rough, exact).mean()), abs=1e-5)
    assert found["16"]["fidelity"] < 0.9999


def test_an_exact_plan_is_not_measured(prepared):
    assert fidelities(prepared("bert"), dict.fromkeys(range(2), sq.Full())) == {}
