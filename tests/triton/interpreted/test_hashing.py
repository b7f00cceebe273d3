import pytest
import torch

import subquad as sq
from subquad.ops.choose.hashing.op import hash_codes
from tests.oracle import normal
from tests.triton.devices import DTYPES


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("N", "D", "bits"), [(1, 3, 1), (77, 20, 63), (130, 64, 17)])
@pytest.mark.parametrize("centre", [False, True])
def test_codes_equal_the_reference(poisoned, dtype, N, D, bits, centre):
    x = normal(2, 3, N, D).to(dtype).transpose(1, 2).contiguous().transpose(1, 2)
    real = torch.arange(N)[None] < torch.tensor([N, N // 2])[:, None]
    codes = []
    for backend in ("reference", "triton"):
        with sq.use_backend(backend):
            codes.append(hash_codes(x, bits, 1, centre=centre, real=real))
    if not (centre and N == 1 and dtype == torch.float16):  # less itself, a vector is 0 up to rounding
        assert torch.equal(*codes)
