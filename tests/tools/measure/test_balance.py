"""Sizes of buckets that nothing balances."""

import math

import pytest
import torch

import subquad as sq
from subquad.tools.measure.balance import BucketSizes, bucket_sizes
from tests.tools.measure.test_utility import inputs, linear_hash


def sizes(queries, keys):
    return BucketSizes(*(torch.tensor(x)[None, None] for x in (queries, keys, [True] * len(keys))))


def test_tokens_are_counted_where_they_score_highest():
    q = torch.tensor([[[[9.0, 0.0], [8.0, 1.0], [0.0, 1.0]]]])
    k = torch.tensor([[[[0.0, 9.0], [1.0, 8.0], [0.0, 1.0]]]])
    found = bucket_sizes(linear_hash(2), q, k)
    assert found.queries.tolist() == [[[2, 1]]]
    assert found.keys.tolist() == [[[0, 3]]]
    assert found.total.tolist() == [[[2, 4]]]
    assert found.expected.tolist() == [[[3.0]]]
    assert found.ratios.tolist() == [[[math.inf, 1 / 3]]]


def test_padding_is_not_counted():
    q, k = inputs(2, 2, 20, 4)
    found = bucket_sizes(linear_hash(4, heads=2), q, k, mask=sq.Mask.padding([20, 6]))
    alone = bucket_sizes(linear_hash(4, heads=2), q[1:, :, :6], k[1:, :, :6])
    assert found.queries.sum(-1).tolist() == [[20, 20], [6, 6]]
    assert found.keys[1:].equal(alone.keys)
    assert found.expected[:, 0, 0].tolist() == [10.0, 3.0]


def test_buckets_that_a_shorter_item_has_not_are_not_counted():
    q, k = inputs(2, 2, 32, 4)
    mask = sq.Mask.padding([32, 8])
    found = bucket_sizes(sq.RandomHash(buckets=0, bucket_size=8), q, k, mask=mask)
    alone = bucket_sizes(sq.RandomHash(buckets=0, bucket_size=8), q[1:, :, :8], k[1:, :, :8])
    assert found.exists.sum(-1).tolist() == [[4, 4], [1, 1]]
    assert found.expected[1].equal(alone.expected[0])


def test_both_denominators():
    # E = 2·16/4 = 8. Sizes 22, 8, 2 and 0: the first, third and fourth are off. Ratios 10, 1, ∞ and none.
    found = sizes([10, 4, 2, 0], [12, 4, 0, 0]).imbalance()
    assert (found.size, found.size_of_filled) == (3 / 4, 2 / 3)
    assert (found.ratio, found.ratio_of_both) == (1 / 4, 0.0)
    found = sizes([9, 1, 2, 2], [4, 1, 4, 4]).imbalance()
    assert (found.ratio, found.ratio_of_both) == (1 / 4, 1 / 4)  # exactly 1/2 is balanced


def test_the_borders_are_balanced():
    # E = 8: exactly 2E and E/2 are within
    assert sizes([8, 2, 3, 3], [8, 2, 3, 3]).imbalance().size == 0.0


def test_nothing_to_take_a_share_of_is_not_a_number():
    assert math.isnan(sizes([3, 0], [0, 3]).imbalance().ratio_of_both)


def test_a_method_that_hashes_no_tokens_says_so():
    with pytest.raises(ValueError, match="'clustered' does not hash tokens by themselves"):
        bucket_sizes(sq.Clustered(), *inputs(1, 1, 4, 4))
