"""A sequence on one rank, which needs no other processes."""

import pytest
import torch

import subquad as sq
from subquad.parallel.heads import key_heads
from subquad.parallel.sequence import even_shares
from tests.oracle import normal, qkv


def test_without_a_group_the_remedy_is_said():
    with pytest.raises(RuntimeError, match="start the processes by torchrun"):
        sq.parallel.Sequence([4])


@pytest.mark.parametrize(
    ("lengths", "how", "message"),
    [
        ([3, 4], {}, r"the group has 1 ranks, and each has at least 1 token: give 1 numbers"),
        ([0], {}, "each has at least 1 token"),
        ([2.0], {}, "each has at least 1 token"),
        ([5], {"keys": [1, 2]}, r"keys=\(1, 2\)"),
        ([5], {"mode": "ring"}, "mode='ring', but it must be one of 'auto', 'summary', 'heads'"),
    ],
)
def test_a_split_that_does_not_fit_is_refused(alone: None, lengths: list, how: dict, message: str):
    with pytest.raises(ValueError, match=message):
        sq.parallel.Sequence(lengths, **how)


@pytest.mark.parametrize("mode", ["auto", "heads"])
@pytest.mark.parametrize("method", ["linear", "local:window=3", "i-clustered:clusters=4,topk=3"])
def test_one_rank_has_all(alone: None, method: str, mode: str):
    q, k, v = qkv(21)
    of = sq.parallel.Sequence.even(21, mode=mode)
    want = sq.attention(q, k, v, method=method, mask=sq.Mask.padding([21, 9]))
    have = sq.attention(q, k, v, method=method, mask=sq.Mask.padding([21, 9]), parallel=of)
    torch.testing.assert_close(have, want, atol=1e-5, rtol=1e-5)
    assert torch.equal(of.unshard(of.shard(q, dim=2), dim=2), q)


def test_what_does_not_go_with_it_is_refused(alone: None):
    q, k, v = qkv(21)
    of = sq.parallel.Sequence.even(21)
    for how, message in (
        ({"bias": normal(1, 1, 21, 21)}, "`bias`"),
        ({"keep": [0]}, "`keep`"),
        ({"dropout_p": 0.1}, "dropout"),
        ({"mask": sq.Mask.causal(offset=3)}, "an offset"),
        ({"mask": sq.Mask.dense(torch.ones(1, 1, 21, 21).bool())}, "a dense mask"),
    ):
        with pytest.raises(ValueError, match=f"`parallel` does not go with .*{message}"):
            sq.attention(q, k, v, method="full", parallel=of, **how)
    with pytest.raises(ValueError, match="`query` has 21 positions on rank 0, but its share of the sequence is 20"):
        sq.attention(q, k, v, method="linear", parallel=sq.parallel.Sequence([20]))
    with pytest.raises(TypeError, match=r"`parallel` is a int, but it must be a sq\.parallel\.Sequence"):
        sq.attention(q, k, v, method="linear", parallel=3)
    with pytest.raises(ValueError, match="axis 1 has 2 positions, but the sequence has 21 tokens"):
        of.shard(q)


def test_shares_are_as_even_as_can_be():
    assert even_shares(11, 4) == (3, 3, 3, 2)
    assert even_shares(2, 4) == (1, 1, 0, 0)


def test_query_heads_come_with_their_key_heads():
    assert key_heads(slice(0, 4), 2) == [0, 1]
    assert key_heads(slice(1, 4), 2) == [0, 1, 1]  # one of the first's, both of the second's
    assert key_heads(slice(3, 4), 2) == [1]
    assert key_heads(slice(4, 4), 2) == []
