import pytest
import torch

from subquad.kernels.triton.groups import group_order, group_sums
from tests.library.triton.compiled.fits import assert_fits, meta


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("D", [64, 128, 256])
def test_groups(dtype, D):
    x, labels = meta(1, 32, 4096, D, dtype=dtype), meta(1, 32, 4096, dtype=torch.int64)
    assert len(assert_fits(lambda: group_sums(x, *group_order(labels, 100)))) == 5
