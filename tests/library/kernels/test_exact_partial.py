"""Exact attention with its log-sum-exp in compiled code, and partials of windows merged: equal to plain PyTorch."""

import pytest
import torch
from torch import Tensor

import subquad as sq
from subquad.kernels import native
from subquad.kernels.attention.exact.op import exact_partial
from subquad.kernels.attention.softmax import hide
from subquad.kernels.attention.windows.op import merge_windows
from subquad.kernels.native import interface
from subquad.kernels.tokens.token_windows import TokenWindows
from subquad.testing.oracle import normal
from subquad.tools.bench.calls import threads

pytestmark = pytest.mark.skipif(native.refusal() is not None, reason=f"no compiled kernels: {native.refusal()}")

MASKS = ["none", "causal", "behind", "before", "padded", "padded causal", "padded queries"]
VARIANTS = native.variants() if native.refusal() is None else []


def inputs_of(N: int, M: int, *, H: int = 4, G: int = 2, D: int = 20, E: int = 13, scale: float = 1.0) -> list[Tensor]:
    shapes = (2, H, N, D), (2, G, M, D), (2, G, M, E)
    return [normal(*shape, seed=i) * scale for i, shape in enumerate(shapes)]


def options_of(mask: str, N: int, M: int) -> dict[str, object]:
    """In "before", the first queries see no key; in "padded" one item has no key; a tile of queries is padding."""
    valid = valid_queries = None
    if mask.startswith("padded"):
        valid = torch.rand(2, M, generator=torch.Generator().manual_seed(1)) < 0.7
        valid[1] = mask != "padded"
    if mask == "padded queries":
        valid_queries = torch.arange(N) >= torch.tensor([[70], [3]])
    offset = {"behind": M - N, "before": -7}.get(mask, 0)
    causal = mask not in ("none", "padded", "padded queries")
    return {"valid": valid, "causal": causal, "offset": offset, "scale": 0.3, "valid_queries": valid_queries}


def plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    valid: Tensor | None,
    causal: bool,
    offset: int,
    scale: float,
    valid_queries: Tensor | None,
):
    """By the formula, from all logits, in fp64."""
    query, key, value = (x.double() for x in (query, key, value))
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    allowed = torch.ones(1, 1, query.shape[2], key.shape[2], dtype=torch.bool)
    allowed = allowed.tril(offset) if causal else allowed
    allowed = allowed if valid is None else allowed & valid[:, None, None]
    allowed = allowed if valid_queries is None else allowed & valid_queries[:, None, :, None]
    none = ~allowed.any(-1)
    logits = hide(query @ key.mT * scale, allowed)
    out = (logits.softmax(-1) @ value).masked_fill(none[..., None], 0.0)
    return out, logits.logsumexp(-1).masked_fill(none, -torch.inf)


def gradients(results: tuple[Tensor, Tensor], inputs: list[Tensor]) -> tuple[Tensor, ...]:
    out, lse = results
    of_out, of_lse = normal(*out.shape, seed=7), normal(*lse.shape, seed=8)
    of_lse = of_lse.masked_fill(torch.isneginf(lse), 0.0)
    return torch.autograd.grad((out, lse), inputs, (of_out.to(out.dtype), of_lse.to(lse.dtype)))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("N", "M", "D", "E"), [(1, 40, 8, 8), (70, 131, 20, 13), (130, 260, 64, 64), (200, 90, 3, 40)])
def test_outputs_and_gradients_are_those_of_the_formula(N, M, D, E, mask, variant):
    options = options_of(mask, N, M)
    inputs = [x.requires_grad_() for x in inputs_of(N, M, D=D, E=E)]
    with sq.use_backend("cpu"), native.use_variant(variant):
        results = exact_partial(*inputs, **options)
        grads = gradients(results, inputs)
    expected = plain(*inputs, **options)
    for have, want in zip((*results, *grads), (*expected, *gradients(expected, inputs)), strict=True):
        torch.testing.assert_close(have, want.to(have.dtype), atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("offset", [2**63 - 1, 2**63 - 64, 2**62, -(2**63), -(2**63) + 64])
def test_positions_far_from_the_keys(offset, variant):
    """All keys are seen, or none."""
    inputs = inputs_of(130, 300)
    with sq.use_backend("cpu"), native.use_variant(variant):
        out, lse = exact_partial(*inputs, None, causal=True, offset=offset, scale=0.3, valid_queries=None)
        wanted = exact_partial(*inputs, None, causal=False, offset=0, scale=0.3, valid_queries=None)
    assert torch.equal(out, wanted[0] if offset > 0 else torch.zeros_like(out))
    assert torch.equal(lse, wanted[1] if offset > 0 else torch.full_like(lse, -torch.inf))


@pytest.mark.parametrize("variant", VARIANTS)
def test_without_keys_the_gradient_of_queries_is_zero(variant):
    inputs = [x.requires_grad_() for x in inputs_of(70, 0)]
    with sq.use_backend("cpu"), native.use_variant(variant):
        results = exact_partial(*inputs, None, causal=False, offset=0, scale=0.3, valid_queries=None)
        of_query, *_ = gradients(results, inputs)
    assert (of_query == 0).all()


@pytest.mark.covering
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("N", "M", "D", "E"),
    [(1, 40, 8, 8), (71, 131, 21, 13), (130, 131, 64, 32), (200, 90, 3, 40), (97, 70, 300, 290)],
)
def test_16_bit_inputs(N, M, D, E, mask, dtype, limit, variant):
    inputs = [x.to(dtype).requires_grad_() for x in inputs_of(N, M, D=D, E=E)]
    options = options_of(mask, N, M)
    with sq.use_backend("cpu"), native.use_variant(variant):
        results = exact_partial(*inputs, **options)
        grads = gradients(results, inputs)
    assert (results[0].dtype, results[1].dtype) == (dtype, torch.float32)
    expected = plain(*inputs, **options)
    for have, want in zip((*results, *grads), (*expected, *gradients(expected, inputs)), strict=True):
        none = want == -torch.inf
        assert torch.equal(have == -torch.inf, none)
        have, want = (x.detach().double().masked_fill(none, 0.0) for x in (have, want))
        assert (have - want).abs().max() < limit * max(1.0, float(want.abs().max()))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("scale", [0.3, -0.3, 0.0])
@pytest.mark.parametrize("step", [1.0, -1.0])
def test_logits_that_rise_or_fall_along_the_keys(step, scale, variant):
    """Sums of earlier keys shrink as far as e^-90 when a later key has a larger logit."""
    query, key, value = (x.bfloat16() for x in inputs_of(70, 700, D=32, E=32))
    query[..., 0], key[..., 0] = 10.0, step * torch.linspace(-15.0, 15.0, 700).bfloat16()
    options = options_of("behind", 70, 700) | {"scale": scale}
    with sq.use_backend("cpu"), native.use_variant(variant):
        out, lse = exact_partial(query, key, value, **options)
    want, want_lse = plain(query, key, value, **options)
    torch.testing.assert_close(lse, want_lse.float(), atol=1e-3, rtol=1e-5)
    assert (out.double() - want).abs().max() < 2e-2


@pytest.mark.parametrize("variant", VARIANTS)
def test_products_of_torch_in_between_change_nothing(variant):
    """Torch's products of bf16 may use the same registers, with settings of their own."""
    inputs, other = [x.bfloat16() for x in inputs_of(200, 200, D=64, E=64)], normal(256, 256).bfloat16()
    results, products = [], []
    for _ in range(3):
        with sq.use_backend("cpu"), native.use_variant(variant):
            results.append(exact_partial(*inputs, **options_of("causal", 200, 200))[0])
        products.append(other @ other)
    assert all(torch.equal(results[0], each) for each in results)
    assert all(torch.equal(products[0], each) for each in products)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize(("side", "at"), [(0, 77), (1, 77), (2, 77), (2, 78)])
def test_what_later_keys_hold_reaches_no_earlier_query(side, at, poison, dtype, variant):
    N = 200
    clean, spoilt = inputs_of(N, N, D=32, E=16), inputs_of(N, N, D=32, E=16)
    spoilt[side][:, :, at] = poison
    options = options_of("causal", N, N)
    outputs, of_inputs = [], []
    for inputs in (clean, spoilt):
        inputs = [x.to(dtype).requires_grad_() for x in inputs]
        with sq.use_backend("cpu"), native.use_variant(variant):
            out, lse = exact_partial(*inputs, **options)
            outputs.append((out.detach(), lse.detach()))
            of_inputs.append(torch.autograd.grad(out[:, :, :at].sum() + lse[:, :, :at].sum(), inputs))
    for a, b in zip(*outputs, strict=True):
        assert torch.equal(a[:, :, :at], b[:, :, :at])
        reached = slice(at, at + 1) if side == 0 else slice(at, None)
        assert (side == 2 and b.ndim == 3) or not b[:, :, reached].isfinite().all(-1).any()
    close = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.02, "rtol": 0.02}
    torch.testing.assert_close(*(grads[0][:, :, :at] for grads in of_inputs), **close)
    for a, b in zip(*of_inputs, strict=True):  # what no spoilt query sees
        later = slice(at + 1, None) if side == 0 else slice(0, 0)
        torch.testing.assert_close(a[:, :, later], b[:, :, later], **close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 64), (300, 2300)], ids=str)
def test_results_do_not_depend_on_the_number_of_threads(shape, dtype, monkeypatch):
    monkeypatch.setattr(interface, "SMALL", 0)
    inputs = [x.to(dtype).requires_grad_() for x in inputs_of(*shape, D=16, E=16)]
    results = []
    for number in (1, 2, 3):
        with threads(number), sq.use_backend("cpu"):
            partial = exact_partial(*inputs, **options_of("behind", *shape))
            results.append((*partial, *gradients(partial, inputs)))
    for more in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], more, strict=True))


def test_rows_are_read_by_their_strides():
    inputs = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs_of(90, 90, D=32, E=32)]
    inputs[2] = torch.cat([inputs[2], inputs[2]], -1)[..., :32]
    options = options_of("causal", 90, 90)
    with sq.use_backend("cpu"):
        strided, packed = (exact_partial(*x, **options) for x in (inputs, [x.contiguous() for x in inputs]))
    assert all(torch.equal(a, b) for a, b in zip(strided, packed, strict=True))


# ---------------------------------------------------------------------- merging

WINDOWS = [TokenWindows(0, 4, 4, 5), TokenWindows(4, 4, 8, 2), TokenWindows(20, 3), TokenWindows(9, 14)]


def partials(dtype: torch.dtype, count: int = 2, heads: int = 3, width: int = 10) -> list[list[Tensor]]:
    """Outs and lses of the windows; some have seen no key."""
    outs, lses = [], []
    for number, windows in enumerate(WINDOWS):
        lse = normal(count * windows.count, heads, windows.length, seed=number) * 3
        nothing = torch.rand(lse.shape, generator=torch.Generator().manual_seed(number)) < 0.2
        lses.append(lse.masked_fill(nothing, -torch.inf))
        outs.append(normal(*lse.shape, width, seed=10 + number).to(dtype).masked_fill(nothing[..., None], 0.0))
    return [outs, lses]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_merged_windows_are_those_of_plain_pytorch(dtype, rounded, variant):
    results = []
    for backend in ("reference", "cpu"):
        outs, lses = ([x.requires_grad_() for x in each] for each in partials(dtype))
        with sq.use_backend(backend), native.use_variant(variant):
            out, lse = merge_windows(outs, lses, WINDOWS, tokens=25, rounded=rounded)
            rounded_later = merge_windows(outs, lses, WINDOWS, tokens=25)[0].to(out.dtype)
        assert (out.dtype, lse.dtype) == (dtype if rounded else torch.float32, torch.float32)
        assert torch.equal(out, rounded_later)
        seen = ~torch.isneginf(lse)
        assert not seen[:, :, 23:].any()
        assert (out[:, :, 23:] == 0).all()
        loss = (out * out.detach().sin()).sum() + (lse[seen] * lse[seen].detach().cos()).sum()
        results.append([out, lse, *torch.autograd.grad(loss, outs + lses)])
    torch.testing.assert_close(results[1][1], results[0][1], atol=1e-5, rtol=1e-4)
    for want, have in zip(*results, strict=True):
        atol, rtol = (1e-5, 1e-4) if have.dtype == torch.float32 else (1e-2, 1e-4)
        if rounded and dtype != torch.float32:  # the loss's gradient is that of an output of 16 bits
            atol, rtol = 3e-2, 1e-2
        torch.testing.assert_close(have, want, atol=atol, rtol=rtol)


def test_a_nan_stays_with_its_query():
    outs, lses = partials(torch.float32)
    lses[0][0, 1, 2] = torch.nan  # of item 0, head 1: query 2
    outs[3][1, 2, 5] = torch.nan  # of item 1, head 2: query 14
    lses[3][1, 2, 5] = 0.0
    with sq.use_backend("cpu"):
        out, lse = merge_windows(outs, lses, WINDOWS, tokens=25)
    assert out.isnan().any(-1).nonzero().tolist() == [[0, 1, 2], [1, 2, 14]]
    assert lse.isnan().nonzero().tolist() == [[0, 1, 2]]
