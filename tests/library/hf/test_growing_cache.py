"""Generation with `GrowingCache`: bit for bit what transformers' `DynamicCache` gives, in all that `generate` does."""

import copy
import io
import pickle
from itertools import pairwise

import pytest
import torch
import transformers as hf

import subquad as sq
from tests.library.hf.models import TEXT, build, need_recording, padded_ids

DECODERS = ("llama", "gpt2", "opt", "qwen3", "mistral", "gemma3", "phi")
SEQ2SEQ = ("whisper", "t5", "bart")
WINDOWED = ("mistral", "gemma3")
OPTIONS = {"do_sample": False, "eos_token_id": None, "return_dict_in_generate": True, "output_logits": True}


def caches(model):
    """A `DynamicCache` and a `GrowingCache`, for an encoder-decoder two of each."""
    dynamic = lambda: hf.DynamicCache(config=model.config)  # noqa: E731
    growing = lambda: sq.hf.GrowingCache(model)  # noqa: E731
    kinds = (dynamic, growing)
    if not model.config.is_encoder_decoder:
        return [kind() for kind in kinds]
    return [hf.EncoderDecoderCache(kind(), kind()) for kind in kinds]


def prepared(name, attention="sdpa", method=None):
    case = build(name)
    case.model.set_attn_implementation(attention)
    if method is not None:
        sq.hf.swap(case.model, method)
    case.inputs.pop("decoder_input_ids", None)
    case.inputs.pop("decoder_attention_mask", None)
    return case


def same(case, tokens=20, **options):
    """Generate with both caches; assert that tokens and logits are equal bit for bit. Returns the second cache."""
    outs = []
    for cache in caches(case.model):
        torch.manual_seed(5)
        outs.append(
            case.model.generate(**case.inputs, **(OPTIONS | options), max_new_tokens=tokens, past_key_values=cache)
        )
    want, have = outs
    assert torch.equal(have.sequences, want.sequences)
    assert torch.equal(torch.stack(have.logits), torch.stack(want.logits))
    return cache


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", [*DECODERS, *SEQ2SEQ])
def test_greedy_in_models_with_their_own_attention(name, attention):
    same(prepared(name, attention))


@pytest.mark.parametrize("name", [*DECODERS, *SEQ2SEQ])
def test_greedy_in_swapped_models(name):
    same(prepared(name, method="full"))


@pytest.mark.parametrize("method", ["full:kernel=subquad", "clustered-tail", "local:window=4"])
def test_greedy_with_other_methods(method):
    same(prepared("llama", method=method))


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "gemma3", *SEQ2SEQ])
@pytest.mark.parametrize("method", [None, "full"])
def test_beams_and_samples(name, method):
    case = prepared(name, method=method)
    same(case, tokens=12, num_beams=3, num_return_sequences=2)
    same(case, tokens=12, do_sample=True, num_return_sequences=2)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "gemma3"])
@pytest.mark.parametrize("method", [None, "full"])
def test_tokens_that_are_taken_back(name, method):
    need_recording(windows=name in WINDOWED)
    case = prepared(name, method=method)
    case.inputs = {"input_ids": case.inputs["input_ids"][:1].repeat(1, 2)}  # a prompt that repeats itself
    same(case, prompt_lookup_num_tokens=3)
    assistant = prepared(name).model
    with torch.no_grad():
        for weight in assistant.parameters():
            weight.add_(0.02 * torch.randn_like(weight))
    same(case, assistant_model=assistant)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_a_prompt_in_pieces(name):
    same(prepared(name), prefill_chunk_size=4)


@pytest.mark.parametrize("method", [None, "full", "clustered-tail"])
def test_several_prompts_on_one_cache(method):
    case = prepared("llama", method=method)
    ids, mask = case.inputs["input_ids"], case.inputs["attention_mask"]
    results = []
    for cache in caches(case.model):
        tokens, real = ids, mask
        for _ in range(3):
            out = case.model.generate(
                tokens, attention_mask=real, **OPTIONS, max_new_tokens=5, past_key_values=cache
            ).sequences
            tokens = torch.cat([out, ids[:, -4:]], 1)
            real = torch.nn.functional.pad(real, (0, tokens.shape[1] - real.shape[1]), value=1)
        results.append(out)
    assert torch.equal(*results)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_padded_batch_equals_each_alone(name):
    case = prepared(name, method="clustered-tail")
    ids, mask = case.inputs["input_ids"], case.inputs["attention_mask"]
    options = OPTIONS | {"max_new_tokens": 8}
    together = case.model.generate(**case.inputs, **options, past_key_values=sq.hf.GrowingCache(case.model))
    for row in range(2):
        own = ids[row : row + 1, mask[row].bool()]
        alone = case.model.generate(own, **options, past_key_values=sq.hf.GrowingCache(case.model))
        assert torch.equal(together.sequences[row, -8:], alone.sequences[0, -8:])


def test_positions_of_a_padded_batch_are_counted_as_on_another_cache():
    """Without position_ids, items of a swapped model start at their first real token, also on this cache."""
    case = prepared("llama", method="clustered-tail")
    ids, mask = padded_ids("left")
    outs = []
    with torch.inference_mode():
        for cache in caches(case.model):
            case.model(input_ids=ids[:, :-1], attention_mask=mask[:, :-1], past_key_values=cache)
            outs.append(case.model(input_ids=ids[:, -1:], attention_mask=mask, past_key_values=cache).logits)
        assert torch.equal(*outs)
        cache.reset()
        case.model(input_ids=ids, past_key_values=cache)  # the mark is gone with the tokens


# ---------------------------------------------------------------------- what is in the buffers


def test_keys_are_not_copied_until_the_room_is_taken():
    case = prepared("llama")
    cache, (ids, _) = sq.hf.GrowingCache(case.model), padded_ids(pads=0)
    places = []
    with torch.inference_mode():
        for start, end in [(0, 9), *((t, t + 1) for t in range(9, 17))]:
            case.model(input_ids=ids[:, start:end], past_key_values=cache)
            places.append(cache.layers[0].keys.data_ptr())
    assert len(set(places)) == 2  # the prompt's, and one of twice as many rows from the first step on
    assert cache.get_seq_length() == 17
    assert cache.layers[1].values.shape == (2, 2, 17, 8)


def test_a_length_is_allocated_once():
    case = prepared("llama")
    cache, (ids, _) = sq.hf.GrowingCache(case.model, length=17), padded_ids(pads=0)
    places = set()
    with torch.inference_mode():
        for start, end in ((0, 9), (9, 10), (10, 17)):
            case.model(input_ids=ids[:, start:end], past_key_values=cache)
            places.add(cache.layers[0].keys.data_ptr())
        rows = cache.layers[0]._buffers[0].shape[2]
        case.model(input_ids=ids[:, :1], past_key_values=cache)  # and a token more than was said
    assert (len(places), rows, cache.get_seq_length()) == (1, 17, 18)


def test_a_window_moves_once_a_window():
    case = prepared("mistral")  # of 5 tokens
    cache, ids = sq.hf.GrowingCache(case.model), torch.randint(5, 60, (1, 40))
    places = []
    with torch.inference_mode():
        case.model(input_ids=ids[:, :12], past_key_values=cache)
        for t in range(12, 40):
            case.model(input_ids=ids[:, t : t + 1], past_key_values=cache)
            places.append(cache.layers[0]._buffers[0].data_ptr())
            assert cache.layers[0].keys.shape[2] == 4
            assert cache.layers[0]._buffers[0].shape[2] <= 10
    assert sum(a != b for a, b in pairwise(places)) <= 28 // 4


def test_beams_move_only_what_is_filled():
    layer = sq.hf.GrowingCache(prepared("llama").model, length=1000).layers[0]
    key = torch.randn(3, 2, 5, 8)
    with torch.inference_mode():
        layer.update(key, key + 1)
        layer._buffers[0][:, :, 5:] = torch.nan
        place = layer.keys.data_ptr()
        layer.reorder_cache(torch.tensor([1, 1, 0]))
        assert layer.keys.data_ptr() == place
        assert torch.equal(layer.keys, key[[1, 1, 0]])
        assert torch.equal(layer.values, key[[1, 1, 0]] + 1)
        assert layer._buffers[0][:, :, 5:].isnan().all()


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("change", ["deepcopy", "pickle", "save", "repeat", "select", "crop", "detached"])
def test_a_cache_goes_on_after_a_change(name, change):
    need_recording(windows=name in WINDOWED)
    case = prepared(name)
    ids, _ = padded_ids(pads=0)
    outs = []
    with torch.inference_mode():
        for cache in caches(case.model):
            cache.activate_past_recording()
            for start, end in ((0, 9), (9, 10), (10, 11)):
                case.model(input_ids=ids[:, start:end], past_key_values=cache)
            rest, old = ids[:, 11:], cache
            if change == "deepcopy":
                cache = copy.deepcopy(cache)
            elif change == "pickle":
                cache = pickle.loads(pickle.dumps(cache))
            elif change == "save":
                torch.save(cache, file := io.BytesIO())
                cache = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
            elif change == "repeat":
                cache.batch_repeat_interleave(2)
                rest = rest.repeat_interleave(2, 0)
            elif change == "select":
                cache.batch_select_indices(torch.tensor([1]))
                rest = rest[1:]
            elif change == "crop":
                cache.crop(-3)
                rest = ids[:, 8:]
            else:
                for layer in cache.layers:
                    layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
            outs += [case.model(input_ids=rest[:, :1], past_key_values=cache).logits]
            if cache is not old:  # two caches, each with tokens of its own
                outs[-1] += case.model(input_ids=rest[:, 1:2], past_key_values=old).logits
            outs[-1] += case.model(input_ids=rest[:, 1:2], past_key_values=cache).logits
    assert torch.equal(*outs)


def test_a_copy_has_no_room():
    model = prepared("llama").model
    cache, (ids, _) = sq.hf.GrowingCache(model, length=10_000), padded_ids(pads=0)
    with torch.inference_mode():
        model(input_ids=ids, past_key_values=cache)
        assert len(pickle.dumps(cache)) < 40_000
        keys = copy.deepcopy(cache).layers[0].keys
    assert keys.untyped_storage().nbytes() == keys.nbytes


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_gradients_through_a_cache(name):
    case = prepared(name)
    ids, _ = padded_ids(pads=0)
    weight = case.model.model.layers[0].self_attn.k_proj.weight
    grads = []
    for cache in caches(case.model):
        with torch.no_grad():
            case.model(input_ids=ids[:, :4], past_key_values=cache)
        logits = [
            case.model(input_ids=ids[:, start:end], past_key_values=cache).logits
            for start, end in ((4, 8), (8, 9), (9, 10))
        ]
        with torch.no_grad():  # a step behind does not spoil the graph
            case.model(input_ids=ids[:, 10:11], past_key_values=cache)
        grads += torch.autograd.grad(torch.cat(logits, 1).square().sum(), weight)
    assert torch.equal(*grads)


def test_inference_mode_and_no_grad_alternate():
    case = prepared("llama")
    ids, _ = padded_ids(pads=0)
    outs = []
    for cache in caches(case.model):
        for t in range(17):
            with (torch.inference_mode, torch.no_grad)[t % 2]():
                logits = case.model(input_ids=ids[:, t : t + 1], past_key_values=cache).logits
        outs.append(logits)
    assert torch.equal(*outs)


def test_compiled_models_take_it():
    case = prepared("llama")
    ids, _ = padded_ids(pads=0)
    compiled = torch.compile(case.model.forward, backend="eager", fullgraph=True)
    outs = []
    with torch.no_grad():
        for cache in caches(case.model):
            compiled(input_ids=ids[:, :9], past_key_values=cache)
            for t in range(9, 12):
                compiled(input_ids=ids[:, t : t + 1], past_key_values=cache)
            outs.append(case.model(input_ids=ids[:, 12:], past_key_values=cache).logits)
    assert torch.equal(*outs)


def test_no_new_tokens():
    """A call of no token changes nothing, as on a `DynamicCache`."""
    for layer in sq.hf.GrowingCache(prepared("gemma3").model).layers:
        with torch.inference_mode():
            key = torch.randn(1, 2, 3, 8)
            layer.update(key[:, :, :0], key[:, :, :0])
            layer.update(key, key)
            keys, _ = layer.update(key[:, :, :0], key[:, :, :0])
        assert torch.equal(keys, key)
        assert layer.get_seq_length() == 3


def test_hidden_rows_hold_anything():
    case = prepared("llama", method="full")
    ids, _ = padded_ids(pads=0)
    outs = []
    with torch.inference_mode():
        for poison in (0.0, torch.nan):
            cache = sq.hf.GrowingCache(case.model, length=40)
            case.model(input_ids=ids[:, :9], past_key_values=cache)
            for layer in cache.layers:
                for buffer in layer._buffers:
                    buffer[:, :, 9:] = poison
            outs.append(case.model(input_ids=ids[:, 9:], past_key_values=cache).logits)
    assert torch.equal(*outs)


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize("length", [0, -1, 3.5, True])
def test_length_of_nothing(length, unchecked):
    with pytest.raises(ValueError, match=f"at least 1 token, got {length}"):
        sq.hf.GrowingCache(prepared("llama").model, length=length)


def test_models_without_keys():
    model = hf.MambaForCausalLM(hf.MambaConfig(vocab_size=60, hidden_size=16, num_hidden_layers=1))
    with pytest.raises(ValueError, match="MambaForCausalLM keeps keys"):
        sq.hf.GrowingCache(model)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("change", ["batch", "dtype", "device", "heads", "width"])
def test_another_call_is_refused_before_any_layer_keeps_its_keys(name, change):
    case = prepared(name)
    model, (ids, _) = case.model, padded_ids(pads=0)
    cache = sq.hf.GrowingCache(model)
    with torch.inference_mode():
        model(input_ids=ids[:, :9], past_key_values=cache)
        before = [layer.keys.clone() for layer in cache.layers]
        was, now = {
            "batch": ("2 items", "1 item, 2 heads"),
            "dtype": ("torch.float32", "torch.bfloat16"),
            "device": ("on cpu", "on meta"),
            "heads": ("2 heads", "4 heads"),
            "width": ("of 8", "of 4"),
        }[change]
        if change == "batch":
            ids = ids[:1]
        elif change == "dtype":
            model = model.bfloat16()
        elif change == "device":
            model, ids = model.to("meta"), ids.to("meta")
        else:
            config = copy.deepcopy(model.config)
            config.update({"num_key_value_heads": 4} if change == "heads" else {"head_dim": 4})
            model = type(model)(config).eval()
        with pytest.raises(ValueError, match=f"layer 0 of this cache has keys of .*{was}.*is given .*{now}"):
            model(input_ids=ids[:, 9:], past_key_values=cache)
        for layer, keys in zip(cache.layers, before, strict=True):
            assert torch.equal(layer.keys, keys)


@pytest.mark.parametrize("layers", [1, 3])
def test_a_cache_of_another_number_of_layers(layers):
    case = prepared("llama")
    other = hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT | {"num_hidden_layers": layers}, num_key_value_heads=2)).eval()
    ids, _ = padded_ids(pads=0)
    cache = sq.hf.GrowingCache(other)
    message = {
        1: "this cache has 1 layers, but the model has a layer 1",
        3: "layer 0 of this cache has 9 tokens, but layer 2 has 0: .*a model with fewer layers",
    }[layers]
    with torch.inference_mode():
        if layers == 3:  # which is seen when the call is over
            case.model(input_ids=ids[:, :9], past_key_values=cache)
        for _ in range(2):
            with pytest.raises(ValueError, match=message):
                case.model(input_ids=ids[:, :9], past_key_values=cache)
        cache.reset()
        other(input_ids=ids, past_key_values=cache)
    assert cache.get_seq_length() == 17


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_call_that_stopped_between_two_layers(name):
    case = prepared(name)
    ids, _ = padded_ids(pads=0)
    cache, last = sq.hf.GrowingCache(case.model), case.model.model.layers[-1]
    with torch.inference_mode():
        case.model(input_ids=ids[:, :9], past_key_values=cache)
        hook = last.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            case.model(input_ids=ids[:, 9:12], past_key_values=cache)
        hook.remove()
        with pytest.raises(ValueError, match=r"has 12 tokens, but layer \d has 9: an error stopped the last call"):
            case.model(input_ids=ids[:, 9:12], past_key_values=cache)


def test_offloading_is_refused():
    cache = sq.hf.GrowingCache(prepared("llama").model)
    for move in (cache.offload, cache.prefetch):
        with pytest.raises(ValueError, match="a GrowingCache cannot be offloaded"):
            move(0)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_an_encoder_decoder_needs_two(name):
    case = prepared(name)
    with pytest.raises(ValueError, match=r"it needs two, transformers\.EncoderDecoderCache\(sq\.hf\.GrowingCache"):
        case.model.generate(**case.inputs, max_new_tokens=3, past_key_values=sq.hf.GrowingCache(case.model))


def test_a_cache_that_was_cropped_to_nothing_takes_its_own_batch_alone():
    model = build("llama").model
    layer = sq.hf.GrowingCache(model).layers[0]
    keys = torch.randn(4, 2, 5, 8)
    with torch.no_grad():
        layer.update(keys, keys)
        layer.crop(-5)
        with pytest.raises(ValueError, match="4 items, 2 heads of 8"):
            layer.check(keys[:1].bfloat16(), keys[:1].bfloat16(), 0)
