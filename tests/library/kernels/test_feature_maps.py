"""Random features estimate the kernel: without bias, and with the errors that theory gives."""

import math

import pytest
import torch
from torch import Tensor

from subquad.core.randomness import directions
from subquad.kernels.attention.feature_maps import (
    EXPONENTIAL,
    exponential_map,
    optimal_a,
    relu_exponents,
    trigonometric_features,
)
from subquad.testing.oracle import normal

R, DRAWS = 64, 4000
UNBIASED = (*EXPONENTIAL, "trigonometric")


def pair(norm: float, width: int) -> tuple[Tensor, Tensor]:
    """x and y of different lengths with ‖x + y‖ = norm."""
    x, y = normal(2, width, seed=3, dtype=torch.float64)
    size = norm / (x + 0.6 * y).norm()
    return size * x, size * 0.6 * y


def rows(draws: int, width: int, independent: bool, features: int = R) -> Tensor:
    """Draws of R rows each; orthogonal ones are so in runs of `width`, which divides R."""
    assert features % width == 0
    drawn = directions(5, None, draws * features, width, independent, like=torch.zeros(1, dtype=torch.float64))
    return drawn.view(draws, features, width)


def estimates(kind: str, x: Tensor, y: Tensor, drawn: Tensor, norm: float | None = None) -> Tensor:
    """φ(x)·φ(y) for every draw."""
    draws, flat = len(drawn), drawn.flatten(0, 1)
    if kind == "trigonometric":
        of_x, of_y = (trigonometric_features(z, flat) for z in (x, y))
        products = of_x * of_y * ((x.square().sum() + y.square().sum()) / 2).exp()
    else:
        mapped = exponential_map(kind, flat, float((x + y).square().sum()) if norm is None else norm)
        products = (mapped.exponents(x) + mapped.exponents(y)).exp()
    return draws * products.view(-1, *drawn.shape[:2]).sum((0, 2))  # each row's share is 1/R, not 1/(draws·R)


def mean_square_error(kind: str, x: Tensor, y: Tensor) -> float:
    """Error of independent rows: Choromanski et al. 2021, lemma 2; Likhosherstov et al. 2022, theorem 3.2 (favor++)."""
    kernel, sum_, difference = math.exp(x @ y), float((x + y).square().sum()), float((x - y).square().sum())
    if kind == "trigonometric":
        return math.exp(sum_) * kernel**-2 * (1 - math.exp(-difference)) ** 2 / (2 * R)
    if kind == "favor++":
        a, width = optimal_a(sum_, len(x)), len(x)
        growth = width * math.log(1 - 4 * a) - width / 2 * math.log(1 - 8 * a) + 2 * (1 - 4 * a) / (1 - 8 * a) * sum_
        squares = float(x.square().sum() + y.square().sum())
        return (math.exp(growth - squares) - kernel**2) / R
    positive = math.exp(sum_) * kernel**2 * (1 - math.exp(-sum_)) / R
    return positive * (1 - math.exp(-sum_)) / 2 if kind == "hyperbolic" else positive


@pytest.mark.parametrize("kind", UNBIASED)
@pytest.mark.parametrize("independent", [True, False], ids=["iid", "orthogonal"])
@pytest.mark.parametrize("norm", [0.4, 1.0])
def test_the_mean_over_draws_is_the_kernel(kind: str, independent: bool, norm: float):
    x, y = pair(norm, 8)
    found = estimates(kind, x, y, rows(DRAWS, 8, independent))
    assert abs(found.mean() - math.exp(x @ y)) < 4 * found.std() / DRAWS**0.5


@pytest.mark.parametrize("kind", UNBIASED)
@pytest.mark.parametrize("norm", [0.5, 1.0])
def test_the_mean_square_error_is_that_of_theory(kind: str, norm: float):
    x, y = pair(norm, 8)
    found = (estimates(kind, x, y, rows(4 * DRAWS, 8, True)) - math.exp(x @ y)).square().mean()
    assert found / mean_square_error(kind, x, y) == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("kind", UNBIASED)
def test_orthogonal_rows_err_less(kind: str):
    x, y = pair(1.0, 8)
    errors = [(estimates(kind, x, y, rows(DRAWS, 8, iid)) - math.exp(x @ y)).square().mean() for iid in (False, True)]
    assert errors[0] < errors[1]


def test_favor_plus_plus_errs_least_at_its_norm():
    x, y = pair(2.0, 16)
    assert mean_square_error("favor++", x, y) < 0.8 * mean_square_error("hyperbolic", x, y)
    drawn, kernel = rows(DRAWS, 16, True), math.exp(x @ y)
    errors = [(estimates("favor++", x, y, drawn, norm) - kernel).square().mean() for norm in (0.0, 4.0, 30.0)]
    assert errors[1] < errors[0]
    assert errors[1] < errors[2]


def test_norms_of_0_and_above_give_a_of_0_and_below():
    assert optimal_a(0.0, 64) == 0.0
    assert optimal_a(16.0, 64) < optimal_a(4.0, 64) < 0


def test_signs_of_qr_matter():
    """Householder's Q as it comes is not uniformly random: at D = 4 and ‖z‖ = 2 it is a third off."""
    z = torch.full((4,), 0.5, dtype=torch.float64)  # x = y, ‖x + y‖ = 2
    gauss = normal(20 * DRAWS, 4, 4, seed=8, dtype=torch.float64)
    lengths = normal(20 * DRAWS, 4, 4, seed=9, dtype=torch.float64).norm(dim=-1, keepdim=True)
    unsigned = torch.linalg.qr(gauss).Q.mT * lengths
    found = [estimates("positive", z, z, drawn) / math.e for drawn in (rows(20 * DRAWS, 4, False, 4), unsigned)]
    assert abs(found[0].mean() - 1) < 4 * found[0].std() / len(found[0]) ** 0.5
    assert abs(found[1].mean() - 0.67) < 0.02


def test_relu_features_are_positive_and_as_stated():
    x, drawn = normal(7, 8, dtype=torch.float64), rows(1, 8, True)[0]
    wanted = ((drawn @ x[3]).clamp(min=0) + 1e-3) / 8
    torch.testing.assert_close(relu_exponents(x, drawn)[3].exp(), wanted)


@pytest.mark.parametrize("independent", [True, False])
def test_more_features_begin_with_the_same_ones(independent: bool):
    few, many = (directions(5, None, count, 8, independent, like=torch.zeros(1)) for count in (9, 30))
    assert torch.equal(few, many[:9])
