"""Chunks of a sorted order."""

import pytest
import torch

from subquad import Mask
from subquad.kernels.selection.sorted_chunks import even_chunks, even_shared_chunks, runs_of_labels, sort_valid
from subquad.testing.oracle import normal


def chunks(cut, n: int, count: int, N: int = 12, size: int = 12) -> list[list[int]]:
    order = torch.arange(N).expand(1, 1, N)
    slots = cut(order, torch.tensor([n]), torch.tensor([count]), most=6, size=size)
    assert slots.shape == (1, 1, 6, size)
    return [[int(t) for t in chunk if t < N] for chunk in slots[0, 0]]


def test_padding_comes_last_whatever_it_holds():
    scores = torch.tensor([[[3.0, -9.0, 1.0, 2.0, -torch.inf]]])
    valid = torch.tensor([[True, False, True, True, False]])
    assert sort_valid(scores, valid)[0, 0, :3].tolist() == [2, 3, 0]
    assert sort_valid(scores, None)[0, 0].tolist() == [4, 1, 2, 3, 0]


def test_equal_scores_keep_their_order():
    assert sort_valid(torch.zeros(1, 1, 50), None)[0, 0].tolist() == list(range(50))


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


def met_in_runs(labels: list[int], groups: int, size: int) -> torch.Tensor:
    """The matrix of which token meets which, by the rule itself."""
    order = sorted((label, token) for token, label in enumerate(labels) if label < groups)
    chunk = {token: rank // size for rank, (_, token) in enumerate(order)}
    met = torch.zeros(len(labels), len(labels))
    for i in chunk:
        for j in chunk:
            met[i, j] = labels[i] == labels[j] and chunk[j] in (chunk[i], chunk[i] - 1)
    return met


@pytest.mark.parametrize("seed", range(30))
def test_runs_meet_their_label_in_two_chunks(seed):
    generator = torch.Generator().manual_seed(seed)
    N, groups, size = (int(torch.randint(1, most, (), generator=generator)) for most in (30, 7, 9))
    labels = torch.randint(0, groups + 1, (2, 2, N), generator=generator)  # `groups` is in none
    met = runs_of_labels(labels, groups, size).multiplicity(N, N, Mask())
    for item, head in ((0, 0), (1, 1)):
        assert torch.equal(met[item, head], met_in_runs(labels[item, head].tolist(), groups, size))


def test_runs_do_not_wrap_around():
    met = runs_of_labels(torch.zeros(1, 1, 12, dtype=torch.int64), 1, 4).multiplicity(12, 12, Mask())[0, 0]
    assert met[0].nonzero()[:, 0].tolist() == [0, 1, 2, 3]
    assert met[11].nonzero()[:, 0].tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
