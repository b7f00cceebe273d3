"""The layers that are timed compute what they are said to."""

import pytest
import torch

from subquad.nn.auxiliary import auxiliary_loss
from subquad.research.papers.experiments.lha_latency import SCALES, Layers, key, lha, results

SCALE = SCALES["smoke"]
LHA = lha(SCALE, 32)


def layers(training):
    made = Layers(SCALE, training, "cpu", 64)
    calls = {name: made.call_of(name) for name in ("full", "naive", LHA)}
    return made, calls


def test_a_naive_softmax_computes_what_sdpa_does():
    _, calls = layers(training=False)
    torch.testing.assert_close(calls["naive"](), calls["full"]())


def test_training_has_the_hash_loss_and_its_gradients():
    made, calls = layers(training=True)
    before = torch.random.get_rng_state()
    for name, layer in zip(calls, made.layers, strict=True):
        calls[name]()
        assert all(parameter.grad is not None for parameter in layer.parameters())
    assert torch.equal(before, torch.random.get_rng_state())
    hashes = [p for name, p in made.layers[2].named_parameters() if "learned" in name]
    assert hashes
    assert any(p.grad.abs().sum() > 0 for p in hashes)
    made.clear()
    assert made.x.grad is None
    assert all(parameter.grad is None for layer in made.layers for parameter in layer.parameters())


def test_inference_leaves_no_graph_and_no_loss():
    made, calls = layers(training=False)
    assert not calls[LHA]().requires_grad
    with pytest.raises(ValueError, match="eval mode"):
        auxiliary_loss(made.layers[2])


def test_crossings_are_told_for_both_stages():
    made = {
        key(stage, n, 0): {"full": {"seconds": [n * n * 1e-6]}, LHA: {"seconds": [n * seconds]}}
        for stage, seconds in (("training", 1e-3), ("inference", 9e-5))
        for n in SCALE.lengths
    }
    made[key("training", 64, 0)]["naive"] = {"seconds": [0.5]}
    table = results(SCALE, made).tables[0]
    assert table.rows == [["lha of 32", "64; 7.8× at 64", "not up to 128; 0.1× at 128", "–", "90; 1.4× at 128"]]
