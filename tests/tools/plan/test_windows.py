"""Layers with a window: a plan gives them only what can be applied."""

import pytest

import subquad as sq
from subquad.hf.plans import joined
from subquad.methods import parse_method
from subquad.tools.plan.planning import candidates_for
from tests.library.hf.models import build

METHODS = [parse_method(text) for text in ("local:window=2", "full:kernel=subquad", "clustered-tail:clusters=4,topk=2")]


def windowed(model):
    return {layer.number for layer in sq.hf.find_layers(model) if layer.window is not None}


@pytest.mark.parametrize("name", ["gemma3", "modernbert"])
def test_each_candidate_of_a_layer_can_run_there_for_long_inputs_only(name):
    model = build(name).model
    layers = {layer.number: layer for layer in sq.hf.find_layers(model)}
    assert 0 < len(windowed(model)) < len(layers)
    candidates = candidates_for(model, METHODS, {})(16)
    assert candidates
    for candidate in candidates:
        together = {number: joined(layers[number], {0: sq.Full(), 9: m})[0] for number, m in candidate.by_layer.items()}
        sq.hf.swap(model, {number: together.get(number, sq.Full()) for number in layers})
        sq.hf.restore(model)


def test_in_a_decoder_windowed_layers_stay_exact_and_in_an_encoder_they_need_not():
    of = {
        name: {c.name: set(c.by_layer) for c in candidates_for(build(name).model, METHODS, {})(16)}
        for name in ("gemma3", "modernbert")
    }
    decoder, encoder = (windowed(build(name).model) for name in ("gemma3", "modernbert"))
    assert not decoder & of["gemma3"]["local:window=2"]
    assert decoder <= of["gemma3"]["full:kernel=subquad"]
    assert encoder <= of["modernbert"]["local:window=2"]
