"""Slices whose rows begin at addresses that torch's kernels for GPUs cannot read."""

import pytest
import torch

from subquad.kernels.transforms import aligned

WIDE = torch.arange(2 * 3 * 5 * 24.0).view(2, 3, 5, 24)


@pytest.mark.parametrize(
    "slice_",
    [WIDE[..., 1:9], WIDE[..., :11].contiguous()[..., :8], WIDE.half()[..., 4:12]],
    ids=["a start between", "rows between", "16 bits"],
)
def test_a_misaligned_slice_is_copied(slice_):
    copied = aligned(slice_)
    assert torch.equal(copied, slice_)
    assert copied.is_contiguous()


@pytest.mark.parametrize(
    "tensor",
    [WIDE, WIDE[..., 4:12], WIDE[..., 16:], WIDE.transpose(1, 2), WIDE[..., 1:12], WIDE[:1, :1].expand(2, 3, 5, 24)],
    ids=["whole", "slice", "end", "heads last", "a width between", "expanded"],
)
def test_others_stay_as_they_are(tensor):
    assert aligned(tensor) is tensor
