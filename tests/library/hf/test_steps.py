"""Each token of a request is that of the model's own attention, in every family, by every method with exact steps.

The logits of all calls are compared, of prompts on which the methods are exact and of the steps behind them.
"""

import copy
import json

import pytest
import torch
import torch.nn.functional as F

from tests.forks import output_of
from tests.library.hf.families import DECODERS, FAMILIES, Subject, methods_of, subject
from tests.library.hf.models import need_recording
from tests.library.hf.prompts import left_padded, prompt

NEAR = 1e-5  # of the largest logit
STEPS = (1, 5, 1, 32, 33, 1)  # tokens of a call: one, an assistant's, around where the op of few queries ends
STATIC = {"cache_implementation": "static", "disable_compile": True}
WAYS = {
    "greedy": {},
    "static cache": STATIC,
    "beams": {"num_beams": 3},
    "beams on a static cache": {"num_beams": 2, **STATIC},
    "chunks": {"prefill_chunk_size": 16},
    "no cache": {"use_cache": False},
    "prompt lookup": {"prompt_lookup_num_tokens": 4},
}

SAMPLED = pytest.mark.covering(strength=1)  # each family, and each of the other values, at least once


@pytest.fixture(params=FAMILIES)
def own(request) -> Subject:
    return subject(request.param)


def assert_near(have, want, near=NEAR):
    torch.testing.assert_close(have, want, atol=near * float(want.abs().max()), rtol=0)


def assert_same(run, own: Subject) -> None:
    """Assert that `run` returns the same with the model's own attention and with each method."""
    with torch.no_grad():
        want = run(own)
        for method in methods_of(own.name):
            for have, wanted in zip(run(own.swapped(method)), want, strict=True):
                assert_near(have, wanted)


def in_calls(model: Subject, ids, sizes, cache=None, mask=None):
    """The logits of one call after the other, at real tokens."""
    cache, end, logits = model.cache() if cache is None else cache, 0, []
    for part in ids[:, : sum(sizes)].split(list(sizes), 1):
        end += part.shape[1]
        found = model(part, cache, None if mask is None else mask[:, :end])
        logits.append(found if mask is None else found[mask[:, end - part.shape[1] : end].bool()])
    return logits


@SAMPLED
@pytest.mark.parametrize("length", [1, 2, 17, 63, 64, 65, 255, 700])
def test_steps_after_a_prompt(own, length):
    sizes = [length, *STEPS]
    ids = prompt(sum(sizes), batch=2)
    assert_same(lambda model: in_calls(model, ids, sizes), own)


@SAMPLED
@pytest.mark.parametrize("kind", ["dynamic", "growing", "static"])
@pytest.mark.parametrize("side", ["left", "right", "holes"])
def test_steps_of_a_padded_batch(own, side, kind):
    lengths = torch.tensor([70, 1, 33, 64])
    mask = (torch.arange(70) < lengths[:, None]).long()
    mask = mask.flip(1) if side == "left" else mask
    if side == "holes":
        mask[0, 3:40], mask[3, 50:] = 0, 0
    mask = F.pad(mask, (0, sum(STEPS)), value=1)
    ids = prompt(mask.shape[1], batch=4) * mask
    sizes = [70, *STEPS]
    assert_same(lambda model: in_calls(model, ids, sizes, model.cache(kind, ids.shape[1] + 7), mask), own)


def test_steps_on_a_static_cache(own):
    sizes = [90, *STEPS]
    ids = prompt(sum(sizes), batch=2)
    assert_same(lambda model: in_calls(model, ids, sizes, model.cache("static", 200)), own)


@SAMPLED
@pytest.mark.parametrize("kind", ["dynamic", "growing"])
def test_a_cropped_cache_and_a_second_prompt(own, kind):
    """Assisted generation crops what was refused, and a conversation goes on."""
    config = own.model.config.get_text_config(decoder=True)
    need_recording(windows=kind == "dynamic" and getattr(config, "sliding_window", None) is not None)

    def run(model):
        cache, ids = model.cache(kind), prompt(80)
        cache.activate_past_recording()  # without it, layers with windows cannot go back
        logits = in_calls(model, ids, [60, 5], cache)
        cache.crop(-4)
        logits += in_calls(model, prompt(60, seed=1), [1, 4, 50, 1], cache)
        cache.crop(-40)
        return logits + in_calls(model, prompt(8, seed=2), [1, 7], cache)

    assert_same(run, own)


@SAMPLED
@pytest.mark.parametrize("kind", ["dynamic", "growing"])
def test_a_prefix_is_copied_and_branches(own, kind):
    def run(model):
        cache = model.cache(kind)
        logits = in_calls(model, prompt(50, batch=2), [49, 1], cache)
        branches = [copy.deepcopy(cache), cache]
        steps = [prompt(6, seed=seed, batch=2) for seed in (1, 2)]
        for number in range(6):  # in turns: a branch changes nothing in the other
            for branch, ids in zip(branches, steps, strict=True):
                logits.append(model(ids[:, number : number + 1], branch))
        return logits

    assert_same(run, own)


@SAMPLED
@pytest.mark.parametrize("kind", ["dynamic", "growing"])
def test_a_cache_whose_items_are_repeated_reordered_and_selected(own, kind):
    def run(model):
        cache = model.cache(kind)
        logits = in_calls(model, prompt(50), [49, 1], cache)
        cache.batch_repeat_interleave(3)
        logits += in_calls(model, prompt(4, seed=1, batch=3), [1, 3], cache)
        cache.reorder_cache(torch.tensor([2, 0, 0]))
        logits += in_calls(model, prompt(4, seed=2, batch=3), [1, 3], cache)
        if not model.reads_memory:
            cache.batch_select_indices(torch.tensor([1, 0]))
            logits += in_calls(model, prompt(2, seed=3, batch=2), [1, 1], cache)
        return logits

    assert_same(run, own)


@SAMPLED
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "whisper"])
def test_generated_tokens(name, way):
    own = subject(name)
    if own.reads_memory and way == "chunks":
        return  # transformers puts prompts of decoders alone into the cache by chunks
    prompts = [prompt(40)] if way == "prompt lookup" else [prompt(40, 1), prompt(1, 2), prompt(23, 3)]
    ids, mask = left_padded(prompts)
    with torch.no_grad():
        tokens, logits = own.generated(ids, mask, **WAYS[way])
        for method in methods_of(name):
            have = own.swapped(method).generated(ids, mask, **WAYS[way])
            assert torch.equal(have[0], tokens)
            assert_near(have[1], logits)


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(n, marks=pytest.mark.long) for n in DECODERS if n != "llama")]
)
def test_tokens_with_an_assistant(name):
    """The assistant is the model with some noise, so that some of its tokens are accepted."""
    own, ids = subject(name), prompt(27)
    assistant = copy.deepcopy(own.model)
    for parameter in assistant.parameters():
        parameter.data += 0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
    options = {"assistant_model": assistant, "max_new_tokens": 24}
    with torch.no_grad():
        tokens, logits = own.generated(ids, **options)
        for method in methods_of(name):
            have = own.swapped(method).generated(ids, **options)
            assert torch.equal(have[0], tokens)
            assert_near(have[1], logits)


@SAMPLED
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_errors_in_bf16_are_those_of_the_models_own_attention(own, kind):
    sizes = [150, *STEPS]
    ids = prompt(sum(sizes), batch=3)

    def error(model):
        """That of a token in the middle: where rounding sends one to another expert, it is of another kind."""
        logits = torch.cat(in_calls(model, ids, sizes, model.cache(kind, 300)), 1)
        return (logits - exact).square().mean(-1).sqrt().median()

    with torch.no_grad():
        exact = torch.cat(in_calls(own.to(torch.float32), ids, sizes), 1)
        limit = 1.1 * error(own.to(torch.bfloat16))
        for method in methods_of(own.name):
            assert error(own.swapped(method).to(torch.bfloat16)) <= limit


@pytest.mark.slow
@pytest.mark.parametrize("length", [1500, 1900])
def test_steps_after_a_long_prompt(own, length):
    """Steps of methods that approximate the prompt, on the cache of the model's own attention."""
    sizes, ids = [length, *STEPS], prompt(length + sum(STEPS), batch=2)
    with torch.no_grad():
        cache = own.cache()
        own(ids[:, :length], cache)
        copies = [copy.deepcopy(cache) for _ in methods_of(own.name)]
        want = in_calls(own, ids[:, length:], STEPS, cache)
        for method, of_method in zip(methods_of(own.name), copies, strict=True):
            for have, wanted in zip(
                in_calls(own.swapped(method), ids[:, length:], STEPS, of_method), want, strict=True
            ):
                assert_near(have, wanted)
        whole = in_calls(own.swapped("full:kernel=subquad"), ids, sizes)
        assert_near(torch.cat(whole[1:], 1), torch.cat(want, 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [["llama", "gemma3"], pytest.param([name for name in FAMILIES if name != "opt"], marks=pytest.mark.long)]
)
def test_compiled_steps_on_a_static_cache(names):
    results = json.loads(output_of("tests.library.hf.compiled_families", *names).splitlines()[-1])
    assert results == dict.fromkeys(names)
