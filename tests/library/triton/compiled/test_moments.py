import pytest
import torch

from subquad.kernels.triton.covariance import covariance
from subquad.kernels.triton.moments import moments
from tests.library.triton.compiled.fits import assert_fits, meta


@pytest.mark.parametrize(("D", "dtype"), [(64, torch.float32), (128, torch.bfloat16)], ids=str)
def test_moments(D, dtype):
    x, valid = meta(1, 32, 4096, D, dtype=dtype), meta(1, 4096, dtype=torch.bool)
    assert len(assert_fits(lambda: covariance(x, valid, moments(x, valid)))) == 4
