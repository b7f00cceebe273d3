"""Errors of random features are those of the formulas."""

import pytest
import torch

from subquad.research.papers.kernel_error import KINDS, estimates, expected, measured, pairs, per_row


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("norm", "features"), [(0.5, 32), (0.25, 16)])
def test_errors_of_features_are_those_of_the_formulas(kind, norm, features):
    x, y = pairs(norm, 64, 64)
    found = measured(kind, x, y, features, draws=300, independent=True)
    assert found == pytest.approx(expected(kind, x, y, features), rel=0.1)
    assert measured(kind, x, y, features, draws=300, independent=False) < 1.02 * found


@pytest.mark.parametrize("kind", KINDS)
def test_estimates_are_right_on_average_and_pairs_have_their_norm(kind):
    x, y = pairs(0.3, 8, 5)
    torch.testing.assert_close(x.norm(dim=-1), torch.full((5,), 0.3, dtype=torch.float64))
    drawn = torch.stack([estimates(kind, x, y, 64, seed, independent=False) for seed in range(200)])
    torch.testing.assert_close(drawn.mean(0), torch.ones(5, dtype=torch.float64), atol=0.03, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_error_falls_with_the_root_of_the_features(kind):
    x, y = pairs(0.7, 16, 8)
    assert expected(kind, x, y, 4 * per_row(kind)) == pytest.approx(2 * expected(kind, x, y, 16 * per_row(kind)))
