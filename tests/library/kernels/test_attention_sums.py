"""Sums of attention weights over groups: equal to those of the dense matrix, and near them by random features."""

import pytest
import torch

from subquad import Mask
from subquad.kernels.attention import attention_sums as module
from subquad.kernels.attention.attention_sums import approximate_attention_sums, attention_sums, exact_weights
from subquad.testing.oracle import naive, normal

N, M, C = 13, 17, 4
SIDES = Mask.padding(keys=[17, 6], queries=[4, 13])


def given(size: float = 1.0, N: int = N, M: int = M) -> tuple[torch.Tensor, ...]:
    """Query, key, and the weights of keys and of queries in four groups."""
    shapes = (2, 3, N, 5), (2, 3, M, 5), (2, 3, M, C), (2, 3, N, C)
    q, k, of_keys, of_queries = (normal(*shape, seed=i, dtype=torch.float64) for i, shape in enumerate(shapes))
    return size * q, size * k, of_keys.exp(), of_queries.exp()


def dense(q: torch.Tensor, k: torch.Tensor, mask: Mask, scale: float, bias=None) -> torch.Tensor:
    """A, 0 in the rows of padded queries."""
    tokens = k.shape[2]
    every = torch.eye(tokens, dtype=q.dtype).expand(*k.shape[:2], -1, -1)
    return naive(q, k, every, mask.to_dense(q.shape[2], tokens), bias, scale=scale)


@pytest.mark.parametrize("mask", [Mask(), SIDES, Mask.padding(keys=[0, 17])], ids=str)
@pytest.mark.parametrize("chunk", [1, 40, 2**22])
def test_equal_those_of_the_dense_matrix(mask, chunk, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", chunk)
    q, k, of_keys, of_queries = given()
    weights = dense(q, k, mask, 0.7)
    have = attention_sums(q, k, mask, 0.7, of_keys, of_queries)
    torch.testing.assert_close(have, (weights @ of_keys, weights.mT @ of_queries))


@pytest.mark.parametrize(
    "mask", [Mask.causal() & Mask.padding([13, 5]), Mask.window(2), Mask.dense(normal(2, 3, 13, 13) > 0)], ids=str
)
def test_under_patterns(mask, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 30)
    q, k, of_keys, of_queries = given(M=13)
    weights = dense(q, k, mask, 0.7)
    have = attention_sums(q, k, mask, 0.7, of_keys, of_queries)
    torch.testing.assert_close(have, (weights @ of_keys, weights.mT @ of_queries))


def test_weights_with_a_bias_come_in_order():
    q, k, *_ = given()
    bias = normal(1, 3, N, M, seed=9, dtype=torch.float64)
    rows, weights = zip(*exact_weights(q, k, SIDES, 0.7, step=5, bias=bias), strict=True)
    assert [(r.start, w.shape[2]) for r, w in zip(rows, weights, strict=True)] == [(0, 5), (5, 5), (10, 3)]
    torch.testing.assert_close(torch.cat(weights, dim=2), dense(q, k, SIDES, 0.7, bias))


def error_of_features(features: int, mask: Mask, size: float) -> tuple[float, float]:
    """Mean relative error over eight draws, of the sums over keys and over queries."""
    inputs = given(size)
    exact = attention_sums(*inputs[:2], mask, 0.5, *inputs[2:])
    errors = torch.zeros(2, dtype=torch.float64)
    for seed in range(8):
        found = approximate_attention_sums(
            *inputs[:2], mask, 0.5, *inputs[2:], features=features, seed=seed
        )  # fmt: skip
        for side in range(2):
            errors[side] += (found[side] - exact[side]).norm() / exact[side].norm() / 8
    return errors.tolist()


@pytest.mark.parametrize("mask", [Mask(), SIDES], ids=str)
def test_features_approach_the_exact_sums_as_the_root_of_their_number(mask):
    few, many = error_of_features(64, mask, 0.4), error_of_features(64 * 64, mask, 0.4)
    for before, after in zip(few, many, strict=True):
        assert before < 0.3
        assert 1 / 14 < after / before < 1 / 5  # 1/8


def test_sums_over_all_keys_are_one_for_real_queries():
    q, k, of_keys, of_queries = given(10.0)
    found, _ = approximate_attention_sums(
        q, k, SIDES, 1.0, torch.ones_like(of_keys), of_queries, features=32, seed=0
    )  # fmt: skip
    valid = SIDES.query_padding(N)[:, None, :, None]
    torch.testing.assert_close(found, torch.ones_like(found) * valid)


def test_features_see_no_padding():
    q, k, of_keys, of_queries = given()
    options = {"features": 32, "seed": 0}
    whole = approximate_attention_sums(q, k, SIDES, 1.0, of_keys, of_queries, **options)
    changed = [x.clone() for x in (q, k, of_keys, of_queries)]
    changed[0][0, :, 4:], changed[1][1, :, 6:], changed[2][1, :, 6:], changed[3][0, :, 4:] = 300.0, -300.0, 5.0, 7.0
    for have, want in zip(
        approximate_attention_sums(*changed[:2], SIDES, 1.0, *changed[2:], **options), whole, strict=True
    ):
        assert torch.equal(have, want)
    assert (whole[0][0, :, 4:] == 0).all()
    assert (whole[1][1, :, 6:] == 0).all()


def test_features_of_an_item_without_keys_are_zero():
    q, k, of_keys, of_queries = given()
    found = approximate_attention_sums(
        q, k, Mask.padding(keys=[17, 0]), 1.0, of_keys, of_queries, features=8, seed=0
    )  # fmt: skip
    for side in found:
        assert (side[1] == 0).all()
        assert (side[0] > 0).all()


@pytest.mark.parametrize("sums", [attention_sums, approximate_attention_sums])
def test_they_are_constants(sums):
    q, k, of_keys, of_queries = (x.requires_grad_() for x in given())
    options = {} if sums is attention_sums else {"features": 8, "seed": 0}
    assert not any(x.requires_grad for x in sums(q, k, Mask(), 1.0, of_keys, of_queries, **options))
