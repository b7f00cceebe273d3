"""Chunks of a sorted order."""

import pytest
import torch

from subquad.ops.chunks import even_chunks, even_shared_chunks, sort_real
from tests.oracle import normal


def chunks(cut, n: int, count: int, N: int = 12, size: int = 12) -> list[list[int]]:
    order = torch.arange(N).expand(1, 1, N)
    slots = cut(order, torch.tensor([n]), torch.tensor([count]), most=6, size=size)
    assert slots.shape == (1, 1, 6, size)
    return [[int(t) for t in chunk if t < N] for chunk in slots[0, 0]]


def test_padding_comes_last_whatever_it_holds():
    scores = torch.tensor([[[3.0, -9.0, 1.0, 2.0, -torch.inf]]])
    real = torch.tensor([[True, False, True, True, False]])
    assert sort_real(scores, real)[0, 0, :3].tolist() == [2, 3, 0]
    assert sort_real(scores, None)[0, 0].tolist() == [4, 1, 2, 3, 0]


def test_equal_scores_keep_their_order():
    assert sort_real(torch.zeros(1, 1, 50), None)[0, 0].tolist() == list(range(50))


@pytest.mark.parametrize("cut", [even_chunks, even_shared_chunks])
@pytest.mark.parametrize(("n", "count"), [(12, 4), (11, 4), (7, 6), (5, 1), (12, 6), (6, 6)])
def test_chunks_are_a_partition_into_equal_parts(cut, n, count):
    parts = chunks(cut, n, count, size=-(-n // count))
    assert [token for part in parts for token in part] == list(range(n))
    assert {len(part) for part in parts[:count]} <= {n // count, -(-n // count)}
    assert not any(parts[count:])


def test_few_tokens_leave_chunks_empty_or_are_shared():
    assert chunks(even_chunks, 2, 4) == [[0], [], [1], [], [], []]
    assert chunks(even_shared_chunks, 2, 4) == [[0], [1], [1], [1], [], []]
    assert chunks(even_shared_chunks, 0, 4) == [[]] * 6


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_no_query_is_without_keys(n):
    for m in (1, 2, 3, 9):
        queries, keys = chunks(even_chunks, n, 5), chunks(even_shared_chunks, m, 5)
        assert sum(map(len, queries)) == n
        assert all(keys[c] for c, chunk in enumerate(queries) if chunk)


def test_items_are_cut_by_their_own_lengths():
    order = normal(2, 3, 12, seed=1).argsort(-1)
    both = even_chunks(order, torch.tensor([12, 5]), torch.tensor([4, 2]), most=4, size=3)
    alone = even_chunks(order[1:], torch.tensor([5]), torch.tensor([2]), most=4, size=3)
    assert torch.equal(both[1:], alone)
