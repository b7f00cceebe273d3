"""Adaptive spans against the dense formula, what they compute, how they learn, and what they refuse."""

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import subquad as sq
from subquad import Mask
from subquad.kernels import native
from subquad.methods.core.method import Call
from subquad.testing.oracle import gradients, naive, normal, qkv, tracked
from tests.library.methods.random_calls import FEW_AND_MANY, assert_equal_both_ways, random_calls


def spread(bound: sq.BoundMethod, *tokens: float) -> sq.BoundMethod:
    """Give the heads these spans."""
    spans = torch.tensor(tokens) if tokens else bound.method.span * normal(bound.heads, seed=7).sigmoid()
    bound.learned.span.data = (spans / bound.method.span).to(bound.learned.span.dtype)
    return bound


def layer(method: str = "adaptive-span:span=20,ramp=4", *tokens: float, heads: int = 2, **sizes: int) -> sq.BoundMethod:
    return spread(sq.parse_method(method).bind(heads=heads, head_dim=8, **sizes), *tokens)


def dense(bound: sq.BoundMethod, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Weights m·e^a divided by their sum, all N×M of them."""
    (N, M), method = (q.shape[2], k.shape[2]), bound.method
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    at = mask.positions(torch.arange(N)[None, None, :, None])
    x = (torch.arange(M) - at).abs()
    z = bound.learned.span.clamp(0, 1)[:, None, None].to(q.dtype) * method.span
    soft = ((method.ramp + z - x) / method.ramp).clamp(0, 1)
    weights = soft * (q @ k.mT * q.shape[3] ** -0.5).exp() * mask.to_dense(N, M)
    total = weights.sum(-1, keepdim=True)
    return weights / total.masked_fill(total == 0, 1.0) @ v


@FEW_AND_MANY
@pytest.mark.parametrize("text", ["adaptive-span:span=20,ramp=4", "adaptive-span:span=7,ramp=1"])
def test_equals_the_dense_formula_forward_and_backward(text: str, shapes: int):
    for call in random_calls(sq.parse_method(text), shapes):
        bound = spread(call.bound)
        out, wanted = bound(*call.inputs, mask=call.mask), dense(bound, *call.inputs, call.mask)
        assert_equal_both_ways(call, out, wanted, bound.learned.span)


@pytest.mark.parametrize("mask", [
    Mask.window(3), Mask.causal() & Mask.window(6), Mask.window(40), Mask.padding(keys=[5, 23]),
], ids=str)  # fmt: skip
def test_windows_and_hidden_keys(mask):
    # Spans between two distances: at the ends of a ramp there is no derivative, and clamp has another in torch 2.14.
    inputs, bound = tracked(*qkv(23, dtype=torch.float64)), layer("adaptive-span:span=20,ramp=4", 2.5, 9.25)
    out, wanted = bound(*inputs, mask=mask), dense(bound, *inputs, mask)
    torch.testing.assert_close(out, wanted, atol=1e-6, rtol=1e-6)
    learned = [*inputs, bound.learned.span]
    torch.testing.assert_close(gradients(out, *learned), gradients(wanted, *learned), atol=1e-5, rtol=1e-5)


def test_a_query_whose_keys_inside_the_span_are_all_hidden_is_zero_with_zero_gradient():
    inputs, bound = tracked(*qkv(20)), layer("adaptive-span:span=20,ramp=4", 0.0, 12.0)
    out, lse = bound(*inputs, mask=Mask.padding(keys=[5, 5]), return_lse=True)
    assert (out[:, 0, 9:] == 0).all()
    assert lse[:, 0, 9:].isneginf().all()
    assert lse[:, 1, :20].isfinite().all()
    grads = gradients(out, *inputs, bound.learned.span)
    assert all(grad.isfinite().all() for grad in grads)
    assert (grads[0][:, 0, 9:] == 0).all()


def test_a_span_above_the_length_is_exact_attention():
    q, k, v = qkv(23)
    for is_causal in (False, True):
        allowed = torch.ones(23, 23, dtype=torch.bool).tril() if is_causal else None
        far = sq.AdaptiveSpan(span=10_000, start=500).bind(heads=2, head_dim=8)
        torch.testing.assert_close(far(q, k, v, is_causal=is_causal), naive(q, k, v, allowed))


# ---------------------------------------------------------------------- what is computed


@pytest.mark.parametrize("is_causal", [False, True])
def test_keys_beyond_the_largest_span_are_not_touched(is_causal):
    bound, inputs = layer("adaptive-span:span=200,ramp=4", 1.0, 6.5), qkv(100)
    call = Call(Mask(is_causal=is_causal), None, 1.0, 0.0, 0, bound.learned)
    (buckets,) = bound.method.meetings(*inputs[:2], call)
    met = buckets.multiplicity(100, 100, call.mask)[0, 0]
    distance = (torch.arange(100)[:, None] - torch.arange(100)).abs()
    seen = distance < 6.5 + 4
    assert torch.equal(met > 0, seen.tril() if is_causal else seen)


def test_work_falls_as_spans_shrink():
    def work(*spans: float) -> int:
        bound, inputs = layer("adaptive-span:span=1000,ramp=8", *spans), tracked(*qkv(1200, B=1))
        with FlopCounterMode(display=False) as counter:
            bound(*inputs, is_causal=True).sum().backward()
        return counter.get_total_flops()

    long, short, shortest = work(900.0, 900.0), work(0.0, 100.0), work(0.0, 0.0)
    assert long > 3 * short > 9 * shortest


@pytest.mark.skipif(native.refusal() is not None, reason=f"no compiled kernels: {native.refusal()}")
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_compiled_kernels_take_it_both_ways(is_causal):
    results = []
    for backend in ("reference", "cpu"):
        inputs, bound = tracked(*qkv(70)), layer("adaptive-span:span=40,ramp=5", 0.5, 21.3)
        with sq.use_backend(backend):
            out = bound(*inputs, is_causal=is_causal)
        results.append([out, *gradients(out, *inputs, bound.learned.span)])
    assert (results[0][-1] != 0).all()
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)


def test_where_numbers_cannot_be_read_the_window_is_the_largest_with_the_same_outputs():
    bound, inputs = layer("adaptive-span:span=200,ramp=4", 1.0, 6.5), qkv(40)
    assert bound.learned.reach() == 10
    assert bound.learned.to("meta").reach() == 203
    bound = layer("adaptive-span:span=200,ramp=4", 1.0, 6.5)
    wanted = bound(*inputs)
    bound.learned.reach = lambda: 203
    torch.testing.assert_close(bound(*inputs), wanted)


@pytest.mark.parametrize(("share", "reach"), [(-3.0, 3), (0.0, 3), (0.5, 103), (7.0, 203), (torch.nan, 203)])
def test_the_window_of_spans_anywhere(share, reach):
    bound = layer("adaptive-span:span=200,ramp=4")
    bound.learned.span.data.fill_(share)
    assert bound.learned.reach() == reach
    out = bound(*qkv(30))
    assert out.isnan().all() == (share != share)


def test_spans_in_bf16_are_those_of_their_rounded_shares():
    bound = layer("adaptive-span:span=1000,ramp=4", 341.3, 100.7).bfloat16()
    upcast = layer("adaptive-span:span=1000,ramp=4")
    upcast.learned.span.data = bound.learned.span.data.float()
    torch.testing.assert_close(bound.learned.tokens, upcast.learned.tokens)
    assert bound.learned.reach() == upcast.learned.reach()


# ---------------------------------------------------------------------- how it learns


def test_spans_grow_where_distant_keys_help_and_shrink_by_their_loss():
    """One head must copy the token 12 before, the other the token itself."""
    bound = sq.AdaptiveSpan(span=24, ramp=6, start=8).bind(heads=2, head_dim=8)
    optimiser = torch.optim.Adam(bound.parameters(), lr=0.02)
    one_hot = 8 * torch.eye(60)[None, None].expand(1, 2, -1, -1)
    q = one_hot.clone()
    q[:, 0, 12:] = one_hot[:, 0, :-12]
    project = normal(60, 8, seed=3)
    q, k, v = q @ project, one_hot @ project, normal(1, 2, 60, 6)
    wanted = v.clone()
    wanted[:, 0, 12:] = v[:, 0, :-12]
    for _ in range(60):
        optimiser.zero_grad()
        error = (bound(q, k, v, is_causal=True, scale=0.02)[:, :, 12:] - wanted[:, :, 12:]).square().mean()
        sq.nn.with_auxiliary_loss(error, bound, weight=0.02).backward()
        optimiser.step()
    far, near = bound.learned.tokens.tolist()
    assert far > 10
    assert near < 2


def test_the_span_loss_is_the_mean_share_and_reaches_spans_alone():
    module = sq.nn.MultiheadAttention(16, 2, method="adaptive-span:span=20,ramp=4")
    spread(module.attention, 5.0, 15.0)
    module(normal(2, 30, 16))
    loss = sq.nn.auxiliary_loss(module)
    assert loss.item() == pytest.approx(0.5)
    grads = torch.autograd.grad(loss, list(module.parameters()), allow_unused=True)
    present = [name for (name, _), grad in zip(module.named_parameters(), grads, strict=True) if grad is not None]
    assert present == ["attention.learned.span"]


def test_a_span_that_a_step_moved_out_of_its_range_comes_back():
    bound = layer("adaptive-span:span=20,ramp=4", -1.0, 21.0)
    (grad,) = gradients(bound(*qkv(40)), bound.learned.span)
    assert (grad != 0).all()
    bound.train()(*qkv(40))
    (grad,) = torch.autograd.grad(bound.auxiliary_loss(), bound.learned.span)
    assert (grad == 0).all()
    assert bound.learned.tokens.tolist() == [0.0, 20.0]


# ---------------------------------------------------------------------- steps, bad input


@pytest.mark.parametrize("offset", [0, 4, 19])
def test_queries_in_the_middle_of_a_cache(offset):
    (q, k, v), bound = qkv(4, 23), layer("adaptive-span:span=20,ramp=4", 0.5, 6.0)
    for mask in (Mask.causal(offset=offset), Mask(offset=offset)):
        torch.testing.assert_close(bound(q, k, v, mask=mask), dense(bound, q, k, v, mask))


@pytest.mark.parametrize(("text", "message"), [
    ("span=0", "span=0, but it must be a whole number ≥ 1"),
    ("ramp=0", "ramp=0, but it must be a whole number ≥ 1"),
    ("span=8,start=9", "start=9 is beyond the largest span, span=8; it must be at most that"),
    ("span=2000000", "span=2000000, but it must be at most 1048576"),
])  # fmt: skip
def test_impossible_spans_are_refused(text, message):
    with pytest.raises(ValueError, match=f"'adaptive-span': {message}"):
        sq.parse_method(f"adaptive-span:{text}")


def test_generation_with_a_cache_equals_generation_without():
    from tests.library.hf.models import build

    case = build("gpt2")
    sq.hf.swap(case.model, "adaptive-span:span=6,ramp=2,start=1")
    options = {"max_new_tokens": 6, "do_sample": False, "min_new_tokens": 6}
    cached = case.model.generate(**case.inputs, **options)
    assert torch.equal(cached, case.model.generate(**case.inputs, use_cache=False, **options))
