import pytest
import torch

import subquad as sq
from subquad.kernels.selection.hashing.op import hash_codes
from subquad.kernels.selection.hashing.triton import Projected, sign_hash
from subquad.kernels.selection.shards.reference import words_of
from subquad.testing.oracle import normal
from tests.library.triton.devices import DTYPES


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("N", "D", "bits"), [(1, 3, 1), (77, 20, 63), (130, 64, 17)])
@pytest.mark.parametrize("centre", [False, True])
def test_codes_equal_the_reference(poisoned, dtype, N, D, bits, centre):
    x = normal(2, 3, N, D).to(dtype).transpose(1, 2).contiguous().transpose(1, 2)
    valid = torch.arange(N)[None] < torch.tensor([N, N // 2])[:, None]
    codes = []
    for backend in ("reference", "triton"):
        with sq.use_backend(backend):
            codes.append(hash_codes(x, bits, 1, centre=centre, valid=valid))
    if not (centre and N == 1 and dtype == torch.float16):  # less itself, a vector is 0 up to rounding
        assert torch.equal(*codes)


@pytest.mark.parametrize(("B", "G"), [(1, 1), (2, 1), (1, 3), (2, 3)])
def test_planes_are_those_of_each_item_and_key_head(poisoned, B, G):
    x, planes = normal(B, 2 * G, 20, 8), normal(B, G, 7, 8, seed=1)
    # The stride of an axis of length 1 may be anything.
    planes = planes.as_strided(planes.shape, (G * 56, 56 if G > 1 else 1, 8, 1))
    codes = torch.empty(B, 2 * G, 20, dtype=torch.int64, device=x.device)
    sign_hash(codes, None, Projected(x, planes, None))
    assert torch.equal(codes, words_of(x @ planes.repeat_interleave(2, dim=1).mT > 0))
