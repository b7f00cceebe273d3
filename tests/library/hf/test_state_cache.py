"""Generation with recurrent methods: from states of fixed size, from kept keys, and from no cache, alike."""

import copy

import pytest
import torch
import transformers as hf

import subquad as sq
from tests.library.hf.models import TEXT, build, padded_ids

CAUSAL = ("llama", "gpt2", "opt", "qwen3")
METHODS = ("linear", "performer:features=32")
EVERY_CAUSAL = [
    method
    for method in (sq.from_dict({"name": name, **sq.METHODS[name].traits.example}) for name in sq.list_methods())
    if method.traits.causal == "strict" and (method.traits.cross or method.traits.cached)
]
OPTIONS = {"do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}


def swapped(name="llama", method="linear"):
    case = build(name)
    sq.hf.swap(case.model, method)
    return case


def states(cache):
    """The states in a cache, layer by layer."""
    return [layer.state for layer in cache.layers if hasattr(layer, "state")]


def numbers(cache):
    return sum(tensor.numel() for state in states(cache) for tensor in state.values())


def same(have, want):
    assert torch.equal(have.sequences, want.sequences)
    torch.testing.assert_close(torch.stack(have.logits), torch.stack(want.logits), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", CAUSAL)
def test_greedy_is_the_same_without_a_cache_with_keys_and_with_states(name, method):
    case = swapped(name, method)
    options = case.inputs | OPTIONS | {"max_new_tokens": 12, "output_logits": True}
    want = case.model.generate(**options, use_cache=False)
    for cache in ({}, {"past_key_values": sq.hf.StateCache(case.model)}):
        same(case.model.generate(**options, **cache), want)


@pytest.mark.parametrize("method", EVERY_CAUSAL, ids=str)
def test_every_causal_method_generates_the_same_with_every_cache(method):
    case = swapped("gpt2", method)
    options = case.inputs | OPTIONS | {"max_new_tokens": 8, "output_logits": True}
    want = case.model.generate(**options, use_cache=False)
    caches = [{}, {"cache_implementation": "static"}]
    caches += [{"past_key_values": sq.hf.StateCache(case.model)}] if method.traits.recurrent else []
    for cache in caches:
        same(case.model.generate(**options, **cache), want)


@pytest.mark.parametrize("name", CAUSAL)
def test_a_left_padded_batch_equals_each_alone(name):
    case = swapped(name)
    ids, mask = case.inputs["input_ids"], case.inputs["attention_mask"]
    together = case.model.generate(
        **case.inputs, **OPTIONS, max_new_tokens=8, past_key_values=sq.hf.StateCache(case.model)
    )
    for row in range(2):
        own = ids[row : row + 1, mask[row].bool()]
        alone = case.model.generate(own, **OPTIONS, max_new_tokens=8, past_key_values=sq.hf.StateCache(case.model))
        assert torch.equal(together.sequences[row, -8:], alone.sequences[0, -8:])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_beam_search(name, method):
    case = swapped(name, method)
    options = case.inputs | OPTIONS | {"max_new_tokens": 8, "num_beams": 3, "num_return_sequences": 2}
    want = case.model.generate(**options, use_cache=False)
    for cache in ({}, {"past_key_values": sq.hf.StateCache(case.model)}):
        have = case.model.generate(**options, **cache)
        assert torch.equal(have.sequences, want.sequences)
        torch.testing.assert_close(have.sequences_scores, want.sequences_scores, atol=1e-4, rtol=1e-4)


def test_sampling_draws_the_same_tokens():
    case = swapped()

    def drawn(**cache):
        torch.manual_seed(7)
        return case.model.generate(**case.inputs, max_new_tokens=8, do_sample=True, num_return_sequences=2, **cache)

    assert torch.equal(drawn(past_key_values=sq.hf.StateCache(case.model)), drawn(use_cache=False))


def test_a_prompt_in_pieces():
    case = swapped()
    options = case.inputs | OPTIONS | {"max_new_tokens": 6, "output_logits": True}
    cache = sq.hf.StateCache(case.model)
    same(case.model.generate(**options, past_key_values=cache, prefill_chunk_size=5), case.model.generate(**options))


def test_generation_goes_on_from_a_cache():
    case = swapped()
    options = {**OPTIONS, "output_logits": True}
    want = case.model.generate(**case.inputs, **options, max_new_tokens=10)
    cache = sq.hf.StateCache(case.model)
    first = case.model.generate(**case.inputs, **options, max_new_tokens=4, past_key_values=cache)
    mask = torch.nn.functional.pad(case.inputs["attention_mask"], (0, 4), value=1)
    branch = copy.deepcopy(cache)
    for held in (cache, branch):
        rest = case.model.generate(
            first.sequences, attention_mask=mask, **options, max_new_tokens=6, past_key_values=held
        )
        assert torch.equal(rest.sequences, want.sequences)
        torch.testing.assert_close(torch.stack(rest.logits), torch.stack(want.logits[4:]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", CAUSAL)
def test_the_state_does_not_grow(name):
    model = swapped(name).model
    cache, sizes = sq.hf.StateCache(model), []
    ids, _ = padded_ids(length=40, pads=0)
    for start, end in ((0, 17), (17, 18), (18, 40)):
        model(input_ids=ids[:, start:end], past_key_values=cache)
        sizes.append(numbers(cache))
    heads = 2 if name in ("llama", "qwen3") else 4
    assert sizes == [2 * 2 * heads * 8 * (8 + 2)] * 3  # layers, items, key heads, D·(E + 2)
    assert cache.get_seq_length() == 40


def test_two_caches_on_one_model_do_not_mix():
    model = swapped().model
    ids, _ = padded_ids(pads=0)
    want = model(input_ids=ids).logits
    caches = [sq.hf.StateCache(model) for _ in range(2)]
    outs = [[model(input_ids=ids[i : i + 1, :9], past_key_values=caches[i]).logits] for i in range(2)]
    for t in range(9, 17):
        for i in (1, 0):
            outs[i].append(model(input_ids=ids[i : i + 1, t : t + 1], past_key_values=caches[i]).logits)
    for i in range(2):
        torch.testing.assert_close(torch.cat(outs[i], 1), want[i : i + 1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("recurrent", [0, 1])
def test_layers_with_and_without_a_state_share_a_cache(recurrent):
    case = swapped(method={recurrent: "performer:features=32", 1 - recurrent: "full"})
    options = case.inputs | OPTIONS | {"max_new_tokens": 8, "output_logits": True}
    cache = sq.hf.StateCache(case.model)
    same(case.model.generate(**options, past_key_values=cache), case.model.generate(**options, use_cache=False))
    assert len(states(cache)) == 1
    assert cache.layers[1 - recurrent].keys.shape[2] == 17 + 7
    beams = {**options, "num_beams": 3, "output_logits": False}
    have = case.model.generate(**beams, past_key_values=sq.hf.StateCache(case.model))
    assert torch.equal(have.sequences, case.model.generate(**beams, use_cache=False).sequences)


def test_windowed_layers_keep_their_window_beside_a_state():
    config = hf.Qwen3Config(
        **TEXT, num_key_value_heads=2, head_dim=8, use_sliding_window=True, sliding_window=5, max_window_layers=1,
        layer_types=["full_attention", "sliding_attention"],
    )  # fmt: skip
    torch.manual_seed(0)
    model = hf.Qwen3ForCausalLM(config).eval()
    sq.hf.swap(model, {0: "linear", 1: "full"})
    ids, mask = padded_ids("left")
    options = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 8, "output_logits": True, **OPTIONS}
    cache = sq.hf.StateCache(model)
    same(model.generate(**options, past_key_values=cache), model.generate(**options, use_cache=False))
    assert cache.layers[1].keys.shape[2] == 4


def test_items_are_chosen_and_repeated():
    model = swapped().model
    ids, _ = padded_ids(pads=0)
    cache = sq.hf.StateCache(model)
    model(input_ids=ids[:, :16], past_key_values=cache)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0]))
    have = model(input_ids=ids.flip(0)[:, 16:], past_key_values=cache).logits
    torch.testing.assert_close(have, model(input_ids=ids).logits.flip(0)[:, 16:], atol=1e-4, rtol=1e-4)


def test_a_reset_cache_is_a_new_one():
    model = swapped().model
    ids, _ = padded_ids(pads=0)
    cache = sq.hf.StateCache(model)
    want = model(input_ids=ids, past_key_values=cache).logits
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(model(input_ids=ids, past_key_values=cache).logits, want)


def test_a_model_in_bf16_keeps_its_states_in_fp32():
    case = swapped()
    case.model.to(torch.bfloat16)
    cache = sq.hf.StateCache(case.model)
    case.model.generate(**case.inputs, max_new_tokens=3, past_key_values=cache)
    assert {tensor.dtype for state in states(cache) for tensor in state.values()} == {torch.float32}


def test_gradients_flow_through_a_state():
    model = swapped().model
    ids, _ = padded_ids(pads=0)

    def gradient(run):
        model.zero_grad()
        run().square().mean().backward()
        return [p.grad.clone() for p in model.parameters()]

    def in_pieces():
        cache = sq.hf.StateCache(model)
        return torch.cat([model(input_ids=x, past_key_values=cache).logits for x in (ids[:, :9], ids[:, 9:])], 1)

    for have, want in zip(gradient(in_pieces), gradient(lambda: model(input_ids=ids).logits), strict=True):
        torch.testing.assert_close(have, want, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_at_its_exact_limit_a_swapped_model_generates_what_it_did(name):
    case = build(name)
    options = case.inputs | OPTIONS | {"max_new_tokens": 12, "output_logits": True}
    want = case.model.generate(**options)
    sq.hf.swap(case.model, f"local:window={17 + 12}")
    same(case.model.generate(**options), want)
    sq.hf.swap(case.model, "local:window=2")
    assert not torch.allclose(torch.stack(case.model.generate(**options).logits), torch.stack(want.logits), atol=1e-2)


# ---------------------------------------------------------------------- what a state cannot do


def test_assisted_decoding_is_refused():
    model = swapped().model
    ids, _ = padded_ids(batch=1, pads=0)
    # A transformers that does not tell caches of it takes the tokens back.
    refused = "used for assisted decoding" if hasattr(hf.Cache, "activate_past_recording") else "cropped"
    with pytest.raises(ValueError, match=rf"cannot be {refused}: tokens .* cannot be taken out"):
        model.generate(ids, max_new_tokens=5, prompt_lookup_num_tokens=2, past_key_values=sq.hf.StateCache(model))


def test_taking_tokens_back_and_offloading_are_refused():
    model = swapped().model
    cache = sq.hf.StateCache(model)
    model(input_ids=padded_ids()[0], past_key_values=cache)
    assert not getattr(cache, "is_croppable", False)  # older caches do not have it
    assert not cache.is_compileable
    cache.crop(0)
    with pytest.raises(ValueError, match=r"cannot be cropped: tokens .* cannot be taken out"):
        cache.crop(-1)
    for layer in cache.layers:
        for move in (layer.offload, layer.prefetch):
            with pytest.raises(ValueError, match="cannot be offloaded"):
                move()
    for move in (cache.offload, cache.prefetch):
        with pytest.raises(ValueError, match="a StateCache cannot be offloaded"):
            move(0)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_encoder_decoders_are_refused(name):
    model = build(name).model
    with pytest.raises(ValueError, match="has cross-attention"):
        sq.hf.StateCache(model)


def test_models_without_a_state_are_refused():
    model = build("llama").model
    for swap in (lambda: None, lambda: sq.hf.swap(model, "full")):
        swap()
        with pytest.raises(ValueError, match="no layer of this LlamaForCausalLM runs a method with a state"):
            sq.hf.StateCache(model)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("linear", "linear:feature_map=exp"),
        ("performer:features=32", "performer:features=32,seed=1"),
        ("rfa:features=8", "rfa:features=8,gates=none"),
        ("linear", "performer:features=32"),
        ("linear", "full"),
        ({0: "full", 1: "linear"}, {0: "full", 1: "linear:feature_map=exp"}),
    ],
    ids=str,
)
@torch.no_grad()
def test_a_cache_of_another_method_is_refused_before_any_layer_runs(first, second):
    model = swapped(method=first).model
    ids, _ = padded_ids(pads=0)
    want = model(input_ids=ids).logits
    cache = sq.hf.StateCache(model)
    model(input_ids=ids[:, :16], past_key_values=cache)
    learned = sq.hf.bounds(model)
    sq.hf.swap(model, second)
    before, after = (first[1], second[1]) if isinstance(first, dict) else (first, second)
    for held in (cache, copy.deepcopy(cache)):
        with pytest.raises(ValueError, match=rf"filled by {before}, but layer \d \(.*\) runs {after} now: make a new"):
            model(input_ids=ids[:, 16:], past_key_values=held)
    sq.hf.swap(model, learned)
    for held in (copy.deepcopy(cache), cache):
        have = model(input_ids=ids[:, 16:], past_key_values=held).logits
        torch.testing.assert_close(have, want[:, 16:], atol=1e-4, rtol=1e-4)


def test_a_cache_knows_the_learned_parameters_that_filled_it():
    model, method = build("llama").model, "learned-feature-map:window=4"
    ids, _ = padded_ids(pads=0)
    for again in ("linear", method):
        sq.hf.swap(model, again)
        cache = sq.hf.StateCache(model)
        model(input_ids=ids, past_key_values=cache)
        sq.hf.swap(model, again)
        if again == "linear":
            assert model(input_ids=ids[:, :1], past_key_values=cache).logits.isfinite().all()
    with pytest.raises(ValueError, match=f"filled by {method}, but layer 0 .* runs it with other learned parameters"):
        model(input_ids=ids[:, :1], past_key_values=cache)


def test_a_cache_that_is_empty_is_refused_where_the_method_has_no_state():
    model = swapped().model
    cache = sq.hf.StateCache(model)
    sq.hf.swap(model, "full")
    with pytest.raises(ValueError, match=r"layer 0 .* runs full now, which keeps no state: make a new"):
        model(input_ids=padded_ids()[0], past_key_values=cache)


@pytest.mark.parametrize("stateful", [0, 1])
def test_another_batch_is_refused_before_any_layer_runs(stateful):
    model = swapped(method={stateful: "linear", 1 - stateful: "full"}).model
    ids, _ = padded_ids(pads=0)
    want = model(input_ids=ids).logits[:, 16:]
    cache = sq.hf.StateCache(model)
    model(input_ids=ids[:, :16], past_key_values=cache)
    with pytest.raises(ValueError, match=r"with a batch of 2, but now it is given one of 1: make a new .* each batch"):
        model(input_ids=ids[:1, 16:], past_key_values=cache)
    torch.testing.assert_close(model(input_ids=ids[:, 16:], past_key_values=cache).logits, want, atol=1e-4, rtol=1e-4)


def test_a_filled_cache_without_a_new_token_is_refused():
    model = swapped().model
    ids, _ = padded_ids(pads=0)
    cache, options = sq.hf.StateCache(model), {"do_sample": False, "eos_token_id": None}
    out = model.generate(ids, max_new_tokens=20, past_key_values=cache, **options)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"has already seen 36 tokens and there is no new one: make a new"):
            model.generate(ids, max_new_tokens=4, past_key_values=cache, **options)
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    with pytest.raises(ValueError, match="mask has 17 positions, but the cache has seen 36 tokens and 1 are new"):
        model(input_ids=ids[:, :1], attention_mask=mask, past_key_values=cache)
    more = model.generate(out, max_new_tokens=4, past_key_values=cache, **options)
    assert torch.equal(more, model.generate(ids, max_new_tokens=24, **options))


def test_what_stopped_a_cache_is_said_again():
    model = build("llama").model
    sq.hf.swap(model, {0: "linformer:k=4", 1: "linear"}, max_length=20)
    ids, _ = padded_ids(pads=0)
    cache = sq.hf.StateCache(model)
    model(input_ids=ids, past_key_values=cache)
    with pytest.raises(ValueError, match="'linformer' was bound for at most 20 tokens"):
        model(input_ids=ids[:, :9], past_key_values=cache)
    with pytest.raises(ValueError, match=r"stopped layer 0 .* make a new .* ValueError: 'linformer' was bound for"):
        model(input_ids=ids[:, :1], past_key_values=cache)


def test_a_pass_that_stopped_between_layers_is_noticed():
    model = swapped().model
    ids, _ = padded_ids(pads=0)
    cache = sq.hf.StateCache(model)
    model(input_ids=ids, past_key_values=cache)
    hook = model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(input_ids=ids[:, :1], past_key_values=cache)
    hook.remove()
    with pytest.raises(ValueError, match="stopped the last tokens of this cache between two layers: make a new"):
        model(input_ids=ids[:, :1], past_key_values=cache)


def test_a_layer_that_runs_its_own_attention_again_does_not_go_on_without_the_past():
    model = swapped().model
    ids, _ = padded_ids(pads=0)
    cache = sq.hf.StateCache(model)
    model(input_ids=ids, past_key_values=cache)
    sq.hf.restore(model)
    with pytest.raises(ValueError, match=r"layer 0 .* does not run subquad's attention any more"):
        model(input_ids=ids[:, :1], past_key_values=cache)


def test_keys_that_are_changed_after_the_cache_are_noticed():
    model = swapped().model
    ids, _ = padded_ids(pads=0)
    cache, update = sq.hf.StateCache(model), hf.Cache.update
    cache.update = lambda key, value, *rest, **more: [1.0 * x for x in update(cache, key, value, *rest, **more)]
    prompt = model(input_ids=ids, past_key_values=cache).logits
    torch.testing.assert_close(prompt, model(input_ids=ids).logits)
    with pytest.raises(ValueError, match=r"that layer 0 .* did not come through its attention"):
        model(input_ids=ids[:, :1], past_key_values=cache)


def test_dropout_is_refused():
    model = swapped().model.train()
    for layer in sq.hf.find_layers(model):
        layer.module.attention_dropout = 0.5
    with pytest.raises(ValueError, match=r"layer 0 .* cannot run on a StateCache"):
        model(input_ids=padded_ids()[0], past_key_values=sq.hf.StateCache(model))


def test_a_mask_of_the_wrong_length_names_both():
    model = swapped().model
    cache = sq.hf.StateCache(model)
    ids, _ = padded_ids(pads=0)
    model(input_ids=ids, past_key_values=cache)
    layer = sq.hf.find_layers(model)[0].module
    q, k = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 1, 8)
    k, v = cache.update(k, k, 0)
    for mask, message in (
        (torch.ones(2, 1, 1, 1, dtype=torch.int8), "has 1 positions, but there are 18 keys"),
        (torch.ones(2, 1, 1, 18, dtype=torch.int32), "packed sequences have one state each"),
    ):
        with pytest.raises(ValueError, match=message):
            sq.hf.boundary.attend(layer, q, k, v, mask)


def test_a_layer_that_the_cache_does_not_number_is_refused():
    model = swapped().model
    sq.hf.find_layers(model)[1].module.layer_idx = 7
    with pytest.raises(ValueError, match=r"layer 1 .* keeps its keys in no layer of the cache"):
        sq.hf.StateCache(model)


def test_compiled_models_are_refused(monkeypatch):
    model = swapped().model
    monkeypatch.setattr("subquad.hf.state_cache.is_compiling", lambda: True)
    with pytest.raises(ValueError, match=r"cannot be used inside torch\.compile"):
        model(input_ids=padded_ids(pads=0)[0], past_key_values=sq.hf.StateCache(model))
