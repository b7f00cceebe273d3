import pytest
import torch

from subquad import Mask
from subquad.kernels.tokens.packing import take_apart
from subquad.testing.oracle import naive, normal, qkv


def per_segment(attend, query, key, value, mask):
    """Run `attend` on every segment as if it were a batch item of its own."""
    (q, k, v), inner, together = take_apart((query, key, value), mask)
    return together(attend(q, k, v, inner))


def attend(q, k, v, mask):
    return naive(q, k, v, mask.to_dense(q.shape[2], k.shape[2]))


def test_equals_a_dense_mask():
    q, k, v = qkv()
    for ids in (torch.arange(24).expand(2, 24) // 5 - 1, (normal(2, 24) * 2).long()):
        mask = Mask.segments(ids)
        torch.testing.assert_close(per_segment(attend, q, k, v, mask), naive(q, k, v, mask.to_dense(24, 24)))


def test_two_segmentations_together():
    q, k, v = qkv()
    both = Mask.segments(torch.arange(24).expand(2, 24) // 7) & Mask.segments(torch.arange(24).expand(2, 24) % 3 - 1)
    torch.testing.assert_close(per_segment(attend, q, k, v, both), naive(q, k, v, both.to_dense(24, 24)))


def test_with_padding_of_each_side():
    q, k, v = qkv()
    mask = Mask.segments(torch.arange(24).expand(2, 24) // 7) & Mask.padding(keys=[20, 9], queries=[3, 24])
    torch.testing.assert_close(per_segment(attend, q, k, v, mask), naive(q, k, v, mask.to_dense(24, 24)))


def test_each_segment_is_an_item_of_its_own():
    seen = []

    def spy(q, k, v, mask):
        seen.append((tuple(q.shape), mask.key_padding(q.shape[2]).sum(1).tolist()))
        return v

    q, k, v = qkv(6, B=1)
    out = per_segment(spy, q, k, v, Mask.segments(torch.tensor([[4, 1, 4, -1, 4, 1]])))
    assert seen == [((2, 2, 3, 8), [2, 3])]
    assert torch.equal(out[0, :, [0, 1, 2, 4, 5]], v[0, :, [0, 1, 2, 4, 5]])
    assert (out[0, :, 3] == 0).all()


def test_huge_ids():
    q, k, v = qkv(4, B=1)
    far, near = torch.tensor([[0, 10**12, 0, 10**12]]), torch.tensor([[0, 1, 0, 1]])
    assert torch.equal(*(per_segment(attend, q, k, v, Mask.segments(ids)) for ids in (far, near)))


def test_two_segmentations_of_ids_whose_products_overflow():
    q, k, v = qkv()
    each, pairs = torch.arange(24).expand(2, 24), torch.arange(24).expand(2, 24) // 2
    sixteen, last = each // 12 * 16, each // 23 * 15
    for one, other, dtype in (
        (each, pairs, torch.int8),
        (each, pairs, torch.uint8),
        (sixteen, last, torch.uint8),
        (each // 12 * 50_000, each // 7 * 60_000, torch.int32),
        (each // 12 * 5 * 10**9, each // 7 * 6 * 10**9, torch.int64),
    ):
        both = Mask.segments(one.to(dtype)) & Mask.segments(other.to(dtype))
        torch.testing.assert_close(per_segment(attend, q, k, v, both), naive(q, k, v, both.to_dense(24, 24)))


@pytest.mark.parametrize("offset", [2, torch.tensor(2), torch.tensor([3, 0])], ids=str)
@pytest.mark.parametrize("more", [Mask(), Mask.window(3), Mask.padding(keys=[20, 9])], ids=str)
def test_the_offset_of_a_causal_mask_is_that_of_each_segment(offset, more):
    q, k, v = qkv()
    ids = torch.stack([torch.arange(24) // 7, torch.arange(24) // 10 - 1])
    mask = Mask.segments(ids) & Mask.causal(offset) & more
    torch.testing.assert_close(per_segment(attend, q, k, v, mask), naive(q, k, v, mask.to_dense(24, 24)))


@pytest.mark.parametrize("offset", [2, torch.tensor([0, 2])], ids=str)
def test_an_offset_with_other_tokens_inside_a_segment_is_refused(offset):
    ids, (q, k, v) = torch.arange(24).expand(2, 24) % 3, qkv()
    with pytest.raises(ValueError, match=r"offset of 2 .* other tokens are between those of one segment"):
        take_apart((q, k, v), Mask.segments(ids) & Mask.causal(offset))
    mask = Mask.segments(ids) & Mask.causal(torch.tensor([0, 0]))
    torch.testing.assert_close(per_segment(attend, q, k, v, mask), naive(q, k, v, mask.to_dense(24, 24)))
