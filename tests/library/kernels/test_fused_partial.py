"""Exact attention with its log-sum-exp by torch's kernel for CPUs: equal to plain PyTorch, forward and backward."""

import pytest
import torch

import subquad as sq
from subquad.kernels.attention.blockwise import partial
from subquad.kernels.attention.blockwise.partial import fused_partial, plain_partial
from subquad.methods.core import exact

MASKS = ["none", "causal", "padding", "dense"]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 3e-2}


def allowed_of(mask: str, N: int, M: int) -> torch.Tensor | None:
    """The pairs that meet; in "dense", one query meets no key, and in "padding" one item has no key."""
    draw = torch.Generator().manual_seed(1)
    if mask == "padding":
        return torch.arange(M) < torch.tensor([M - 7, 0])[:, None, None, None]
    if mask == "dense":
        allowed = torch.rand(2, 1, N, M, generator=draw) > 0.3
        allowed[1, 0, 3] = False
        return allowed
    return None


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("mask", "scale"), [*((mask, 0.3) for mask in MASKS), ("causal", -0.3), ("causal", 0.0)])
@pytest.mark.parametrize(("H", "G", "D", "E"), [(4, 4, 16, 16), (6, 2, 13, 20), (1, 1, 8, 3)])
def test_outputs_and_gradients_are_those_of_plain_pytorch(mask, scale, H, G, D, E, dtype):
    draw = torch.Generator().manual_seed(0)
    N, M = 19, 19 if mask == "causal" else 31
    sizes = (2, H, N, D), (2, G, M, D), (2, G, M, E)
    inputs = [torch.randn(size, generator=draw, dtype=dtype).requires_grad_() for size in sizes]
    options = {"allowed": allowed_of(mask, N, M), "causal": mask == "causal", "scale": scale}
    results = [attend(*inputs, **options) for attend in (fused_partial, plain_partial)]
    (out, lse), (want, want_lse) = results
    assert (out.dtype, lse.dtype) == (dtype, torch.promote_types(dtype, torch.float32))
    torch.testing.assert_close(out, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(lse, want_lse, atol=1e-3 if dtype == torch.bfloat16 else TOLERANCE[dtype], rtol=1e-5)
    slopes = (
        torch.randn(out.shape, generator=draw, dtype=dtype),
        torch.randn(lse.shape, generator=draw, dtype=lse.dtype),
    )
    of_inputs = [torch.autograd.grad(result, inputs, slopes) for result in results]
    for have, expected in zip(*of_inputs, strict=True):
        limit = TOLERANCE[dtype] * max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(have, expected, atol=limit, rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("mask", MASKS)
def test_first_and_second_derivatives_in_fp64(mask):
    draw = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, 2, 5, 4, generator=draw, dtype=torch.float64).requires_grad_() for _ in range(3)]
    allowed = allowed_of(mask, 5, 5) if mask != "padding" else (torch.arange(5) < 3)[None, None, None]

    def attend(*inputs):
        out, lse = fused_partial(*inputs, allowed, causal=mask == "causal", scale=0.5)
        return out, lse.masked_fill(lse.isinf(), 0.0)

    assert torch.autograd.gradcheck(attend, inputs)
    assert torch.autograd.gradgradcheck(attend, inputs)


@pytest.mark.parametrize(
    ("mask", "taken"),
    [
        (None, "exact_partial"),
        (sq.Mask.causal(), "exact_partial"),
        (sq.Mask.padding([40, 9]), "exact_partial"),
        (sq.Mask.window(3), "fused_partial"),
    ],
    ids=str,
)
def test_full_attention_takes_it_on_cpus(mask, taken, monkeypatch):
    query, key, value = (torch.randn(2, heads, 40, 8) for heads in (4, 2, 2))  # more than few
    called = []
    function = getattr(exact, taken)
    monkeypatch.setattr(exact, taken, lambda *x, **y: called.append(1) or function(*x, **y))
    out, lse = sq.attention(query, key, value, method="full", mask=mask, return_lse=True, enable_gqa=True)
    assert called == [1]
    monkeypatch.setattr(exact, "is_fused", lambda query: False)
    want, want_lse = sq.attention(query, key, value, method="full", mask=mask, return_lse=True, enable_gqa=True)
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, want_lse, atol=1e-5, rtol=1e-5)
    assert called == [1]


def test_in_transforms_and_in_compiled_code_it_is_plain_pytorch():
    query = torch.randn(1, 2, 6, 4)
    assert partial.is_fused(query)
    seen = []
    torch.func.vmap(lambda x: seen.append(partial.is_fused(x)) or x)(query)
    assert seen == [False]
    compiled = torch.compile(lambda x: x + int(partial.is_fused(x)), backend="eager")
    assert torch.equal(compiled(query), query)


@pytest.mark.parametrize("tracked", range(1, 8))
@pytest.mark.parametrize("mask", MASKS)
def test_second_derivatives_where_some_inputs_have_none(mask, tracked):
    draw = torch.Generator().manual_seed(0)
    N = 20  # more than few
    inputs = [torch.randn(2, 2, N, 4, generator=draw, dtype=torch.float64) for _ in range(3)]
    wanted = [x.requires_grad_() for number, x in enumerate(inputs) if tracked >> number & 1]
    allowed = allowed_of(mask, N, N)
    firsts, seconds = [], []
    for function in (fused_partial, plain_partial):
        out, lse = function(*inputs, allowed, causal=mask == "causal", scale=0.5)
        loss = out.sin().sum() + lse.masked_fill(lse.isinf(), 0.0).cos().sum()
        firsts.append(torch.autograd.grad(loss, wanted, create_graph=True))
        seconds.append(torch.autograd.grad(sum(x.sin().sum() for x in firsts[-1]), wanted))
    torch.testing.assert_close(firsts[0], firsts[1])
    torch.testing.assert_close(seconds[0], seconds[1])
