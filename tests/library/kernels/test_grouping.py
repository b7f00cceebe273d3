import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subquad.kernels.selection.blocks.reference import sort_into_blocks
from subquad.kernels.selection.group_means import broadcast, group_mean, group_sizes
from subquad.testing.oracle import normal


@st.composite
def labellings(draw) -> tuple[torch.Tensor, int]:
    """Labels (2,2,N) in [0, groups], where `groups` itself is "in no group"; many groups stay empty."""
    N, groups = draw(st.integers(1, 30)), draw(st.integers(1, 8))
    used = draw(st.lists(st.integers(0, groups), min_size=1, max_size=groups + 1))
    flat = draw(st.lists(st.sampled_from(used), min_size=4 * N, max_size=4 * N))
    return torch.tensor(flat).view(2, 2, N), groups


def rows(labels: torch.Tensor) -> list[tuple[int, int]]:
    return [(b, h) for b in range(labels.shape[0]) for h in range(labels.shape[1])]


@given(labellings())
@settings(deadline=None)
def test_means_and_sizes_equal_loops(case):
    labels, groups = case
    x = normal(*labels.shape, 3)
    mean, size = group_mean(x, labels, groups), group_sizes(labels, groups)
    for b, h in rows(labels):
        for c in range(groups):
            members = x[b, h][labels[b, h] == c]
            assert size[b, h, c] == len(members)
            torch.testing.assert_close(mean[b, h, c], members.mean(0) if len(members) else torch.zeros(3))


@given(labellings())
@settings(deadline=None)
def test_broadcast_equals_loops(case):
    labels, groups = case
    table = normal(2, 2, groups, 3)
    out = broadcast(table, labels)
    for b, h in rows(labels):
        for i, label in enumerate(labels[b, h].tolist()):
            assert torch.equal(out[b, h, i], table[b, h, label] if label < groups else torch.zeros(3))


@given(labellings(), st.integers(1, 9))
@settings(deadline=None)
def test_scatter_undoes_gather(case, size):
    labels, groups = case
    x = normal(*labels.shape, 3)
    blocks = sort_into_blocks(labels, groups, size)
    wanted = torch.where((labels < groups)[..., None], x, 0.0)
    assert torch.equal(blocks.scatter(blocks.gather(x)), wanted)


@given(labellings(), st.integers(1, 9))
@settings(deadline=None)
def test_every_block_holds_one_group(case, size):
    labels, groups = case
    blocks = sort_into_blocks(labels, groups, size)
    ones = blocks.gather(torch.ones(*labels.shape, 1)).bool()  # which slots are taken
    held = blocks.gather(labels[..., None].float())
    assert torch.equal(held[ones], blocks.group[..., None, None].expand_as(ones)[ones].float())


@given(labellings(), st.integers(1, 9))
@settings(deadline=None)
def test_no_two_tokens_share_a_slot_and_order_is_kept(case, size):
    labels, groups = case
    blocks = sort_into_blocks(labels, groups, size)
    assert blocks.group.shape[2] == -(-labels.shape[2] // size) + groups
    for b, h in rows(labels):
        slots = blocks.slot[b, h][labels[b, h] < groups]
        assert len(slots.unique()) == len(slots)
        for c in range(groups):
            assert torch.equal(blocks.slot[b, h][labels[b, h] == c], blocks.slot[b, h][labels[b, h] == c].sort().values)


def test_of_group_reads_the_rows_of_each_blocks_group():
    labels = torch.tensor([2, 0, 2, 2]).view(1, 1, 4)
    blocks = sort_into_blocks(labels, 3, size=2)
    table = torch.arange(3.0).view(1, 1, 3, 1, 1)
    assert blocks.group.tolist() == [[[0, 2, 2, 2, 2]]]
    assert blocks.of_group(table).flatten().tolist() == [0, 2, 2, 2, 2]
    assert blocks.slot.tolist() == [[[2, 0, 3, 4]]]


def test_gradients_flow_to_members_only():
    x = normal(1, 1, 3, 2).requires_grad_()
    group_mean(x, torch.tensor([[[0, 0, 1]]]), 1).sum().backward()
    assert x.grad[0, 0].tolist() == [[0.5, 0.5], [0.5, 0.5], [0, 0]]
