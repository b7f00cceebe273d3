from unittest.mock import patch

import pytest
import torch

from subquad.kernels.selection.clusters import reference
from subquad.kernels.selection.clusters.reference import cholesky
from subquad.testing.oracle import normal


@pytest.mark.parametrize("width", [1, 2, 8, 64])
def test_the_factor_for_onnx_equals_torchs(width):
    x = normal(2, 3, 2 * width, width).double()
    covariance = x.mT @ x / (2 * width) + 1e-4 * torch.eye(width)
    with patch.object(reference, "in_onnx_export", lambda: True):
        factor = cholesky(covariance)
    torch.testing.assert_close(factor, torch.linalg.cholesky(covariance), atol=1e-9, rtol=1e-7)
    assert torch.equal(factor, factor.tril())
    torch.testing.assert_close(cholesky(covariance), torch.linalg.cholesky(covariance), atol=0, rtol=0)
