"""Steps after something went wrong, changed in the middle or was given by mistake: right, or refused with a message."""

import copy
import threading

import pytest
import torch
from torch import nn

import subquad as sq
from subquad.hf.boundary import attend
from tests.library.hf.families import FAMILIES, Subject, methods_of, model, subject
from tests.library.hf.prompts import prompt
from tests.library.hf.test_steps import STEPS, assert_near, assert_same, in_calls

KINDS = ("dynamic", "growing", "static")
DECODERS = ["llama", "gemma3"]  # without windows, and with both kinds of layers
DECODERS += [pytest.param(name, marks=pytest.mark.long) for name in ("mistral", "gpt2")]
WITH_GRADIENTS = ("llama", "gemma3", "gpt-oss", "whisper", "t5")


@pytest.fixture(params=DECODERS)
def own(request) -> Subject:
    return subject(request.param)


def filled(model: Subject, kind: str = "dynamic", length: int = 0, batch: int = 2):
    """A cache of 30 tokens."""
    cache = model.cache(kind, length)
    with torch.no_grad():
        model(prompt(30, batch=batch), cache)
    return cache


def step(model: Subject, cache, seed: int = 1, tokens: int = 1, **options):
    """The logits of other tokens behind those of a cache."""
    with torch.no_grad():
        return model.model(prompt(tokens, seed, batch=2), past_key_values=cache, **options).logits


def each_swapped(own: Subject, *without: str):
    return [own.swapped(method) for method in methods_of(own.name) if method not in without]


# ---------------------------------------------------------------------- what is given by mistake


def of_another_dtype(cache):
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys.double(), layer.values.double()


def on_another_device(cache):
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys.to("meta"), layer.values.to("meta")


def of_another_batch(cache):
    cache.batch_repeat_interleave(2)


def of_other_heads(cache):
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys.repeat(1, 3, 1, 1), layer.values.repeat(1, 3, 1, 1)


def of_another_width(cache):
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys.repeat(1, 1, 1, 2), layer.values.repeat(1, 1, 1, 2)


@pytest.mark.parametrize(
    "change", [of_another_dtype, on_another_device, of_another_batch, of_other_heads, of_another_width]
)
def test_a_cache_of_another_model_is_refused(own, change):
    for swapped in each_swapped(own):
        cache = filled(swapped)
        change(cache)
        with pytest.raises((ValueError, TypeError, RuntimeError), match=r"must match|same dtype|expected device"):
            step(swapped, cache)


@pytest.mark.parametrize(("mask", "message"), [
    (torch.ones(2, 30), "has 30 positions, but the cache has seen 30 tokens and 1 are new"),
    (torch.ones(2, 1), "has 1 positions, but the cache has seen 30 tokens and 1 are new"),
    (torch.ones(3, 31), "has 3 items, but the batch has 2"),
    (torch.ones(2, 1, 31), r"mask is \(2, 1, 31\); subquad accepts \(batch, tokens\)"),
    (torch.zeros(2, 4, 1, 31), "subquad|mask"),
    (torch.rand(2, 1, 1, 33) > 0.5, "33 positions, but there are 31 keys"),
])  # fmt: skip
def test_a_mask_that_is_not_understood_is_refused(mask, message):
    own = subject("llama")
    if mask.ndim == 4 and mask.shape[1] == 4:  # another for each head
        mask[:, 1, :, :9] = -torch.inf
    for swapped in each_swapped(own):
        with pytest.raises(ValueError, match=message):
            step(swapped, filled(swapped), attention_mask=mask)


def test_a_mask_over_steps_and_keys_is_read_or_refused(own):
    if own.name in ("mistral", "gemma3"):
        pytest.skip("a mask over queries and keys is for all layers, with and without windows")
    allowed = torch.ones(3, 33, dtype=torch.bool).tril(30).expand(2, 1, 3, 33)
    other = allowed.clone()
    other[0, :, 1, 4:9] = False
    want = step(own, filled(own), tokens=3)
    for swapped in each_swapped(own):
        assert_near(step(swapped, filled(swapped), tokens=3, attention_mask=allowed), want)
        with pytest.raises(ValueError, match="not padding of the keys, causality, segments or a window; pass a 2-D"):
            step(swapped, filled(swapped), tokens=3, attention_mask=other)


def test_a_step_before_a_prompt_is_a_prompt(own):
    assert_same(lambda model: [step(model, model.cache(kind, 9)) for kind in KINDS], own)


def test_nan_in_one_item_stays_there(own):
    """In a new token, in a key and in a value of the cache."""
    for swapped in each_swapped(own):
        for kind in KINDS:
            cache = filled(swapped, kind, 40)
            want = step(swapped, copy.deepcopy(cache), tokens=5)
            for number, name in enumerate(("keys", "values")):
                broken = copy.deepcopy(cache)
                getattr(broken.layers[number], name)[0, :, 27] = (torch.nan, torch.inf)[number]
                have = step(swapped, broken, tokens=5)
                assert torch.equal(have[1], want[1])
                assert have[0].isnan().all()
            vectors = swapped.model.get_input_embeddings()(prompt(5, 1, batch=2))
            vectors[0, 2] = torch.nan
            with torch.no_grad():
                have = swapped.model(inputs_embeds=vectors, past_key_values=cache).logits
            assert_near(have[1], want[1])
            assert have[0, 2:].isnan().all()


@pytest.mark.parametrize("kind", KINDS)
def test_what_padding_and_empty_slots_hold_changes_nothing(own, kind):
    mask = torch.ones(2, 35, dtype=torch.long)
    mask[0, :20] = 0
    for swapped in [own.swapped("full:kernel=subquad")]:  # SDPA, the baseline, multiplies hidden values by 0
        cache = swapped.cache(kind, 50)
        with torch.no_grad():
            swapped(prompt(30, batch=2), cache, mask[:, :30])
        want = [step(swapped, copy.deepcopy(cache), tokens=n, attention_mask=mask[:, : 30 + n]) for n in (1, 5)]
        for poison in (torch.nan, torch.inf, 1e30):
            poisoned = copy.deepcopy(cache)
            for layer in poisoned.layers:
                window = getattr(layer, "sliding_window", None)
                for tensor in (layer.keys, layer.values):
                    if kind != "static":
                        tensor[0, :, : max(0, tensor.shape[2] - 10)] = poison
                    elif window is None:
                        tensor[0, :, :20] = poison
                        tensor[:, :, 30:] = poison
            for n, wanted in zip((1, 5), want, strict=True):
                have = step(swapped, copy.deepcopy(poisoned), tokens=n, attention_mask=mask[:, : 30 + n])
                assert torch.equal(have, wanted)


# ---------------------------------------------------------------------- what changes between steps


def test_the_method_changes_in_the_middle_of_a_request(own):
    """By another swap, and by restoring the model and back."""
    ids, sizes = prompt(62, batch=2), [30, 1, 1, 1, 8]
    with torch.no_grad():
        want = in_calls(own, ids, sizes)
        changing = Subject(own.name, model(own.name))
        cache, have = changing.cache(), []
        for number, part in enumerate(ids[:, : sum(sizes)].split(sizes, 1)):
            if number == 2:
                sq.hf.restore(changing.model)
            else:
                sq.hf.swap(changing.model, methods_of(own.name)[number % len(methods_of(own.name))])
            have.append(changing(part, cache))
    for one, wanted in zip(have, want, strict=True):
        assert_near(one, wanted)


@pytest.mark.parametrize("method", ["full:kernel=subquad", "clustered-tail"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_are_the_same_bits_for_any_number_of_threads(method, dtype):
    """The outputs of a layer's attention are compared; torch's products with weights are not the same bits."""
    module = next(iter(subject("llama").swapped(method).model.model.layers)).self_attn
    keys, threads = 6000, torch.get_num_threads()  # so many that the kernel divides them among threads
    groups = module.config.num_key_value_heads
    k, v = torch.randn(2, 2, groups, keys, module.head_dim, dtype=dtype)
    try:
        for tokens in (1, 5, 32, 33):
            q = torch.randn(2, module.config.num_attention_heads, tokens, module.head_dim, dtype=dtype)
            outs = []
            for count in (1, 2, 3, 5):
                torch.set_num_threads(count)
                outs.append(attend(module, q, k, v, None)[0])
            assert all(torch.equal(out, outs[0]) for out in outs)
    finally:
        torch.set_num_threads(threads)


class Stop(BaseException):
    """An exception like the one that Ctrl-C raises in the middle of a call."""


@pytest.mark.parametrize("inside", [0, 1])
def test_after_an_interrupted_call_other_requests_are_right(own, inside):
    mask = torch.ones(2, 31, dtype=torch.long)
    mask[1, :8] = 0
    want = [step(own, filled(own), attention_mask=mask), step(own, filled(own))]
    for swapped in each_swapped(own):
        layer = sq.hf.find_layers(swapped.model)[inside].module
        for given, wanted in zip((mask, None), want, strict=True):
            other = None if given is mask else mask
            cache = filled(swapped)
            handle = layer.register_forward_hook(interrupt)
            try:
                with pytest.raises(Stop):
                    step(swapped, cache, attention_mask=other)
            finally:
                handle.remove()
            assert_near(step(swapped, filled(swapped), attention_mask=given), wanted)


def interrupt(module: nn.Module, *call):
    raise Stop


def test_requests_in_turns_do_not_mix(own):
    """Different batches, lengths, masks and caches, of two models, a step of each in turn."""
    mask = torch.ones(3, 60, dtype=torch.long)
    mask[1, :25], mask[2, 5:11] = 0, 0
    requests = [
        (2, 30, None, "dynamic"), (3, 40, mask, "growing"), (1, 7, None, "static"), (3, 40, mask.flip(0), "static"),
        (2, 30, None, "growing"), (3, 40, mask.flip(0), "dynamic"),
    ]  # fmt: skip

    def run(model):
        caches, logits = [], []
        for batch, length, given, kind in requests:
            caches.append(model.cache(kind, 60))
            logits.append(model(prompt(length, batch, batch), caches[-1], None if given is None else given[:, :length]))
            logits[-1] = logits[-1][:, -1:] if given is None else logits[-1][given[:, :length].bool()]
        for n in range(1, 6):
            for (batch, length, given, _), cache in zip(requests, caches, strict=True):
                shown = None if given is None else given[:, : length + n]
                logits.append(model(prompt(1, n, batch), cache, shown))
        return logits

    assert_same(run, own)


def test_a_mask_is_changed_in_place_between_steps(own):
    """Serving code that has one buffer for all requests may do this."""

    def run(model):
        logits, mask = [], torch.ones(2, 31, dtype=torch.long)
        for hidden in (0, 5, 12, 0, 3):
            mask.fill_(1)
            mask[1, :hidden] = 0
            logits.append(step(model, filled(model), attention_mask=mask))
        return logits

    assert_same(run, own)


def test_masks_of_one_address(own):
    """A mask that is freed, and another of the same shape in its place."""

    def run(model):
        logits = []
        for hidden in (0, 5, 12, 3) * 3:
            mask = torch.ones(2, 31, dtype=torch.long)
            mask[1, :hidden] = 0
            logits.append(step(model, filled(model), attention_mask=mask))
            del mask
        return logits

    assert_same(run, own)


def test_requests_in_threads_do_not_mix(own):
    sizes = [20, *[1] * 12]
    cases = []
    for number in range(4):
        mask = torch.ones(2, sum(sizes), dtype=torch.long)
        mask[1, : 4 * number] = 0
        cases.append((prompt(sum(sizes), number, batch=2), mask))
    swapped = own.swapped("full:kernel=subquad")
    want, have = [None] * 4, [None] * 4

    def run(model, number, into):
        with torch.no_grad():
            into[number] = in_calls(model, cases[number][0], sizes, mask=cases[number][1])

    for number in range(4):
        run(own, number, want)
    threads = [threading.Thread(target=run, args=(swapped, number, have)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, wanted in zip(have, want, strict=True):
        for logits, wanted_logits in zip(one, wanted, strict=True):
            assert_near(logits, wanted_logits)


def test_a_model_changes_its_dtype_between_requests():
    own = subject("llama")
    swapped = Subject(own.name, copy.deepcopy(own.swapped("full:kernel=subquad").model))
    for dtype, near in ((torch.bfloat16, 2e-2), (torch.float32, 1e-5), (torch.float64, 1e-6)):
        reference = Subject(own.name, copy.deepcopy(own.model).to(torch.bfloat16).to(dtype))
        swapped.model.to(torch.bfloat16).to(dtype)
        assert_near(step(swapped, filled(swapped)).float(), step(reference, filled(reference)).float(), near)


@pytest.mark.parametrize(
    "name", [n if n in WITH_GRADIENTS else pytest.param(n, marks=pytest.mark.long) for n in FAMILIES]
)
def test_gradients_of_a_step_are_those_of_the_models_own_attention(name):
    """Gradients of the cache's keys and values are compared, for a step with one query and with several."""
    own = subject(name)
    memory = own.memory

    def gradients(model):
        found = []
        for tokens in (1, 5):
            cache = model.cache()
            with torch.no_grad():
                model(prompt(20, batch=2), cache)
            inner = getattr(cache, "self_attention_cache", cache)
            leaves = []
            for layer in inner.layers:
                layer.keys, layer.values = layer.keys.requires_grad_(), layer.values.requires_grad_()
                leaves += [layer.keys, layer.values]
            logits = model(prompt(tokens, 1, batch=2), cache)
            found += torch.autograd.grad(logits.square().sum(), leaves)
        return found

    want = gradients(Subject(name, own.model, memory))
    for method in methods_of(name):
        swapped = own.swapped(method)
        swapped.model.eval()
        for have, wanted in zip(gradients(swapped), want, strict=True):
            assert_near(have, wanted, 1e-4)


def test_steps_in_inference_mode_on_a_cache_that_was_filled_outside_and_back(own):
    ids, sizes = prompt(sum(STEPS) + 30, batch=2), [30, *STEPS]

    def run(model):
        cache, logits = model.cache(), []
        for number, part in enumerate(ids.split(sizes, 1)):
            with torch.inference_mode() if number % 2 else torch.no_grad():
                logits.append(model(part, cache).clone())
        return logits

    assert_same(run, own)


def test_steps_under_autocast(own):
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        want = step(own, filled(own))
        for swapped in each_swapped(own):
            assert_near(step(swapped, filled(swapped)).float(), want.float(), 2e-2)
