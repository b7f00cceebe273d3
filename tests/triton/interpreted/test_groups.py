import pytest
import torch

from subquad.ops.groups import group_mean
from subquad.ops.triton.groups import CHUNK, group_means, group_order, group_sums
from tests.oracle import integers, normal
from tests.triton.interpreted.fences import fenced


def labels_of(B, H, N, C, seed=0):
    """Labels of which some are C, "in no group", and one group has no member."""
    labels = integers(C + 1, B, H, N, seed=seed)
    return labels.where(labels != C // 2, 0)


def test_order_lists_each_groups_members_in_their_order():
    labels = labels_of(2, 3, 77, 5)
    order, offsets = group_order(labels, 5)
    for b in range(2):
        for h in range(3):
            for c in range(5):
                members = order[b, h, offsets[b, h, c] : offsets[b, h, c + 1]]
                assert members.tolist() == (labels[b, h] == c).nonzero().flatten().tolist()


@pytest.mark.parametrize("bad", [-7, 2**40])
def test_labels_that_are_no_groups_are_in_none(bad):
    labels = torch.tensor([[[1, bad, 0, 1]]])
    order, offsets = group_order(labels, 2)
    assert order[0, 0, offsets[0, 0, 0] : offsets[0, 0, 2]].tolist() == [2, 0, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("N", "C", "D"), [(1, 1, 3), (77, 5, 20), (3, 7, 64)])
def test_means_equal_the_reference(poisoned, dtype, N, C, D):
    x = fenced(normal(2, N, 3, D).to(dtype)).transpose(1, 2)
    labels = labels_of(2, 3, N, C)
    torch.testing.assert_close(group_means(x, *group_order(labels, C)), group_mean(x.float(), labels, C))


def test_a_group_of_several_chunks():
    N = 2 * CHUNK + 3
    x, labels = normal(1, 1, N, 4), torch.zeros(1, 1, N, dtype=torch.int64)
    labels[..., 5] = 1
    sums = group_sums(fenced(x), *group_order(labels, 3))
    torch.testing.assert_close(sums[0, 0, 0], x[0, 0].sum(0) - x[0, 0, 5])
    assert torch.equal(sums[0, 0, 1], x[0, 0, 5])
    assert not sums[0, 0, 2].any()


def test_without_tokens_all_groups_are_empty(poisoned):
    x = torch.zeros(2, 1, 0, 4)
    assert torch.equal(group_means(x, *group_order(torch.zeros(2, 1, 0).long(), 3)), torch.zeros(2, 1, 3, 4))


def test_nan_stays_in_its_group():
    x, labels = normal(1, 2, 30, 4), labels_of(1, 2, 30, 4)
    token = int((labels[0, 1] == 1).nonzero()[0])
    x[0, 1, token] = torch.nan
    means = group_means(x, *group_order(labels, 4))
    assert means[0, 1, 1].isnan().all()
    means[0, 1, 1] = 0
    assert means.isfinite().all()
