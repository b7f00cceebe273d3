"""Attention by features in Triton's interpreter equals the reference in fp64, forward and backward."""

import pytest
import torch
from torch import Tensor

import subquad as sq
from subquad.kernels.attention.features import triton as backend
from subquad.kernels.attention.features.op import feature_attention
from subquad.testing.oracle import gradients, normal, qkv, tracked
from tests.library.kernels.test_feature_attention_cpu import EXTREMES, assert_near, both, hiding, maps, reference
from tests.library.triton.interpreted.fences import fenced

PATTERNS = [{}, {"causal": True}, {"lagged": (16, 2)}]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3}


def on_triton(inputs, bias: Tensor | None = None, **options) -> list[Tensor]:
    with sq.use_backend("triton"):
        return both(inputs, bias, inputs[0].dtype, **options)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.long)], ids=str)
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_projected_and_biased(poisoned, dtype, pattern):
    inputs = qkv(37, B=1, H=2, G=1, D=5, E=3, dtype=dtype)
    options, bias = pattern | maps(2, 1, 5, R=19), hiding(1, 1, 37)
    want = reference(inputs, bias, **options)
    with sq.use_backend("triton"):
        some = tracked(*inputs)
        bias = bias.requires_grad_()
        out, lse = feature_attention(*some, key_bias=bias, **options)
        read = torch.cat([out, lse.masked_fill(torch.isneginf(lse), 0.0)[..., None]], -1)
        have = [out, lse, *gradients(read, *some, bias)]
    assert all(torch.equal(torch.isneginf(a), torch.isneginf(b)) for a, b in zip(have, want, strict=True))
    assert_near([x.nan_to_num(neginf=0.0) for x in have], [x.nan_to_num(neginf=0.0) for x in want], TOLERANCE[dtype])


@pytest.mark.parametrize("pattern", [*PATTERNS, {"lagged": (7, 1)}], ids=str)
@pytest.mark.parametrize("shape", [{"N": 1, "D": 5, "E": 7}, {"N": 40, "D": 18, "E": 17, "H": 1}], ids=str)
def test_exponents_as_they_are(poisoned, pattern, shape):
    inputs = qkv(**shape, B=1)
    assert_near(on_triton(inputs, **pattern), reference(inputs, **pattern))


def test_cross_attention_of_shared_key_heads(poisoned):
    inputs = qkv(5, 23, B=2, H=4, G=2, D=6, E=4)
    bias = hiding(2, 2, 23)
    assert_near(on_triton(inputs, bias), reference(inputs, bias))


@pytest.mark.parametrize("pattern", [{}, {"causal": True}, {"lagged": (16, 1)}, {"lagged": (9, 3)}], ids=str)
def test_states_go_from_segment_to_segment(monkeypatch, pattern):
    monkeypatch.setattr(backend, "SEGMENT", 32)
    inputs = qkv(70, B=1, H=1, D=3, E=2)
    assert_near(on_triton(inputs, **pattern), reference(inputs, **pattern))


@pytest.mark.parametrize("change", EXTREMES.values(), ids=EXTREMES)
def test_keys_of_very_different_sizes(change):
    """Exponents are exact in fp32 here, so that only the sums are compared."""
    query, key, value = qkv(40, B=1, H=1, D=6)
    inputs = (query * 16).round() / 16, (change(key) * 16).round() / 16, value
    have, want = on_triton(inputs, causal=True), reference(inputs, causal=True)
    assert_near(have[:1], want[:1], 2e-5)
    torch.testing.assert_close(have[1].double(), want[1], rtol=1e-6, atol=1e-5)
    assert_near(have[2:], want[2:], 2e-3)  # lse, of up to 2000, is known to 1e-4


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_what_hidden_keys_hold_does_not_matter(pattern):
    (q, k, v), bias = qkv(20, H=1, D=4), hiding(2, 1, 20)
    bias[1] = -torch.inf  # an item with no key at all
    hidden = torch.isneginf(bias)[..., None]
    want = on_triton((q, k, v), bias, **pattern)
    have = on_triton((q, k.masked_fill(hidden, torch.nan), v.masked_fill(hidden, torch.nan)), bias, **pattern)
    assert all(torch.equal(a, b) for a, b in zip(have, want, strict=True))
    assert (have[0][1] == 0).all()
    assert torch.isneginf(have[1][1]).all()
    assert all((x[1] == 0).all() for x in have[2:])


@pytest.mark.parametrize("number", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("which", ["key", "value"])
def test_nothing_of_a_later_token_reaches_an_earlier_output(which, number):
    query, key, value = qkv(40, B=1, H=2, D=5, E=3)
    with sq.use_backend("triton"):
        want, _ = feature_attention(query, key, value, causal=True)
        (key if which == "key" else value)[0, 0, 20, 2] = number
        out, _ = feature_attention(query, key, value, causal=True)
    torch.testing.assert_close(out[:, 0, :20], want[:, 0, :20], atol=1e-6, rtol=1e-6)
    assert torch.equal(out[:, 1], want[:, 1])
    assert not out[0, 0, 20:, 2].isfinite().any()


def test_a_nan_query_gives_later_keys_no_gradient_of_nan():
    query, key, value = qkv(40, B=1, H=2, D=5, E=3)
    query[0, 1, 20, 3] = torch.nan
    _, _, _, of_key, of_value = on_triton((query, key, value), causal=True)
    for grad in (of_key, of_value):
        assert grad[0, 1, :21].isnan().any(-1).all()
        assert grad[0, 1, 21:].isfinite().all()
        assert grad[0, 0].isfinite().all()


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_strides_and_fences(pattern):
    """The numbers outside of an input are NaN, so that loading them would show."""
    inputs, options = qkv(17, B=1, H=1, D=5, E=3), maps(1, 1, 5, R=7) | pattern
    want = on_triton(inputs, hiding(1, 1, 17), **options)
    inside = [fenced(x) for x in inputs[:2]] + [fenced(inputs[2].mT.contiguous()).mT]
    options |= {name: fenced(x) for name, x in options.items() if isinstance(x, Tensor)}
    some = [x.requires_grad_() for x in inside]
    bias = fenced(hiding(1, 1, 17)).requires_grad_()
    with sq.use_backend("triton"):
        out, lse = feature_attention(*some, key_bias=bias, **options)
    read = torch.cat([out, lse.masked_fill(torch.isneginf(lse), 0.0)[..., None]], -1)
    have = [out, lse, *gradients(read, *some, bias)]
    assert all(torch.equal(a, b) for a, b in zip(have, want, strict=True))


def test_a_pattern_over_other_tokens_than_the_keys_is_refused():
    q, k, v = qkv(20, 30, D=8, E=6)
    with pytest.raises(ValueError, match="is not supported with 20 queries and 30 keys"):
        torch.ops.subquad.features_forward("triton", q, k, v, None, None, None, None, 1, 0)


@pytest.mark.parametrize("learned", ["of_query", "of_key", "feature_bias"])
def test_learned_maps_have_gradients(learned):
    inputs, given, results = qkv(9, B=1, D=4, E=3), maps(2, 2, 4, 6), []
    for name, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        of = {what: x.to(dtype).requires_grad_(what == learned) for what, x in given.items()}
        some = tracked(*(x.to(dtype) for x in inputs))
        with sq.use_backend(name):
            out, _ = feature_attention(*some, **of)
        results.append([out, *gradients(out, *some, of[learned])])
    assert_near(*results)


@pytest.mark.parametrize("learned", ["of_query", "of_key", "feature_bias"])
def test_learned_maps_of_many_features_are_refused(learned):
    inputs, of = qkv(9, B=1, D=4, E=3), maps(2, 2, 4, 300)
    with sq.use_backend("triton"):
        feature_attention(*inputs, **of)
        of[learned].requires_grad_()
        with pytest.raises(ValueError, match="a learned map makes 300 features"):
            feature_attention(*inputs, **of)


@pytest.mark.parametrize("read", [0, 1], ids=["out", "lse"])
def test_either_output_may_be_read_alone(poisoned, read):
    inputs, results = qkv(20, B=1, H=1, D=4, E=3), []
    for name, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        some = tracked(*(x.to(dtype) for x in inputs))
        with sq.use_backend(name):
            results.append(gradients(feature_attention(*some, causal=True)[read], *some))
    assert_near(*results)


def test_later_tokens_far_above_earlier_ones():
    """In fp16 too: later exponents that differ by 100 push no earlier weight under."""
    query, key = normal(1, 1, 40, 4).half(), normal(1, 1, 40, 4, seed=1).half()
    key[:, :, 20:] += 100
    value = normal(1, 1, 40, 3, seed=2).half()
    want, have = reference((query, key, value), causal=True), on_triton((query, key, value), causal=True)
    assert_near(have, want, 5e-3)


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_values_near_the_largest(pattern):
    q, k, v = qkv(40, B=1, H=1, D=4, E=3)
    with sq.use_backend("triton"):
        out, lse = feature_attention(q, k, torch.full_like(v, 3e38), **pattern)
    sees = ~torch.isneginf(lse)
    torch.testing.assert_close(out[sees], torch.full_like(out[sees], 3e38))
