"""Causal by halves with clusters of earlier queries: strictly causal, and closer where rotary positions are known."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import subquad as sq
from subquad import Mask
from subquad.testing.oracle import normal
from subquad.testing.oracle import qkv as made

METHOD = sq.ClusteredTail(clusters=3, topk=2, cells=2, block=8, last=0, queries="earlier")
ROTARY = sq.Rotary(100.0 ** -torch.linspace(0, 1, 4, dtype=torch.float64))
OPTIONS = {"method": METHOD, "is_causal": True, "enable_gqa": True}


def qkv(N: int, B: int = 2, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """A query of four heads, and keys and values of two."""
    q, k, v = made(N, B=B, H=4, D=8, E=8)
    return [x.to(dtype) for x in (q, k[:, :2], v[:, :2])]


def test_it_is_strictly_causal_without_last_rows_and_of_values_only_with_them():
    assert METHOD.traits.causal == "strict"
    assert replace(METHOD, last=4).traits.causal == "values-only"
    assert replace(METHOD, queries="rectangle").traits.causal == "values-only"
    assert "leak" not in str(METHOD.refuses(Mask.causal()))


@pytest.mark.parametrize("rotary", [None, ROTARY], ids=["no positions", "rotary"])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("tokens", [1, 9, 16, 17, 31, 40, 55])
def test_what_comes_later_changes_no_bit(tokens: int, backend: str, rotary: sq.Rotary | None):
    q, k, v = qkv(61)
    with sq.use_backend(backend):
        whole = sq.attention(q, k, v, **OPTIONS, rotary=rotary)[:, :, :tokens]
        for later in (3.0, torch.nan, torch.inf):
            others = [torch.cat([x[:, :, :tokens], later - x[:, :, tokens:]], 2) for x in (q, k, v)]
            out = sq.attention(*others, **OPTIONS, rotary=rotary)[:, :, :tokens]
            if backend == "cpu":
                assert torch.equal(out, whole)
            else:
                torch.testing.assert_close(out, whole)
        prefix = sq.attention(*(x[:, :, :tokens] for x in (q, k, v)), **OPTIONS, rotary=rotary)
    torch.testing.assert_close(prefix, whole)


@pytest.mark.parametrize("tokens", [9, 24, 40])
def test_no_gradient_flows_back_from_the_future(tokens: int):
    inputs = [x.requires_grad_() for x in qkv(61)]
    out = sq.attention(*inputs, **OPTIONS, rotary=ROTARY)
    for grad in torch.autograd.grad(out[:, :, :tokens].square().sum(), inputs):
        assert (grad[:, :, tokens:] == 0).all()
        assert (grad[:, :, :tokens] != 0).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_compiled_equals_the_reference_forward_and_backward(side: str | None, dtype: torch.dtype):
    inputs = [x.to(dtype).requires_grad_() for x in qkv(61)]
    places, lengths = torch.arange(61), torch.tensor([[61], [44]])
    valid = places >= 61 - lengths if side == "left" else places < lengths
    mask = Mask.causal() if side is None else Mask.causal() & Mask.padding(valid)
    results = []
    for backend in ("cpu", "reference"):
        with sq.use_backend(backend):
            out = sq.attention(*inputs, method=METHOD, mask=mask, enable_gqa=True, rotary=ROTARY)
        weights = normal(*out.shape, seed=3).to(dtype)
        results.append([out, *torch.autograd.grad((out * weights).sum(), inputs)])
    tolerance = 2e-5 if dtype == torch.float32 else 0.05
    for compiled, plain in zip(*results, strict=True):
        torch.testing.assert_close(compiled, plain, rtol=tolerance, atol=tolerance)


def test_gradients_in_fp64():
    q, k, v = (x[:, :, :20].double().requires_grad_() for x in qkv(20, B=1))

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        method = replace(METHOD, block=5, refine=0, iterations=0)
        return sq.attention(q, k, v, method=method, is_causal=True, enable_gqa=True, rotary=ROTARY)

    assert torch.autograd.gradcheck(run, (q, k, v), fast_mode=True, eps=1e-8, atol=1e-5)


def test_padding_on_the_left_changes_nothing():
    q, k, v = qkv(61, B=1)
    padded = [torch.cat([torch.full_like(x[:, :, :13], torch.nan), x], 2) for x in (q, k, v)]
    mask = Mask.causal() & Mask.padding(torch.arange(74)[None] >= 13)
    out = sq.attention(*padded, method=METHOD, mask=mask, enable_gqa=True, rotary=ROTARY)
    assert (out[:, :, :13] == 0).all()
    torch.testing.assert_close(out[:, :, 13:], sq.attention(q, k, v, **OPTIONS, rotary=ROTARY))


def turned(x: Tensor) -> Tensor:
    """Vectors with the rotary positions 0, 1, …"""
    return torch.cat([ROTARY.turned(x[:, :, i : i + 1], i) for i in range(x.shape[2])], 2)


def test_queries_that_only_positions_tell_apart_are_clustered_as_if_these_were_equal():
    """One query and one key, turned by their positions: each earlier query, turned forward, is a later one."""
    content, N = normal(1, 4, 1, 8, seed=1), 64
    q, k = (turned(x.expand(-1, -1, N, -1)) for x in (4 * content, content))
    v = normal(1, 4, N, 8, seed=2)
    exact = sq.attention(q, k, v, method="full", is_causal=True)

    def error(rotary: sq.Rotary | None) -> float:
        method = sq.ClusteredTail(clusters=16, topk=4, cells=4, block=8, last=0, queries="earlier")
        out = sq.attention(q, k, v, method=method, is_causal=True, rotary=rotary)
        return float((out - exact).norm() / exact.norm())

    assert error(ROTARY) < 0.5 * error(None)


def test_keys_of_a_cache_are_met_exactly():
    q, k, v = (x.double() for x in qkv(8))
    k, v = (torch.cat([x, y.double()], 2) for x, y in zip((k, v), qkv(16)[1:], strict=True))
    out, exact = (
        sq.attention(q, k, v, method=method, mask=Mask.causal(offset=16), enable_gqa=True, rotary=ROTARY)
        for method in (METHOD, "full")
    )
    torch.testing.assert_close(out, exact)


@pytest.mark.parametrize("tokens", [8, 24])  # a block, in which all is exact, and three
def test_items_behind_caches_of_their_own_lengths_meet_them_exactly(tokens: int):
    q, k, v = qkv(tokens)
    k, v = (torch.cat([x, y], 2) for x, y in zip((k, v), qkv(16)[1:], strict=True))
    offset = torch.tensor([3, 16])
    out, exact = (
        sq.attention(q, k, v, method=method, mask=Mask.causal(offset=offset), enable_gqa=True)
        for method in (METHOD, "full")
    )
    torch.testing.assert_close(out[:, :, :8], exact[:, :, :8])
    assert torch.allclose(out, exact, atol=1e-3) == (tokens == 8)


def test_it_trains_through_calls_of_sdpa():
    q, k, v = (x.requires_grad_() for x in qkv(40))
    with sq.intercept(METHOD, strict=True):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    out.sum().backward()
    assert q.grad is not None
    with sq.intercept(replace(METHOD, last=1), strict=True), pytest.raises(ValueError, match="queries=earlier,last=0"):
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def test_wrong_rotary_positions_are_refused():
    q, k, v = qkv(40)
    with pytest.raises(ValueError, match=r"turns 5 pairs.*\(2, 4, 40, 8\)"):
        sq.attention(q, k, v, **OPTIONS, rotary=sq.Rotary(torch.ones(5)))
    with pytest.raises(TypeError, match="rotary"):
        sq.attention(q, k, v, **OPTIONS, rotary=torch.ones(4))
    with pytest.raises(ValueError, match="earlier"):
        sq.Clustered(queries="earlier")
