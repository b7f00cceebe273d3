"""Segments of real tokens: their sizes, and means by either way of summing."""

import pytest
import torch

from subquad.kernels.tokens.pools import pool_means, pool_of
from subquad.kernels.tokens.positions import ranks
from subquad.testing.oracle import gradients, normal, tracked


@pytest.mark.parametrize(("tokens", "segments"), [(1, 1), (7, 3), (12, 4), (3, 5), (100, 7), (64, 64)])
def test_segments_are_in_order_and_differ_by_one_token_at_most(tokens: int, segments: int):
    labels = pool_of(torch.arange(tokens), tokens, segments)
    sizes = labels.bincount(minlength=segments)
    assert (labels.diff() >= 0).all()
    used = sizes if tokens >= segments else sizes[:tokens]
    assert used.max() - used.min() <= 1
    assert used.min() >= 1


def test_ranks_count_the_real_tokens_before():
    valid = torch.tensor([[False, True, False, True, True]])
    assert ranks(valid, 5, valid.device).tolist() == [[0, 0, 1, 1, 2]]
    assert ranks(None, 3, valid.device).tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("tokens", [1, 4, 13, 20])
def test_one_row_of_labels_equals_a_row_for_each_item_forward_and_backward(tokens: int):
    (x,) = tracked(normal(3, 2, 20, 4, dtype=torch.float64))
    labels = torch.full((1, 20), 6)
    labels[0, 3 : 3 + tokens] = pool_of(torch.arange(20), tokens, 6)[: 20 - 3][:tokens]
    means, sizes = pool_means(x, labels, 6)
    wanted, many = pool_means(x, labels.expand(3, -1), 6)
    torch.testing.assert_close(means, wanted)
    torch.testing.assert_close(gradients(means, x), gradients(wanted, x))
    assert torch.equal(sizes.expand(3, -1), many)
    for segment in range(6):
        mine = x[:, :, labels[0] == segment]
        torch.testing.assert_close(means[:, :, segment], mine.mean(2) if mine.shape[2] else 0 * means[:, :, segment])
