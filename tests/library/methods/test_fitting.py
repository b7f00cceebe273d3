"""The loss of methods whose outputs teach their parameters."""

import pytest
import torch

import subquad as sq
from subquad import Mask
from subquad.kernels.tokens.heads import repeat_heads
from subquad.methods.core.fitting import output_error
from subquad.testing.oracle import naive, normal, qkv, tracked

METHOD = sq.Local(window=3, positions="relative")


def error_of(q, k, v, mask=None, method=METHOD, **options):
    bound = method.bind(heads=q.shape[1], kv_heads=k.shape[1], head_dim=8)
    query, key, value, call = bound.prepare(q, k, v, mask=mask)
    return output_error(method, query, key, value, call, **options), bound


@pytest.mark.parametrize("mask", [None, Mask.causal(), Mask.padding([24, 9])])
def test_it_is_the_mean_over_items_of_the_relative_square(mask):
    q, k, v = qkv(H=4, G=2)
    loss, bound = error_of(q, k, v, mask)
    dense = (mask or Mask()).to_dense(24, 24)
    exact = naive(q, repeat_heads(k, 4), repeat_heads(v, 4), dense)
    apart, size = (bound(q, k, v, mask=mask) - exact).square(), exact.square()
    torch.testing.assert_close(loss, (apart.sum((1, 2, 3)) / size.sum((1, 2, 3))).mean())


def test_the_error_of_the_mean_is_added_with_its_weight():
    q, k, v = qkv(H=4, G=2)
    loss, bound = error_of(q, k, v, Mask.padding([24, 9]))
    more, _ = error_of(q, k, v, Mask.padding([24, 9]), of_mean=0.5)
    means = []
    for item, n in enumerate((24, 9)):
        parts = [x[item : item + 1, :, :n] for x in (q, k, v)]
        exact = sq.attention(*parts, method="full", enable_gqa=True).mean(2)
        means.append((bound(*parts).mean(2) - exact).square().sum() / exact.square().sum())
    torch.testing.assert_close(more, loss + 0.25 * (means[0] + means[1]))


def test_its_gradient_reaches_the_learned_parameters_alone():
    inputs = tracked(*qkv())
    loss, bound = error_of(*inputs)
    loss.backward()
    assert all(x.grad is None for x in inputs)
    assert all(p.grad.abs().max() > 0 for p in bound.parameters())


def test_size_and_padding_of_an_item_do_not_change_what_it_counts():
    q, k, v = qkv(B=1)
    alone, _ = error_of(q, k, v)
    grown, _ = error_of(q, k, 100 * v)
    torch.testing.assert_close(grown, alone)
    padded = [torch.cat([x, 50 * normal(1, 2, 7, x.shape[3], seed=1)], dim=2) for x in (q, k, v)]
    beside, _ = error_of(*padded, Mask.padding([24]))
    torch.testing.assert_close(beside, alone)


def test_an_item_without_tokens_or_values_counts_nothing():
    q, k, v = qkv()
    first, _ = error_of(q[:1], k[:1], v[:1])
    for values, mask in ((v, Mask.padding([24, 0])), (v * torch.tensor([1.0, 0.0])[:, None, None, None], None)):
        loss, bound = error_of(q, k, values, mask)
        torch.testing.assert_close(loss, first / 2)
        loss.backward()
        assert all(p.grad.isfinite().all() for p in bound.parameters())


def test_half_precision_in_gives_fp32():
    loss, _ = error_of(*(x.bfloat16() for x in qkv()))
    assert loss.dtype == torch.float32
