"""Attention by features and causal products in compiled code: every variant equals the reference in fp64."""

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import subquad as sq
from subquad.kernels import native
from subquad.kernels.attention.features.op import feature_attention
from subquad.kernels.attention.products.op import causal_product
from subquad.kernels.native import interface
from subquad.testing.oracle import gradients, normal, qkv, tracked
from subquad.tools.bench.calls import threads

pytestmark = pytest.mark.skipif(native.refusal() is not None, reason=f"no compiled kernels: {native.refusal()}")

PATTERNS = [{}, {"causal": True}, {"lagged": (16, 1)}, {"lagged": (7, 3)}, {"lagged": (100, 1)}]
SHAPES = {
    "square": {"N": 130, "D": 16, "E": 32},
    "cross, shared key heads": {"N": 45, "M": 131, "H": 4, "G": 2, "D": 24, "E": 40},
    "odd widths": {"N": 37, "M": 20, "H": 3, "G": 1, "D": 5, "E": 3},
    "one token": {"N": 1, "D": 5, "E": 7},
}


def maps(H: int, G: int, D: int, R: int) -> dict[str, Tensor]:
    return {
        "of_query": normal(H, R, D, seed=11) / D**0.5,
        "of_key": normal(1, R, D, seed=12) / D**0.5,
        "feature_bias": normal(1, R, seed=13),
    }


def hiding(B: int, G: int, M: int) -> Tensor:
    """A key bias that hides a third of the keys, and the first ones."""
    hidden = normal(B, G, M, seed=14).masked_fill(normal(B, G, M, seed=15) > 0.4, -torch.inf)
    hidden[:, :, : M // 5] = -torch.inf
    return hidden


def both(inputs, bias: Tensor | None = None, dtype: torch.dtype = torch.float32, **options) -> list[Tensor]:
    """out, lse, and the gradients of a loss that reads both."""
    inputs = tracked(*(x.to(dtype) for x in inputs))
    options = {name: x.to(dtype) if isinstance(x, Tensor) else x for name, x in options.items()}
    if bias is not None:
        options["key_bias"] = bias.to(dtype).requires_grad_()
        inputs.append(options["key_bias"])
    out, lse = feature_attention(*inputs[:3], **options)
    read = torch.cat([out, lse.masked_fill(torch.isneginf(lse), 0.0)[..., None]], -1)
    return [out, lse, *gradients(read, *inputs)]


def reference(inputs, bias: Tensor | None = None, **options) -> list[Tensor]:
    with sq.use_backend("reference"):
        return both(inputs, bias, torch.float64, **options)


def assert_near(have: list[Tensor], want: list[Tensor], tolerance: float = 1e-5):
    """Each to `tolerance` of its largest element."""
    for a, b in zip(have, want, strict=True):
        scale = b[b.isfinite()].abs().max().item() if b.isfinite().any() else 1.0
        torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=tolerance * max(scale, 1e-30))


@pytest.mark.covering
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("projected", [False, True], ids=["exponents", "projected"])
@pytest.mark.parametrize("biased", [False, True], ids=["all keys", "hidden keys"])
def test_equals_the_reference(variant, poisoned, shape, pattern, projected, biased):
    inputs = qkv(**(shape | {"M": shape["N"]} if pattern else shape))
    (B, H, _, D), (_, G, M, _) = inputs[0].shape, inputs[1].shape
    options = pattern | (maps(H, G, D, R=37) if projected else {})
    bias = hiding(B, 1 if projected else G, M) if biased else None
    assert_near(both(inputs, bias, **options), reference(inputs, bias, **options))


@pytest.mark.covering
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("heads", [1, 3])
def test_any_number_of_threads_and_ranges(poisoned, pattern, number, heads):
    """A few heads on several threads are cut into ranges of the sequence."""
    inputs = qkv(1500, B=1, H=heads, D=20, E=9)
    with threads(number):
        have = both(inputs, **pattern)
    assert_near(have, reference(inputs, **pattern))


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_what_hidden_keys_hold_does_not_matter(variant, pattern):
    inputs, bias = qkv(150, H=4, G=2), hiding(2, 1, 150)
    bias[1] = -torch.inf  # an item with no key at all
    hidden = torch.isneginf(bias)[..., None]
    want = both(inputs, bias, **pattern)
    q, k, v = inputs
    have = both((q, k.masked_fill(hidden, torch.nan), v.masked_fill(hidden, torch.nan)), bias, **pattern)
    assert all(torch.equal(a, b) for a, b in zip(have, want, strict=True))
    assert (have[0][1] == 0).all()
    assert torch.isneginf(have[1][1]).all()
    assert all((x[1] == 0).all() for x in have[2:])


EXTREMES = {
    "early keys are large": lambda y: torch.cat([y[:, :, :40] * 100, y[:, :, 40:]], 2),
    "the last key is large": lambda y: torch.cat([y[:, :, :-1], y[:, :, -1:] * 100], 2),
    "the last key is nearly zero": lambda y: torch.cat([y[:, :, :-1] * 100, y[:, :, -1:] / 1e3], 2),
    "each key is larger than those before": lambda y: y + 50.0 * torch.arange(y.shape[2])[:, None],
    "each key is smaller than those before": lambda y: y - 50.0 * torch.arange(y.shape[2])[:, None],
    "features that few keys have": lambda y: y.masked_fill(normal(*y.shape, seed=5) > -1.0, -torch.inf),
}


@pytest.mark.covering
@pytest.mark.parametrize("change", EXTREMES.values(), ids=EXTREMES)
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_keys_of_very_different_sizes(variant, change, pattern):
    """Exponents are exact in fp32 here, so that only the sums are compared."""
    query, key, value = qkv(150, B=1, D=6)
    inputs = (query * 16).round() / 16, (change(key) * 16).round() / 16, value
    have, want = both(inputs, **pattern), reference(inputs, **pattern)
    assert_near(have[:1], want[:1], 2e-5)
    torch.testing.assert_close(have[1].double(), want[1], rtol=1e-6, atol=1e-5)
    assert_near(have[2:], want[2:], 2e-3)  # lse, of up to 7500, is known to 5e-4


def test_a_later_key_changes_no_earlier_output(variant):
    q, k, v = qkv(150, D=6)
    k[:, :, :30] *= 30
    out = feature_attention(q, k, v, causal=True)[0]
    for size in (0.0, 1e-3, 100.0):
        changed = torch.cat([k[:, :, :-1], k[:, :, -1:] * size], 2)
        again = feature_attention(q, changed, v, causal=True)[0]
        torch.testing.assert_close(again[:, :, :-1], out[:, :, :-1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("read", ["out", "lse"])
def test_either_output_may_be_read_alone(variant, poisoned, read):
    inputs, place = qkv(70, H=4, G=2), ["out", "lse"].index(read)
    with sq.use_backend("reference"):
        upcast = tracked(*(x.double() for x in inputs))
        want = gradients(feature_attention(*upcast, causal=True)[place], *upcast)
    narrow = tracked(*inputs)
    assert_near(gradients(feature_attention(*narrow, causal=True)[place], *narrow), want)


@pytest.mark.parametrize("learned", ["of_query", "of_key", "feature_bias"])
def test_learned_maps_have_gradients(learned):
    inputs, given = qkv(40, H=4, G=2), maps(4, 2, 8, 21)
    results = []
    for backend, dtype in (("cpu", torch.float32), ("reference", torch.float64)):
        of = {name: x.to(dtype).requires_grad_(name == learned) for name, x in given.items()}
        some = tracked(*(x.to(dtype) for x in inputs))
        with sq.use_backend(backend):
            out, _ = feature_attention(*some, **of, causal=True)
        results.append([out, *gradients(out, *some, of[learned])])
    assert_near(*results)


def test_strided_inputs_equal_contiguous_ones(variant):
    inputs = qkv(70, D=8)
    key_bias = normal(2, 2, 140, seed=3)[..., ::2]
    moved = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs[:2]] + [inputs[2].mT.contiguous().mT]
    want = both(inputs, key_bias.contiguous(), causal=True)
    assert all(torch.equal(a, b) for a, b in zip(both(moved, key_bias, causal=True), want, strict=True))
    q, k, v = inputs
    shared = both((q, k[:, :1].expand_as(k), v), causal=True)
    assert torch.equal(shared[0], both((q, k[:, :1].repeat(1, 2, 1, 1), v), causal=True)[0])


@pytest.mark.parametrize(
    ("attend", "dtype"),
    [(feature_attention, torch.float64), (causal_product, torch.float64), (causal_product, torch.bfloat16)],
)
def test_other_dtypes_are_refused_by_name(attend, dtype):
    inputs = [x.to(dtype) for x in qkv(8, D=6)]
    with sq.use_backend("cpu"), pytest.raises(ValueError, match=str(dtype)):
        attend(*inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_numbers_of_16_bits_come_in_as_they_are_and_partials_go_out_wide(dtype):
    inputs = tracked(*qkv(40, D=6, dtype=dtype))
    exact = [x.detach().float().requires_grad_() for x in inputs]
    with sq.use_backend("cpu"):
        (out, lse), (want, want_lse) = (feature_attention(*given, causal=True) for given in (inputs, exact))
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)
    for grad, upcast in zip(gradients(out, *inputs), gradients(want, *exact), strict=True):
        assert grad.dtype == dtype
        torch.testing.assert_close(grad.float(), upcast, atol=0.02, rtol=0.02)


def test_flops_are_counted():
    inputs, given = tracked(*qkv(24, 30, H=4, G=2, D=8, E=6)), maps(4, 2, 8, 5)
    with FlopCounterMode(display=False) as counter:
        out, _ = feature_attention(*inputs, **given)
    assert counter.get_total_flops() == 2 * 2 * 5 * (4 * 24 + 2 * 30) * (8 + 6)
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 2 * 2 * 5 * (4 * 24 * (3 * 8 + 2 * 6) + 2 * 30 * (3 * 8 + 3 * 6))
    q, k, v = qkv(24, D=5, E=6)
    with FlopCounterMode(display=False) as counter:
        feature_attention(q, k, v, causal=True)
    assert counter.get_total_flops() == 2 * 2 * 2 * 24 * (2 * 5 * 6 + 32 * (5 + 6))
    with FlopCounterMode(display=False) as counter:
        causal_product(q, k, v)
    assert counter.get_total_flops() == 2 * 2 * 2 * 24 * (2 * 5 * 6 + 64 * (5 + 6))


def test_the_gradient_of_the_gradient_is_refused_not_wrong():
    q, k, v = tracked(*qkv(20, D=6))
    (grad,) = torch.autograd.grad(feature_attention(q, k, v)[0].sum(), q, create_graph=True)
    with pytest.raises(
        RuntimeError,
        match="cannot be differentiated again",
    ):
        grad.sum().backward()


def test_a_long_sequence_takes_little_memory(monkeypatch):
    """Features of the whole sequence would take 16,384·256 floats of a head."""
    sizes, empty = [], torch.empty

    def recorded(*shape, **options):
        made = empty(*shape, **options)
        sizes.append(made.nbytes)
        return made

    monkeypatch.setattr(interface.torch, "empty", recorded)
    inputs = tracked(*qkv(16384, B=1, H=1, D=4, E=4))
    w = normal(1, 256, 4) / 2
    out, _ = feature_attention(*inputs, of_query=w, of_key=w, causal=True)
    out.sum().backward()
    assert max(sizes) < 16384 * 256 * 4 / 2


# ---------------------------------------------------------------------- causal products


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_causal_products_equal_the_reference(variant, poisoned, shape):
    inputs = qkv(**(shape | {"M": shape["N"]}))
    results = []
    for backend, dtype in (("cpu", torch.float32), ("reference", torch.float64)):
        some = tracked(*(x.to(dtype) for x in inputs))
        with sq.use_backend(backend):
            out = causal_product(*some)
        results.append([out, *gradients(out, *some)])
    assert_near(*results)


@pytest.mark.parametrize("number", [1, 2])
def test_causal_products_of_ranges(poisoned, number):
    inputs = qkv(1500, B=1, H=1, D=24, E=9)
    with threads(number):
        some = tracked(*inputs)
        out = causal_product(*some)
        have = [out, *gradients(out, *some)]
    with sq.use_backend("reference"):
        upcast = tracked(*(x.double() for x in inputs))
        out = causal_product(*upcast)
        assert_near(have, [out, *gradients(out, *upcast)])


def test_causal_products_have_gradients_of_gradients():
    results = []
    for backend, dtype in (("cpu", torch.float32), ("reference", torch.float64)):
        some = tracked(*(x.to(dtype) for x in qkv(70, H=4, G=2, D=5, E=3)))
        with sq.use_backend(backend):
            first = torch.autograd.grad(causal_product(*some).square().sum(), some, create_graph=True)
            results.append(gradients(torch.cat([x.flatten() for x in first]), *some))
    assert_near(*results)


def test_an_ordered_pattern_needs_as_many_queries_as_keys():
    q, k, v = qkv(20, 30, D=8, E=6)
    for pattern in ((1, 0), (8, 2), (-1, 0)):
        with pytest.raises(ValueError, match=r"is not supported with 20 queries and 30 keys"):
            torch.ops.subquad.features_forward("cpu", q, k, v, None, None, None, None, *pattern)


@pytest.mark.parametrize("name", ["of_query", "of_key", "feature_bias", "key_bias"])
def test_what_heads_may_share_is_not_what_items_or_some_heads_share(name):
    """Its gradient would have room for fewer items than the kernel writes."""
    q, k, v = qkv(9, B=2, H=4, G=2, D=5)
    given = {"of_query": None, "of_key": None, "feature_bias": None, "key_bias": None}
    given[name] = {"of_query": normal(2, 5, 5), "of_key": normal(3, 5, 5), "feature_bias": normal(2, 5)}.get(
        name, normal(1, 2, 9, 1)[..., 0]
    )
    with pytest.raises(ValueError, match=f"`{name}` is"):
        torch.ops.subquad.features_forward("cpu", q, k, v, *given.values(), 0, 0)
