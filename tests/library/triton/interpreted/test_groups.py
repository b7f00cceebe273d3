import pytest
import torch

from subquad.kernels.selection.group_means import group_mean
from subquad.kernels.triton.groups import MOST_COUNTED, Members, group_order, group_sums
from subquad.testing.oracle import integers, normal
from tests.library.triton.interpreted.fences import fenced


def labels_of(B, H, N, C, seed=0):
    """Labels of which some are C, "in no group", and one group has no member."""
    labels = integers(C + 1, B, H, N, seed=seed)
    return labels.where(labels != C // 2, 0)


def means_of(x, labels, C):
    means = torch.empty(*x.shape[:2], C, x.shape[3])
    Members.from_labels(labels, C, x).fill_means(means)
    return means


def test_order_lists_each_groups_members_in_their_order():
    labels = labels_of(2, 3, 77, 5)
    order, offsets = group_order(labels, 5)
    for b in range(2):
        for h in range(3):
            for c in range(5):
                members = order[b, h, offsets[b, h, c] : offsets[b, h, c + 1]]
                assert members.tolist() == (labels[b, h] == c).nonzero().flatten().tolist()


def test_many_groups_are_sorted_like_few(poisoned):
    labels, C = labels_of(2, 3, 150, 60), MOST_COUNTED + 1
    spread = labels * (C // 60)
    few, many = group_order(labels, 60), group_order(spread.where(labels < 60, C), C)
    assert torch.equal(many[0], few[0])
    assert torch.equal(many[1][..., :: C // 60][..., :60], few[1][..., :60])
    assert torch.equal(many[1][..., -1], few[1][..., -1])


@pytest.mark.parametrize("C", [2, MOST_COUNTED + 1])
@pytest.mark.parametrize("bad", [-7, 2**40])
def test_labels_that_are_no_groups_are_in_none(bad, C):
    labels = torch.tensor([[[1, bad, 0, 1]]])
    order, offsets = group_order(labels, C)
    assert order[0, 0, offsets[0, 0, 0] : offsets[0, 0, 2]].tolist() == [2, 0, 3]


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.long)], ids=str)
@pytest.mark.parametrize(("N", "C", "D"), [(1, 1, 3), (77, 5, 20), (3, 7, 64)])
def test_means_equal_the_reference(poisoned, dtype, N, C, D):
    x = fenced(normal(2, N, 3, D).to(dtype)).transpose(1, 2)
    labels = labels_of(2, 3, N, C)
    torch.testing.assert_close(means_of(x, labels, C), group_mean(x.float(), labels, C))


@pytest.mark.parametrize("C", [5, 70])
def test_runs_and_tiles_make_no_difference(poisoned, C):
    labels, x = fenced(labels_of(2, 1, 150, C)), fenced(normal(2, 1, 150, 4))
    order, offsets = group_order(labels, C)
    place = torch.empty_like(order)
    Members.from_labels(labels, C, x).fill_order(torch.empty_like(order), torch.empty_like(offsets), place)
    for b in range(2):
        assert order[b, 0].tolist() == labels[b, 0].sort(stable=True).indices.tolist()
        assert offsets[b, 0].tolist() == torch.searchsorted(labels[b, 0].sort().values, torch.arange(C + 1)).tolist()
        assert place[b, 0].tolist() == order[b, 0].argsort().tolist()
    torch.testing.assert_close(means_of(x, labels, C), group_mean(x, labels, C))
    sizes = offsets.diff(dim=-1)[..., None]
    torch.testing.assert_close(group_sums(x, order, offsets), group_mean(x, labels, C) * sizes)


def test_without_tokens_all_groups_are_empty(poisoned):
    x = torch.zeros(2, 1, 0, 4)
    assert torch.equal(means_of(x, torch.zeros(2, 1, 0).long(), 3), torch.zeros(2, 1, 3, 4))


def test_nan_stays_in_its_group():
    x, labels = normal(1, 2, 30, 4), labels_of(1, 2, 30, 4)
    token = int((labels[0, 1] == 1).nonzero()[0])
    x[0, 1, token] = torch.nan
    means = means_of(x, labels, 4)
    assert means[0, 1, 1].isnan().all()
    means[0, 1, 1] = 0
    assert means.isfinite().all()


def test_what_is_in_no_group_may_be_anything():
    x = normal(1, 1, 30, 4)
    labels = labels_of(1, 1, 30, 4)
    want = means_of(x, labels, 4)
    assert torch.equal(means_of(x.masked_fill((labels == 4)[..., None], torch.nan), labels, 4), want)


def test_means_are_rounded_as_the_vectors_are():
    x, labels = normal(1, 1, 30, 4).half(), labels_of(1, 1, 30, 4)
    means = torch.empty(1, 1, 4, 4)
    Members.from_labels(labels, 4, x).fill_means(means, like=x)
    assert torch.equal(means, means_of(x, labels, 4).half().float())
