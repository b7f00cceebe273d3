"""Patterns in decoders: generation on a cache, left padding, and another kind of keys in each layer."""

import pytest
import torch

import subquad as sq
from tests.library.hf.models import build, padded_ids

PATTERNS = [
    "longformer:window=2,first=1",
    "bigbird:block=2,random=1",
    "strided:stride=3",
    "fixed:block=3,columns=1,sets=heads",
    "logsparse:window=1",
]


@pytest.mark.parametrize("text", PATTERNS)
def test_generation_with_a_cache_equals_generation_without(text):
    model = build("llama").model
    sq.hf.swap(model, text)
    ids, mask = padded_ids("left", length=9, pads=3)
    options = {"attention_mask": mask, "max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    cached = model.generate(ids, **options)
    assert torch.equal(cached, model.generate(ids, use_cache=False, **options))
    alone = model.generate(ids[1:, 3:], **options | {"attention_mask": mask[1:, 3:]})
    assert torch.equal(cached[1:, 3:], alone)


def test_layers_take_near_and_distant_keys_in_turn():
    case = build("llama")
    outs = {}
    for sets in (("near", "far"), ("far", "near"), ("near", "near")):
        sq.hf.swap(case.model, {layer: f"strided:stride=3,sets={kind}" for layer, kind in enumerate(sets)})
        outs[sets] = case.output()
    for other in (("far", "near"), ("near", "near")):
        assert not torch.allclose(outs["near", "far"], outs[other], atol=1e-4)
