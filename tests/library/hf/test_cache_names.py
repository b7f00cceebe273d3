"""transformers names the argument that holds keys and values `cache` since 5.24, and `past_key_values` before."""

import inspect

import pytest
import torch
import transformers as hf

import subquad as sq
from subquad.core.versions import cache_in, name_of_cache
from tests.library.hf.models import build, padded_ids


def test_the_cache_is_found_under_both_names():
    cache = hf.DynamicCache()
    for name in ("cache", "past_key_values"):
        assert cache_in({"input_ids": torch.ones(1, 2), name: cache}) is cache
    assert cache_in({"cache": None, "past_key_values": cache}) is cache
    assert cache_in({"cache": None, "past_key_values": None}) is None


def test_what_is_no_cache_is_not_taken_for_one():
    assert cache_in({"cache": {}}) is None  # Flaubert's argument of this name


def test_the_name_of_a_function_is_its_own():
    assert name_of_cache(lambda input_ids, cache=None: cache) == "cache"
    assert name_of_cache(lambda input_ids, past_key_values=None: past_key_values) == "past_key_values"
    with pytest.raises(TypeError, match="takes no cache of keys and values"):
        name_of_cache(lambda input_ids: input_ids)
    assert name_of_cache(build("llama").model.forward) in inspect.signature(hf.LlamaModel.forward).parameters


@pytest.mark.parametrize("given_by_place", [False, True])
def test_a_step_with_padding_on_the_left_is_that_of_the_whole_call(given_by_place):
    model = build("llama").model
    sq.hf.swap(model, "full")
    ids, mask = padded_ids("left")
    with torch.no_grad():
        want = model(input_ids=ids, attention_mask=mask).logits[:, -1]
        prompt, step = {"attention_mask": mask[:, :-1]}, {"attention_mask": mask}
        cache = hf.DynamicCache(config=model.config)
        model(ids[:, :-1], use_cache=True, **prompt, **{name_of_cache(model.forward): cache})
        if given_by_place:
            names = list(inspect.signature(model.forward).parameters)
            places = [None] * names.index(name_of_cache(model.forward))
            places[0], places[1] = ids[:, -1:], mask
            have = model(*places, cache).logits
        else:
            have = model(ids[:, -1:], **step, **{name_of_cache(model.forward): cache}).logits
    torch.testing.assert_close(have[:, -1], want, atol=1e-5, rtol=1e-4)
