"""Closeness to exact attention."""

import math

import pytest
import torch

import subquad as sq
from subquad.tools.measure.fidelity import (
    attention_weights,
    cosine,
    crossover,
    percentile,
    relative_error,
    retrieval_agreement,
    weights_l1,
)


def test_cosine_and_percentile():
    a, b = torch.tensor([[1.0, 0.0], [1.0, 1.0]]), torch.tensor([[2.0, 0.0], [1.0, 0.0]])
    torch.testing.assert_close(cosine(a, b), torch.tensor([1.0, 0.5**0.5], dtype=torch.float64))
    assert percentile(torch.arange(101.0), 0.05) == pytest.approx(5.0)


def test_relative_error():
    exact = torch.tensor([3.0, 4.0])
    assert relative_error(exact, exact) == 0.0
    assert relative_error(torch.zeros(2), exact) == 1.0
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0.0
    assert relative_error(exact, torch.zeros(2)) == math.inf


def test_weights_are_the_softmax_and_apply_to_any_values():
    q, k, v = torch.randn(3, 1, 2, 7, 4)
    torch.testing.assert_close(attention_weights(sq.Full(), q, k, v), (q @ k.mT / 2).softmax(-1))
    method = sq.ImprovedClustered(clusters=2, topk=2)
    torch.testing.assert_close(attention_weights(method, q, k, v) @ v, method(q, k, v))


@pytest.mark.parametrize("G", [1, 2, 4])
def test_weights_of_choices_by_values_are_those_of_these_values(G):
    q, k, v = torch.randn(1, 4, 30, 4), *torch.randn(2, 1, G, 30, 4)
    method = sq.ClusteredTail(clusters=4, topk=2, cells=3)
    weights = attention_weights(method, q, k, v, enable_gqa=True)
    torch.testing.assert_close(weights @ v.repeat_interleave(4 // G, 1), method(q, k, v, enable_gqa=True))
    rows = torch.tensor([3, 20])
    with torch.inference_mode():
        some = attention_weights(method, q, k, v, rows=rows, keys=slice(2, 9), enable_gqa=True)
    torch.testing.assert_close(some, weights[:, :, rows, 2:9])


def test_weights_of_a_bound_method_are_compared_where_query_heads_share_key_heads():
    q, k, v = torch.randn(1, 4, 20, 8), *torch.randn(2, 1, 2, 20, 8)
    bound = sq.parse_method("learned-feature-map").bind(heads=4, kv_heads=2, head_dim=8, max_length=20).eval()
    with torch.no_grad():
        assert 0 < weights_l1(bound, q, k, v, mask=sq.Mask.causal(), bias=None) < 2
        exact = sq.Full().bind(heads=4, kv_heads=2, head_dim=8)
        assert weights_l1(exact, q, k, v, mask=sq.Mask.causal(), bias=None) == pytest.approx(0.0, abs=1e-5)


def test_retrieval_agreement():
    exact = torch.tensor([[3.0, 2.0, 1.0, 0.0], [0.0, 1.0, 2.0, 3.0]])
    assert retrieval_agreement(exact, exact, depth=2) == (1.0, 1.0)
    other = torch.tensor([[2.0, 3.0, 1.0, 0.0], [0.0, 1.0, 2.0, 3.0]])
    assert retrieval_agreement(other, exact, depth=2) == (0.5, 1.0)
    assert retrieval_agreement(-exact, exact, depth=2) == (0.0, 0.0)
    assert retrieval_agreement(-exact, exact, depth=10) == (0.0, 1.0)


@pytest.mark.parametrize(("speedups", "tokens"), [
    ({512: 0.5, 1024: 2.0}, 512 * 2**0.5),
    ({512: 0.5, 1024: 2.0, 2048: 0.9, 4096: 3.0}, 2048 * 2 ** (math.log(1 / 0.9) / math.log(3 / 0.9))),
    ({512: 1.5, 1024: 2.0}, 512),
    ({512: 1.5, 1024: 0.9}, None),
    ({}, None),
])  # fmt: skip
def test_crossover(speedups, tokens):
    assert crossover(speedups) == (None if tokens is None else pytest.approx(tokens))


@pytest.mark.parametrize(("speedups", "ties", "tokens"), [
    ({512: 1.01, 1024: 1.02}, [512, 1024], None),  # a tie at all lengths
    ({512: 0.7, 1024: 2.0, 2048: 1.02}, [2048], None),  # a tie at the longest
    ({512: 0.5, 1024: 1.02, 2048: 2.0}, [1024], 2048),  # there or below: where, the noise hides
    ({512: 0.5, 1024: 0.99, 2048: 2.0}, [1024], 2048),  # and on which side of 1 a tie lies does not matter
    ({512: 0.5, 1024: 2.0}, [], 512 * 2**0.5),
    ({512: 1.01, 1024: 0.5, 2048: 2.0}, [512], 1024 * 2**0.5),  # a tie below the crossing
    ({512: 1.5, 1024: 2.0}, [], 512),
    ({512: 0.9, 1024: 0.8}, [], None),
])  # fmt: skip
def test_a_tie_is_no_crossover(speedups, ties, tokens):
    assert crossover(speedups, ties) == (None if tokens is None else pytest.approx(tokens))
