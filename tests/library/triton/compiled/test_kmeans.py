import torch

from subquad.kernels.selection.kmeans.op import hamming_kmeans
from tests.library.triton.compiled.fits import assert_fits, meta


def test_kmeans():
    codes, valid = meta(1, 32, 4096, dtype=torch.int64), meta(1, 4096, dtype=torch.bool)
    for padding in (None, valid):
        assert len(assert_fits(lambda: hamming_kmeans(codes, padding, 100, 63, 10))) == 11  # noqa: B023


def test_votes_of_long_inputs_stay_small():
    codes = meta(1, 32, 2**16, dtype=torch.int64)
    *_, votes, _, _ = assert_fits(lambda: hamming_kmeans(codes, None, 256, 63, 1))
    assert votes.name == "votes_of_members"
    assert votes.grid == (4, 32, 4)
