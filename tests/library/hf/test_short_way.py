"""Steps on a cache go a short way from transformers to the kernel, with what a forward pass's layers share."""

import copy
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
import transformers as hf
from torch.profiler import ProfilerActivity, profile

import subquad as sq
from subquad.hf import layer_masks, steps
from subquad.hf.boundary import attend, make_mask
from subquad.hf.layers import NAME, Attached
from subquad.kernels import native
from subquad.methods import METHODS, ByLength, ClusteredTail, Full, Method, MixedHeads
from subquad.methods.core.names import resolve
from tests.library.hf.families import FAMILIES
from tests.library.hf.models import build, padded_ids

EXACT_STEPS = ["full", "full:kernel=subquad", "clustered-tail", "by-length:steps=0:full+64:clustered-tail"]
STEPS_BY_POSITION = ["local:window=7", "keep:first=3", "local:window=7+keep", "local:window=90+keep:first=2,every=5"]


LENGTH = 48  # more than a step has


def attached(model):
    return [module for module in model.modules() if isinstance(module, Attached)]


def step(model, ids, mask=None, *, new=1):
    """The logits of the last `new` tokens, on a cache of the others."""
    masks = [None, None] if mask is None else [mask[:, :-new], mask]
    cache = hf.DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :-new], attention_mask=masks[0], past_key_values=cache)
        return model(ids[:, -new:], attention_mask=masks[1], past_key_values=cache).logits


@pytest.fixture
def general_way(monkeypatch):
    """Calls of `Method.run`, which every call makes that goes the general way."""
    calls = []
    run = Method.run
    monkeypatch.setattr(Method, "run", lambda self, *args: calls.append(self) or run(self, *args))
    return calls


@pytest.mark.parametrize("new", [1, 5])
@pytest.mark.parametrize("side", ["left", None])
@pytest.mark.parametrize("method", EXACT_STEPS)
def test_a_step_is_the_models_own(method, side, new, general_way):
    model = build("llama").model
    ids, mask = padded_ids(side or "right", length=LENGTH, pads=6 if side else 0)
    want = step(model, ids, mask, new=new)
    sq.hf.swap(model, method)
    general_way.clear()  # of the trial
    torch.testing.assert_close(step(model, ids, mask, new=new), want, atol=1e-5, rtol=1e-4)
    assert len(general_way) == len(attached(model))  # for the tokens before the step


@pytest.mark.parametrize(
    "method", ["local", "full:positions=relative", "clustered-tail:last=0", "mixed-heads:methods=local+full"]
)
def test_methods_whose_last_queries_are_not_exact(method):
    assert resolve(method).exact_queries == 0


def test_more_queries_than_are_exact_go_the_general_way(general_way):
    model = build("llama").model
    sq.hf.swap(model, "clustered-tail:last=3")
    general_way.clear()  # of the trial
    ids, _ = padded_ids(length=LENGTH, pads=0)
    step(model, ids, new=4)
    assert len(general_way) == 2 * len(attached(model))
    step(model, ids, new=3)
    assert len(general_way) == 3 * len(attached(model))


def in_one_pass(model, ids, mask, *, new):
    """The logits of the last `new` tokens, without a cache."""
    with torch.no_grad():
        return model(ids, attention_mask=mask, use_cache=False).logits[:, -new:]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("side", ["left", None])
@pytest.mark.parametrize("method", STEPS_BY_POSITION)
def test_a_step_by_position_is_that_of_the_whole_call(method, side, name, general_way):
    model = build(name).model
    ids, mask = padded_ids(side or "right", length=LENGTH, pads=6 if side else 0)
    swapped = sq.hf.swap(model, method)
    in_windows = [layer.number for layer in swapped.layers if layer.window is not None]
    taken = {str(swapped.methods[number]) for number in in_windows}
    assert taken <= ({"full:kernel=subquad"} if "keep" in method else {method})
    want = {new: in_one_pass(model, ids, mask, new=new) for new in (1, 5)}
    general_way.clear()  # of the trial and of these
    torch.testing.assert_close(step(model, ids, mask), want[1], atol=1e-5, rtol=1e-4)
    assert len(general_way) == len(attached(model))  # for the tokens before the step
    torch.testing.assert_close(step(model, ids, mask, new=5), want[5], atol=1e-5, rtol=1e-4)
    others = [each for each in general_way if not each.is_exact]  # several queries meet different keys
    assert len(others) == 3 * (len(attached(model)) - len(in_windows) * ("keep" in method))


def in_windows():
    """The methods that say that they can run inside a layer's window, with settings that show all of their parts."""
    texts = [text for name, method in sorted(METHODS.items()) for text in (name, with_example(name, method))]
    traits = {text: resolve(text).traits for text in texts}
    return [text for text, t in traits.items() if t.window and t.cached and t.causal == "strict" and not t.learned]


def with_example(name, method):
    """The method with the settings of its traits' example."""
    return f"{name}:{','.join(f'{key}={value}' for key, value in method.traits.example.items())}"


@pytest.mark.parametrize("method", in_windows())
def test_steps_in_windowed_layers_see_the_keys_of_the_whole_call(method):
    """Their cache has the keys of the window alone, and positions in it are not those in the text."""
    model = build("gemma3").model
    ids, _ = padded_ids(length=LENGTH, pads=0)
    sq.hf.swap(model, method)
    torch.testing.assert_close(step(model, ids), in_one_pass(model, ids, None, new=1), atol=1e-5, rtol=1e-4)


def test_methods_that_count_from_the_start_are_refused_in_windowed_layers():
    model = build("mistral").model
    with pytest.raises(
        ValueError, match=r"layer 0 .*'keep' counts from each item's first token, which is no longer in"
    ):
        sq.hf.swap(model, {"*": "keep"})
    with pytest.raises(
        ValueError,
        match=r"'local:window=5\+keep' counts from .*, and all 2 layers of this model attend to a window only",
    ):
        sq.hf.swap(model, "local:window=5+keep")
    with pytest.raises(ValueError, match=r"'by-length' counts from each item's first token"):
        sq.hf.swap(model, "by-length:steps=0:full+8:local:window=2")
    sq.hf.swap(model, "by-length:steps=0:full+8:full:kernel=subquad")
    sq.hf.swap(model, "longformer:window=5,first=0")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", STEPS_BY_POSITION)
def test_a_step_by_position_does_not_read_other_keys(method, dtype):
    model = build("llama").model.to(dtype)
    sq.hf.swap(model, method)
    module = model.model.layers[0].self_attn
    q, k, v = (torch.randn(2, heads, n, module.head_dim, dtype=dtype) for heads, n in ((4, 1), (2, 50), (2, 50)))
    mask, options = sq.Mask.causal(offset=49), {"method": method, "enable_gqa": True}
    want = sq.attention(q, k, v, mask=mask, **options)
    places = torch.eye(50, dtype=dtype).expand(2, 2, -1, -1)
    others = sq.attention(q[:, :2], k, places, mask=mask, method=method)[0, 0, 0] == 0
    assert others.any() == (method != STEPS_BY_POSITION[-1])
    k[:, :, others], v[:, :, others] = torch.nan, torch.inf
    out, _ = attend(module, q, k, v, None)
    torch.testing.assert_close(out.transpose(1, 2), want, atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=1e-2)


@pytest.mark.parametrize(
    "method",
    [
        "local:positions=relative",
        "strided",
        "local+strided",
        "mixed-heads:methods=local+keep",
        "full",
        "performer+local",
    ],
)
def test_methods_that_prepare_no_step(method):
    assert resolve(method).prepare_step is None


def test_a_class_that_meets_otherwise_prepares_no_step():
    other = type("Other", (sq.Local,), {"meetings": sq.Local.meetings})
    assert sq.Local().prepare_step is not None
    assert other().prepare_step is None


def negated(base, function):
    """A class made of `base`, in which one function gives the negative of what it gives in `base`."""

    def negative(self, *args, **options):
        result = getattr(base, function)(self, *args, **options)
        if callable(result):
            return lambda *inputs: negative_of(result(*inputs))
        return negative_of(result)

    def negative_of(result):
        return (-result[0], *result[1:]) if isinstance(result, tuple) else -result

    return dataclass(frozen=True)(type("Negated", (base,), {function: negative}))


@pytest.mark.parametrize(
    ("base", "settings", "function"),
    [
        (Full, {}, "attend"),
        (Full, {"kernel": "subquad"}, "attend"),
        (Full, {}, "attend_partial"),
        (Full, {}, "prepare"),
        (ClusteredTail, {}, "attend"),
        (ClusteredTail, {}, "attend_causally"),
        (ClusteredTail, {}, "attend_for"),
        (ClusteredTail, {}, "attend_partial"),
        (ClusteredTail, {}, "run"),
        (ByLength, {"steps": "0:full+64:clustered-tail"}, "attend"),
        (MixedHeads, {"methods": "full+clustered-tail"}, "attend"),
    ],
)
def test_a_class_that_attends_otherwise_does_so_in_steps(base, settings, function):
    model, method = build("llama").model, negated(base, function)(**settings)
    sq.hf.swap(model, method)
    module = model.model.layers[0].self_attn
    q, k, v = (torch.randn(2, heads, tokens, module.head_dim) for heads, tokens in ((4, 1), (2, 9), (2, 9)))
    out, _ = attend(module, q, k, v, None)
    want = method(q, k, v, mask=sq.Mask.causal(offset=8), enable_gqa=True)
    torch.testing.assert_close(out.transpose(1, 2), want, atol=1e-5, rtol=1e-5)
    # Few queries of a causal call reach no `attend` of a method that is causal by halves.
    changes = function != "attend" or base is not ClusteredTail
    exact = sq.attention(q, k, v, method="full", mask=sq.Mask.causal(offset=8), enable_gqa=True)
    assert torch.allclose(want, exact, atol=1e-4) != changes


def test_a_class_may_promise_exact_queries_anew():
    assert negated(Full, "attend")().exact_queries == 0
    assert type("Deeper", (negated(Full, "attend"),), {})().exact_queries == 0
    promising = type("Promising", (Full,), {"attend": Full.attend, "exact_queries": 3})
    assert promising().exact_queries == 3


@pytest.mark.parametrize("new", [1, 3, 40])
@pytest.mark.parametrize("additive", [True, False])
@pytest.mark.parametrize("method", EXACT_STEPS)
def test_a_mask_of_one_item_is_that_of_all(method, additive, new):
    """4-D masks, as a model's own code or its user makes them: padding of the first 4 keys, and causality."""
    model = build("llama").model
    sq.hf.swap(model, method)
    module = model.model.layers[0].self_attn
    q, k, v = (torch.randn(3, heads, n, module.head_dim) for heads, n in ((4, new), (2, 50), (2, 50)))
    visible = torch.arange(50) <= torch.arange(50 - new, 50)[:, None]
    visible[:, :4] = False
    mask = torch.zeros(new, 50).masked_fill(~visible, torch.finfo().min) if additive else visible
    one = attend(module, q, k, v, mask[None, None], is_causal=True)[0]
    each = attend(module, q, k, v, mask.expand(3, 1, -1, -1), is_causal=True)[0]
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)
    torch.testing.assert_close(one.transpose(1, 2), want, atol=1e-5, rtol=1e-4)
    assert torch.equal(one, each)


def test_layers_share_the_call_of_a_pass(monkeypatch):
    model = build("llama").model
    sq.hf.swap(model, "full")
    made = []
    decode = layer_masks.decode
    monkeypatch.setattr(layer_masks, "decode", lambda *args, **options: made.append(args) or decode(*args, **options))
    step(model, *padded_ids("left", length=LENGTH))
    assert len(made) == len(attached(model)) + 1  # each layer's of the first pass, and one of the step


def test_layers_with_windows_do_not_share_with_others():
    model = build("gemma3").model
    ids, _ = padded_ids(length=LENGTH, pads=0)
    want = step(model, ids)
    sq.hf.swap(model, "full")
    torch.testing.assert_close(step(model, ids), want, atol=1e-5, rtol=1e-4)


def test_windowed_layers_of_a_decoder_that_stay_exact_take_steps_by_the_kernel():
    model = build("gemma3").model
    ids, mask = padded_ids("left", length=LENGTH)
    want = step(model, ids, mask)
    swapped = sq.hf.swap(model, "clustered-tail")
    windowed = {layer.number for layer in swapped.layers if layer.window is not None}
    assert 0 < len(windowed) < len(swapped.layers)
    assert {str(swapped.methods[number]) for number in windowed} == {"full:kernel=subquad"}
    torch.testing.assert_close(step(model, ids, mask), want, atol=1e-5, rtol=1e-4)
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        step(model, ids, mask)
    counts = {event.key: event.count for event in trace.key_averages()}
    assert counts.get("subquad::steps_forward", 0) >= native.is_vectorised() * len(swapped.layers)


def hooked(model):
    return attached(model)[0].bound.register_forward_hook(lambda *_: None)


def under_autocast(model):
    return torch.autocast("cpu", dtype=torch.bfloat16)


def inside_a_transform(model):
    return torch.autograd.forward_ad.dual_level()


@pytest.mark.parametrize("around", [hooked, under_autocast, inside_a_transform])
def test_what_must_see_every_call_does(around, general_way):
    model = build("llama").model
    sq.hf.swap(model, "clustered-tail")
    general_way.clear()  # of the trial
    with around(model) or nullcontext():
        step(model, *padded_ids(length=LENGTH, pads=0))
    assert len(general_way) == len(attached(model)) + (1 if around is hooked else len(attached(model)))


def test_an_audit_sees_every_step():
    model = build("llama").model
    sq.hf.swap(model, "clustered-tail")
    with sq.audit(model, every=1, tolerance=1.0) as audit:
        step(model, *padded_ids(length=LENGTH, pads=0))
    assert [(layer.calls, layer.audited) for layer in audit.report().layers] == [(2, 2)] * len(attached(model))


def test_a_gradient_goes_the_general_way(general_way):
    model = build("llama").model
    sq.hf.swap(model, "full")
    general_way.clear()  # of the trial
    ids, _ = padded_ids(length=LENGTH, pads=0)
    cache = hf.DynamicCache(config=model.config)
    model(ids[:, :-1], past_key_values=cache)
    model(ids[:, -1:], past_key_values=cache).logits.sum().backward()
    assert len(general_way) == 2 * len(attached(model))
    assert all(parameter.grad is not None for parameter in model.model.layers.parameters())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda q, k, v: (q, k.double(), v.double()), TypeError, "`query` is torch.float32 but `key` is torch.float64"),
        (lambda q, k, v: (q, k[:, :1], v), ValueError, "heads"),
        (lambda q, k, v: (q, k, v[:, :, 1:]), ValueError, "must match"),
        (lambda q, k, v: (q[:, :2], k, v), ValueError, "bound for 4 heads"),
    ],
)
def test_what_does_not_fit_is_named(change, error, message):
    model = build("llama").model
    sq.hf.swap(model, "full")
    module = model.model.layers[0].self_attn
    width, kv_heads = module.head_dim, model.config.num_key_value_heads
    q, k, v = torch.randn(1, 4, 1, width), torch.randn(1, kv_heads, 9, width), torch.randn(1, kv_heads, 9, width)
    mask = make_mask(1, 1, 9, 8, 0, None)
    with pytest.raises(error, match=message):
        attend(module, *change(q, k, v), mask)
    assert getattr(module, NAME).prepared_queries > 0


@pytest.mark.parametrize("name", ["gemma2", "gpt-oss"])
def test_capped_logits_and_sinks_under_autocast(name):
    model = FAMILIES[name]().eval()
    sq.hf.swap(model, "full")
    ids = torch.randint(5, 60, (1, 10))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(input_ids=ids, use_cache=False).logits.isfinite().all()


@pytest.fixture
def cross_step():
    """A swapped cross-attention of a decoder of speech, called with numbers of queries and of keys."""
    model = build("whisper").model
    sq.hf.swap(model, "full:kernel=subquad")
    module = model.model.decoder.layers[0].encoder_attn
    sizes = module.num_heads, module.head_dim

    def call(tokens, keys, dtype=torch.float32):
        q, k = (torch.randn(2, sizes[0], n, sizes[1], dtype=dtype) for n in (tokens, keys))
        out, _ = attend(module, q, k, k, None, is_causal=False)
        want = torch.nn.functional.scaled_dot_product_attention(q, k, k)
        torch.testing.assert_close(out.transpose(1, 2), want, atol=2e-2 if dtype == torch.bfloat16 else 1e-5, rtol=1e-2)

    return call


def test_cross_attention_prepares_its_steps_once(cross_step, monkeypatch):
    made = []
    prepare = steps._prepare
    monkeypatch.setattr(steps, "_prepare", lambda *args: made.append(args) or prepare(*args))
    for _ in range(3):
        cross_step(1, 700)
    assert len(made) == 1
    cross_step(2, 700)
    cross_step(2, 600)
    cross_step(2, 600, torch.bfloat16)
    assert len(made) == 4
    with sq.use_backend("reference"):
        cross_step(2, 600, torch.bfloat16)
    assert len(made) == 5
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        cross_step(2, 600, torch.bfloat16)
    finally:
        torch.set_num_threads(threads)
    assert len(made) == 6
    with ThreadPoolExecutor(1) as pool:
        pool.submit(cross_step, 2, 600, torch.bfloat16).result()
    assert len(made) == 7


def test_a_model_that_made_a_step_can_be_copied_and_pickled(tmp_path):
    case = build("whisper")
    sq.hf.swap(case.model, "full:kernel=subquad")
    out = case.output()
    torch.save(case.model, tmp_path / "model.pt")
    for other in (copy.deepcopy(case.model), torch.load(tmp_path / "model.pt", weights_only=False)):
        case.model = other
        torch.testing.assert_close(case.output(), out, atol=1e-6, rtol=1e-6)
