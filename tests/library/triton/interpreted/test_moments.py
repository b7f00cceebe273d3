import pytest
import torch

from subquad.kernels.triton.covariance import covariance
from subquad.kernels.triton.moments import RUN, moments
from subquad.testing.oracle import normal
from tests.library.triton.devices import DTYPES
from tests.library.triton.interpreted.fences import fenced


def expected(x, valid):
    """Mean, variance and covariance of one head's real vectors, in fp64."""
    x = x[valid].double()
    x = x if len(x) else x.new_zeros(1, x.shape[1])
    centred = x - x.mean(0)
    return x.mean(0), centred.square().mean(), centred.T @ centred / len(x)


def assert_moments(x, valid=None):
    of = moments(x, valid)
    spread = covariance(x, valid, of)
    valid = torch.ones(x.shape[0], x.shape[2], dtype=torch.bool) if valid is None else valid
    for b in range(x.shape[0]):
        for h in range(x.shape[1]):
            factor = of.factor[b, h].double()
            have = (
                of.mean[b, h].double() / factor,
                of.variance[b, h].double() / factor**2,
                spread[b, h].double() / factor**2,
            )
            for got, want in zip(have, expected(x[b, h], valid[b]), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6 * float(want.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("N", "D"), [(1, 3), (77, 20), (RUN + 1, 35)])
def test_moments(poisoned, dtype, N, D):
    x = fenced(normal(2, N, 1, D).to(dtype)).transpose(1, 2)
    assert_moments(x)
    assert_moments(x, fenced(torch.arange(N)[None] < torch.tensor([N // 2, N])[:, None]))


@pytest.mark.parametrize("size", [1e-35, 1e30])
def test_of_numbers_whose_squares_are_no_numbers(size):
    assert_moments(normal(1, 1, 30, 5) * size)


def test_a_mean_far_from_zero_costs_no_digits():
    x = normal(1, 1, 500, 4) + 1000
    of = moments(x, None)
    torch.testing.assert_close(of.mean[0, 0].double(), x[0, 0].double().mean(0) * of.factor[0, 0], rtol=1e-7, atol=0)
    want = expected(x[0, 0], torch.ones(500, dtype=torch.bool))[1]
    torch.testing.assert_close((of.variance / of.factor**2)[0, 0].double(), want, rtol=1e-6, atol=0)


def test_padding_may_hold_anything_and_nan_stays_in_its_head():
    x, valid = normal(2, 2, 20, 4), torch.arange(20)[None] < torch.tensor([20, 7])[:, None]
    x[1, :, 9], x[0, 1, 3, 2] = torch.nan, torch.inf
    of = moments(x, valid)
    assert of.mean[0, 1].isnan().any()
    assert of.mean[[0, 1, 1], [0, 0, 1]].isfinite().all()
    assert covariance(x, valid, of)[[0, 1, 1], [0, 0, 1]].isfinite().all()
