"""Exact rows against exact attention under every mask, and how rows are drawn."""

import pytest
import torch

import subquad as sq
from subquad.audits.exact_rows import exact_rows, relative_errors, sampled
from subquad.methods import Full

B, H, G, N, D = 2, 4, 2, 24, 8


def qkv(M: int = N, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    shapes = (B, H, N, D), (B, G, M, D), (B, G, M, D + 1)
    return tuple(torch.randn(shape, generator=drawn, dtype=torch.float64) for shape in shapes)


def some(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


PADDED = sq.Mask.padding([N, 9])
MASKS = {
    "none": {},
    "padding": {"mask": PADDED},
    "padded keys": {"mask": sq.Mask.padding(keys=torch.arange(N).expand(B, N) > 3)},
    "causal": {"is_causal": True},
    "window": {"mask": sq.Mask.window(3) & PADDED},
    "segments": {"mask": sq.Mask.segments(torch.arange(B * N).view(B, N) // 7) & sq.Mask.causal()},
    "dense": {"mask": sq.Mask.dense(some(torch.float, B, 1, N, N) > 0) & PADDED},
    "dense of each head": {"mask": sq.Mask.dense(some(torch.float, 1, H, N, N) > 0)},
    "bias and scale": {"bias": some(torch.float64, 1, H, N, N), "scale": 0.7},
    "bias of each item": {"bias": some(torch.float64, B, 1, N, N), "mask": PADDED},
    "keep": {"keep": [0, 5], "mask": sq.Mask.causal()},
    "keep and window": {"keep": torch.tensor([[0, 5], [1, 1]]), "mask": sq.Mask.window(2) & PADDED},
}
OFFSETS = {"offset": 3, "offsets": torch.tensor([3, 8]), "one offset": torch.tensor(5)}


def compare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: object) -> None:
    q, k, v, call = Full().prepare(q, k, v, enable_gqa=True, **how)
    want = Full().run(q, k, v, call)
    rows = sampled(q, call.mask, None, 200, torch.Generator().manual_seed(2))
    got = exact_rows(q, k, v, call, rows)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, want[rows], rtol=0, atol=1e-12)
    assert relative_errors(want[rows], got).max() < 1e-10


@pytest.mark.parametrize("name", MASKS)
def test_exact_rows_are_those_of_exact_attention(name):
    compare(*qkv(), **MASKS[name])


@pytest.mark.parametrize("name", OFFSETS)
def test_exact_rows_of_queries_on_a_cache(name):
    compare(*qkv(M=40), mask=sq.Mask.causal(offset=OFFSETS[name]) & sq.Mask.window(12))


def test_16_bit_inputs_are_compared_in_fp32():
    q, k, v = (x.bfloat16() for x in qkv())
    q, k, v, call = Full().prepare(q, k, v, enable_gqa=True)
    rows = sampled(q, call.mask, None, 50, torch.Generator())
    assert exact_rows(q, k, v, call, rows).dtype == torch.float32


def test_rows_are_real_and_uniform_over_items_heads_and_queries():
    q, mask = torch.zeros(B, H, N, D), sq.Mask.padding([N, 6])
    item, head, row = sampled(q, mask, None, 6000, torch.Generator().manual_seed(0))
    counts = torch.zeros(B, H, N).index_put((item, head, row), torch.ones(6000), accumulate=True)
    assert counts[1, :, 6:].sum() == 0
    of_valid = torch.cat([counts[0].flatten(), counts[1, :, :6].flatten()])
    assert of_valid.min() > 20  # of 50 expected
    assert of_valid.max() < 90


def test_queries_that_only_the_layer_knows_as_padding_are_left_out():
    valid = torch.arange(N).expand(B, N) < torch.tensor([[4], [N]])
    mask = sq.Mask.padding(queries=torch.arange(N).expand(B, N) > 1)
    item, _, row = sampled(torch.zeros(B, H, N, D), mask, valid, 500, torch.Generator())
    assert set(row[item == 0].tolist()) == {2, 3}


def test_no_real_query_is_no_row():
    assert sampled(torch.zeros(B, H, N, D), sq.Mask.padding([0, 0]), None, 5, torch.Generator()) is None
    assert sampled(torch.zeros(B, H, 0, D), sq.Mask(), None, 5, torch.Generator()) is None


def test_rows_follow_the_generator_alone():
    q, draws = torch.zeros(B, H, N, D), []
    for seed in (0, 0, 1):
        torch.rand(3)
        draws.append(torch.stack(sampled(q, sq.Mask(), None, 20, torch.Generator().manual_seed(seed))))
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_relative_errors_where_something_is_zero_or_not_finite():
    nan, inf = torch.nan, torch.inf
    exact = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, 0.0], [1.0, 1.0], [1.0, 1.0], [nan, 1.0], [inf, 1.0]])
    out = torch.tensor([[3.0, 3.0], [0.0, 0.0], [0.0, 1.0], [nan, 1.0], [inf, 1.0], [1.0, 1.0], [inf, 1.0]])
    want = torch.tensor([0.2, 0.0, inf, inf, inf, nan, nan], dtype=torch.float64)
    torch.testing.assert_close(relative_errors(out, exact), want, equal_nan=True)
