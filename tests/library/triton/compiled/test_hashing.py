import pytest
import torch

from subquad.kernels.selection.hashing.op import hash_codes
from tests.library.triton.compiled.fits import assert_fits, meta


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("D", [64, 128])
def test_hashing(dtype, D):
    x = meta(1, 32, 4096, D, dtype=dtype)
    assert len(assert_fits(lambda: hash_codes(x, 63, 1))) == 1
