"""Positive random features: their mean is the kernel, at any size of the inputs, and padding has none."""

import pytest
import torch

from subquad.core.randomness import normal as drawn
from subquad.kernels.attention.positive_features import positive_features
from subquad.testing.oracle import normal

FEATURES = 32


def estimates(q, k, scale: float, seed: int) -> torch.Tensor:
    """φ(q)·φ(k)/R·e^{m − ‖q‖²/2}, without what the query's features are divided by: e^m, by the largest exponent."""
    of_query, of_key = positive_features(q, k, None, scale, FEATURES, seed)
    directions = drawn(seed, FEATURES, q.shape[3], like=q)
    root = abs(scale) ** 0.5
    q, k = root * q, root * k * (1 if scale > 0 else -1)
    of_keys = (k @ directions.T - k.square().sum(-1, keepdim=True) / 2).amax(2, keepdim=True)
    largest = (q @ directions.T + of_keys).amax(-1)
    return of_query @ of_key.mT * (largest - q.square().sum(-1) / 2).exp()[..., None] / FEATURES


@pytest.mark.parametrize("scale", [0.7, -0.7])
def test_the_mean_over_draws_is_the_kernel(scale):
    q, k = (0.6 * normal(1, 1, 5, 3, seed=seed, dtype=torch.float64) for seed in (1, 2))
    found = torch.stack([estimates(q, k, scale, seed)[0, 0] for seed in range(1000)])
    error = found.mean(0) - (scale * q @ k.mT).exp()[0, 0]
    assert (error.abs() < 4 * found.std(0) / len(found) ** 0.5).all()
    assert (found.std(0) > 0.02).all()  # a single draw is far off


def test_two_keys_compare_as_in_the_kernel_at_many_features():
    q, k = (0.4 * normal(2, 2, 6, 4, seed=seed, dtype=torch.float64) for seed in (1, 2))
    of_query, of_key = positive_features(q, k, None, 0.5, 200_000, 0)
    found, kernel = of_query @ of_key.mT, (0.5 * q @ k.mT).exp()
    torch.testing.assert_close(found / found[..., :1], kernel / kernel[..., :1], atol=0, rtol=0.03)


@pytest.mark.parametrize("size", [1.0, 10.0, 300.0])
def test_large_inputs_stay_finite_and_every_normaliser_is_at_least_one(size):
    q, k = (size * normal(2, 2, 20, 8, seed=seed) for seed in (1, 2))
    of_query, of_key = positive_features(q, k, None, 1.0, FEATURES, 0)
    assert of_query.isfinite().all()
    assert of_key.isfinite().all()
    assert (of_query >= 0).all()
    assert (of_key >= 0).all()
    assert ((of_query * of_key.sum(2, keepdim=True)).sum(-1) >= 1 - 1e-5).all()
    overflows = (q @ drawn(0, FEATURES, 8, like=q).T).exp().isinf().any()
    assert overflows == (size > 1)


def test_padded_keys_have_none_and_change_nothing():
    q, k = normal(2, 2, 9, 4), normal(2, 2, 9, 4, seed=1)
    valid = torch.arange(9) < torch.tensor([[9], [5]])
    whole = positive_features(q, k, valid, 1.0, FEATURES, 0)
    assert (whole[1][1, :, 5:] == 0).all()
    k[1, :, 5:] = 300.0
    for have, want in zip(positive_features(q, k, valid, 1.0, FEATURES, 0), whole, strict=True):
        assert torch.equal(have, want)
    alone = positive_features(q[1:], k[1:, :, :5], None, 1.0, FEATURES, 0)
    torch.testing.assert_close(whole[0][1:], alone[0])
    torch.testing.assert_close(whole[1][1:, :, :5], alone[1])


def test_an_item_without_real_keys_is_finite():
    q = normal(1, 1, 3, 4)
    of_query, of_key = positive_features(q, q, torch.zeros(1, 3, dtype=torch.bool), 1.0, FEATURES, 0)
    assert of_query.isfinite().all()
    assert (of_key == 0).all()


def test_more_features_begin_with_the_same_ones():
    k = normal(1, 2, 9, 4)
    few, many = (positive_features(k, k, None, 1.0, features, 3)[1] for features in (8, 30))
    torch.testing.assert_close(many[..., :8], few)
