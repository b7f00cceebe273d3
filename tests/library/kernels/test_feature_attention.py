"""Attention by features against its definition, all N×M×R weights written out."""

import pytest
import torch
from torch import Tensor

from subquad import Mask
from subquad.kernels.attention.features.op import feature_attention
from subquad.kernels.attention.features.state import merge, read, state_of
from subquad.kernels.attention.features.visible import attend_features
from subquad.testing.oracle import gradients, normal, tracked

PATTERNS = [{}, {"causal": True}, {"lagged": (16, 1)}, {"lagged": (16, 2)}, {"lagged": (5, 3)}]


def visible(N: int, M: int, causal: bool = False, lagged: tuple[int, int] | None = None) -> Tensor:
    i, j = torch.arange(N)[:, None], torch.arange(M)
    if lagged is not None:
        block, lag = lagged
        return j // block <= i // block - lag
    return j <= i if causal else torch.ones(N, M, dtype=torch.bool)


def dense(x: Tensor, y: Tensor, value: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax of ln Σ_r e^{x_ir + y_jr} over the allowed keys."""
    y, value = (z.repeat_interleave(x.shape[1] // z.shape[1], dim=1) for z in (y, value))
    logits = (x.unsqueeze(3) + y.unsqueeze(2)).logsumexp(-1).masked_fill(~allowed, -torch.inf)
    return logits.softmax(-1).nan_to_num(0.0) @ value, logits.logsumexp(-1)


def exponents(N: int, M: int, size: float = 1.0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    shapes = (2, 4, N, 5), (2, 2, M, 5), (2, 2, M, 3)
    return [
        f * normal(*shape, seed=i, dtype=dtype)
        for i, (f, shape) in enumerate(zip((size, size, 1), shapes, strict=True))
    ]


@pytest.mark.parametrize("N", [1, 7, 64, 65, 150])
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("size", [1.0, 40.0])
def test_equals_its_definition(N: int, pattern: dict, size: float):
    x, y, value = tracked(*exponents(N, N, size))
    out, lse = feature_attention(x, y, value, **pattern)
    wanted, of_wanted = dense(x, y, value, visible(N, N, **pattern))
    torch.testing.assert_close(out, wanted, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(lse, of_wanted, atol=1e-9, rtol=1e-9)
    sees = ~torch.isneginf(lse)
    have, want = (
        gradients(torch.cat([a.flatten(), b[sees]]), x, y, value) for a, b in ((out, lse), (wanted, of_wanted))
    )
    torch.testing.assert_close(have, [g.nan_to_num(0.0) for g in want], atol=1e-8, rtol=1e-8)


def test_maps_and_biases_make_the_exponents():
    query, key, value = normal(2, 4, 9, 6), normal(2, 2, 12, 7, seed=1), normal(2, 2, 12, 3, seed=2)
    u, w, b, a = normal(4, 5, 6, seed=3), normal(1, 5, 7, seed=4), normal(4, 5, seed=5), normal(2, 2, 12, seed=6)
    have = feature_attention(query, key, value, of_query=u, of_key=w, feature_bias=b, key_bias=a)
    x = torch.einsum("bhnd,hrd->bhnr", query, u) + b[:, None]
    y = torch.einsum("bgmd,rd->bgmr", key, w[0]) + a[..., None]
    torch.testing.assert_close(have, dense(x, y, value, visible(9, 12)))


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_hidden_keys_take_no_part_whatever_they_hold(pattern: dict):
    x, y, value = exponents(40, 40)
    hidden = torch.zeros(2, 1, 40)
    hidden[0, :, 20:], hidden[1] = -torch.inf, -torch.inf
    value[0, :, 25], value[1, :, 3] = torch.nan, torch.inf
    inputs = tracked(x, y, value)
    out, lse = feature_attention(*inputs, key_bias=hidden, **pattern)
    allowed = visible(40, 40, **pattern) & torch.isfinite(hidden).unsqueeze(2)
    wanted, _ = dense(x, y, value.nan_to_num(0.0, 0.0), allowed)
    torch.testing.assert_close(out, wanted)
    assert (out[1] == 0).all()
    assert torch.isneginf(lse[1]).all()
    for grad in gradients(out, *inputs):
        assert grad.isfinite().all()
        assert (grad[1] == 0).all()


@pytest.mark.parametrize("last", [300.0, -300.0, 3e4])
def test_later_keys_push_no_earlier_weight_under(last: float):
    """In fp32, with features that e^x could not even hold."""
    x, y, value = exponents(150, 150, dtype=torch.float32)
    y[:, :, :75] += 200.0
    y[:, :, -1] += last
    out, lse = feature_attention(x, y, value, causal=True)
    wanted, of_wanted = dense(x.double(), y.double(), value.double(), visible(150, 150, causal=True))
    torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(lse.double(), of_wanted, atol=1e-4, rtol=1e-5)


def test_states_of_parts_merge_to_that_of_the_whole():
    x, y, value = exponents(9, 20)
    y[:, :, :4] = -torch.inf  # no features at all: as padding
    x = x[:, :2]
    whole = state_of(y, value)
    parts = [state_of(y[:, :, part], value[:, :, part]) for part in (slice(0, 4), slice(4, 11), slice(11, 20))]
    merged = merge(merge(parts[0], parts[1]), parts[2])
    torch.testing.assert_close(merged, whole)
    torch.testing.assert_close(read(merged, x), dense(x, y, value, visible(9, 20)))
    out, lse = read(parts[0], x)
    assert (out == 0).all()
    assert torch.isneginf(lse).all()


@pytest.mark.parametrize("N", [1, 3, 20])
@pytest.mark.parametrize("offset", [0, 5, 13, torch.tensor([2, 9]), torch.tensor(4)], ids=str)
def test_queries_that_stand_among_the_keys(N: int, offset: int | Tensor):
    x, y, value = exponents(N, 20)
    mask = Mask.causal(offset=offset) & Mask.padding(keys=[20, 11])
    have = attend_features(x, y, value, mask)[0]
    torch.testing.assert_close(have, dense(x, y, value, mask.to_dense(N, 20))[0])
