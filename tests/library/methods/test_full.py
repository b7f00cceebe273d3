"""Full attention with relative positions against the dense formula; what it refuses."""

import pytest
import torch

import subquad as sq
from subquad import Mask
from subquad.testing.oracle import gradients, normal, qkv, tracked
from tests.library.methods.test_local import MASKS, dense_of_distances

RELATIVE = sq.Full(positions="relative")
ids = torch.tensor([[0] * 10 + [1] * 9 + [-1] * 4, [0, 1, 2] * 7 + [0, -1]])


def layer(method: sq.Method = RELATIVE, heads: int = 2, **sizes: int) -> sq.BoundMethod:
    """A layer whose parameters are large enough to matter."""
    bound = method.bind(heads=heads, head_dim=8, **sizes)
    for parameter in bound.parameters():
        parameter.data.mul_(30.0)
    return bound


@pytest.mark.parametrize("mask", [*MASKS.values(), Mask.dense(normal(2, 1, 23, 23, seed=4) > 0)], ids=[*MASKS, "dense"])
def test_relative_positions_equal_the_dense_formula_forward_and_backward(mask):
    bound, inputs = layer(), tracked(*qkv(23, dtype=torch.float64))
    learned = list(bound.parameters())
    out, wanted = bound(*inputs, mask=mask), dense_of_distances(bound.learned, *inputs, mask)
    torch.testing.assert_close(out, wanted)
    grads = gradients(out, *inputs, *learned)
    torch.testing.assert_close(grads, gradients(wanted, *inputs, *learned))
    assert all(grad.abs().max() > 1e-3 for grad in grads)


@pytest.mark.parametrize("mask", [Mask(), Mask.causal(), Mask.padding([23, 8]), Mask.segments(ids)])
def test_it_is_local_with_a_window_over_all(mask):
    bound, inputs = layer(), qkv(23)
    local = layer(sq.Local(window=400, positions="relative"))
    torch.testing.assert_close(bound(*inputs, mask=mask), local(*inputs, mask=mask), atol=1e-5, rtol=1e-4)


def test_a_bias_and_the_log_sum_exp():
    bound, inputs, bias = layer(), qkv(23), normal(2, 1, 23, 23, seed=6)
    out, lse = bound(*inputs, bias=bias, is_causal=True, return_lse=True)
    wanted = dense_of_distances(bound.learned, *inputs, Mask.causal(), bias=bias)
    torch.testing.assert_close(out, wanted)
    halves = []
    for keys in (torch.arange(23) < 9, torch.arange(23) >= 9):
        mask = Mask.causal() & Mask.padding(keys=keys.expand(2, -1))
        halves.append(bound(*inputs, bias=bias, mask=mask, return_lse=True))
    (one, first), (other, second) = halves
    torch.testing.assert_close(torch.logaddexp(first, second), lse)
    share = (first - lse).exp()[..., None]
    torch.testing.assert_close(share * one + (1 - share) * other, out)


def test_shared_key_heads():
    bound, inputs = layer(heads=4, kv_heads=2), qkv(23, H=4, G=2)
    torch.testing.assert_close(bound(*inputs), dense_of_distances(bound.learned, *inputs, Mask()))


@pytest.mark.parametrize("offset", [0, 4, 19, 40])
@pytest.mark.parametrize("is_causal", [True, False])
def test_queries_in_the_middle_of_a_cache(offset, is_causal):
    mask, inputs, bound = Mask(is_causal=is_causal, offset=offset), qkv(4, 23), layer()
    torch.testing.assert_close(bound(*inputs, mask=mask), dense_of_distances(bound.learned, *inputs, mask))
    several = Mask(is_causal=is_causal, offset=torch.tensor([offset, 2]))
    item = [x[:1] for x in inputs]
    torch.testing.assert_close(bound(*inputs, mask=several)[:1], bound(*item, mask=mask))


def test_the_traits_say_what_changes():
    exact, relative = sq.Full().traits, RELATIVE.traits
    assert exact.cross
    assert not exact.learned
    assert relative.learned
    assert relative.relative
    assert sq.Full().is_exact
    assert not RELATIVE.is_exact
    assert str(RELATIVE) == "full:positions=relative"


def test_refusals():
    with pytest.raises(
        ValueError, match="'full:positions=relative' has learned parameters, so it runs only as a bound method"
    ):
        sq.attention(*qkv(23), method=RELATIVE)
    with pytest.raises(ValueError, match="'full:positions=relative' does not support fewer or more keys than queries"):
        layer()(*qkv(4, 23))
    with pytest.raises(ValueError, match="'full:positions=relative' does not support cross-attention"):
        sq.nn.MultiheadAttention(12, 4, method=RELATIVE)(normal(2, 9, 12), normal(2, 9, 12, seed=1))
