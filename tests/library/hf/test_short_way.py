"""Steps on a cache go a short way from transformers to the kernel, with what a forward pass's layers share."""

from contextlib import nullcontext

import pytest
import torch
import transformers as hf

import subquad as sq
from subquad.hf import boundary
from subquad.hf.boundary import attend, make_mask
from subquad.hf.layers import NAME, Attached
from subquad.methods import Method
from subquad.methods.core.names import resolve
from tests.library.hf.families import FAMILIES
from tests.library.hf.models import build, padded_ids

EXACT_STEPS = ["full", "full:kernel=subquad", "clustered-tail", "by-length:steps=0:full+64:clustered-tail"]


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


def test_layers_share_the_call_of_a_pass(monkeypatch):
    model = build("llama").model
    sq.hf.swap(model, "full")
    made = []
    decode = boundary.decode
    monkeypatch.setattr(boundary, "decode", lambda *args, **options: made.append(args) or decode(*args, **options))
    step(model, *padded_ids("left", length=LENGTH))
    assert len(made) == len(attached(model)) + 1  # each layer's of the first pass, and one of the step


def test_layers_with_windows_do_not_share_with_others():
    model = build("gemma3").model
    ids, _ = padded_ids(length=LENGTH, pads=0)
    want = step(model, ids)
    sq.hf.swap(model, "full")
    torch.testing.assert_close(step(model, ids), want, atol=1e-5, rtol=1e-4)


def hooked(model):
    return attached(model)[0].bound.register_forward_hook(lambda *_: None)


def audited(model):
    return sq.audit(model, every=1, tolerance=1.0)


def under_autocast(model):
    return torch.autocast("cpu", dtype=torch.bfloat16)


def inside_a_transform(model):
    return torch.autograd.forward_ad.dual_level()


@pytest.mark.parametrize("around", [hooked, audited, under_autocast, inside_a_transform])
def test_what_must_see_every_call_does(around, general_way):
    model = build("llama").model
    sq.hf.swap(model, "clustered-tail")
    general_way.clear()  # of the trial
    with around(model) or nullcontext():
        step(model, *padded_ids(length=LENGTH, pads=0))
    of_step = 1 if around is hooked else len(attached(model))
    assert len(general_way) >= len(attached(model)) + of_step  # an audit runs exact attention too


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
    assert getattr(module, NAME).exact_queries > 0


@pytest.mark.parametrize("name", ["gemma2", "gpt-oss"])
def test_capped_logits_and_sinks_under_autocast(name):
    model = FAMILIES[name]().eval()
    sq.hf.swap(model, "full")
    ids = torch.randint(5, 60, (1, 10))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(input_ids=ids, use_cache=False).logits.isfinite().all()
