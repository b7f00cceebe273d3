import pytest
import torch

import subquad as sq
from subquad.kernels.selection.cells.op import key_cells
from subquad.kernels.selection.clusters.op import query_clusters
from subquad.kernels.selection.clusters.reference import nearest_mean
from subquad.kernels.selection.clusters.triton import move
from subquad.kernels.selection.kmeans.triton import KMeansItems
from subquad.kernels.triton.moments import moments
from subquad.testing.oracle import normal
from tests.library.triton.devices import DTYPES
from tests.library.triton.interpreted.fences import fenced

HOW = {"clusters": 7, "bits": 63, "iterations": 1, "refine": 1, "seed": 3}
SPACES = pytest.mark.parametrize("space", ["logits", "queries"])


def vectors(N, heads, D, seed, dtype=torch.float32):
    return fenced(normal(2, N, heads, D, seed=seed).to(dtype)).transpose(1, 2)


def valid_of(N, lengths):
    return fenced(torch.arange(N) < torch.tensor(lengths)[:, None])


def on(backend, op, *args, **how):
    with sq.use_backend(backend):
        return op(*args, **how)


def assert_alike(op, *args, **how):
    """Equal labels, for inputs whose rounding turns no bit of a hash."""
    assert torch.equal(*(on(backend, op, *args, **how) for backend in ("triton", "reference")))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@SPACES
def test_clusters_equal_the_reference(poisoned, dtype, space):
    q, k = vectors(71, 2, 20, 0, dtype), vectors(53, 1, 20, 1, dtype)
    assert_alike(query_clusters, q[:1], k[:1], None, None, space=space, **(HOW | {"refine": 2}))
    assert_alike(query_clusters, q, k, valid_of(71, [71, 5]), valid_of(53, [9, 53]), space=space, **HOW)


@SPACES
def test_each_item_has_its_own_number_of_clusters(poisoned, space):
    q, k, counts = vectors(40, 1, 8, 0), vectors(30, 1, 8, 1), torch.tensor([7, 3])
    assert_alike(query_clusters, q, k, valid_of(40, [40, 33]), None, space=space, counts=counts, **HOW)


@pytest.mark.parametrize(("N", "M"), [(1, 1), (5, 1), (9, 3)])
def test_few_tokens(poisoned, N, M):
    assert_alike(query_clusters, vectors(N, 1, 3, 0), vectors(M, 1, 3, 1), None, None, space="logits", **HOW)
    assert_alike(key_cells, vectors(N, 1, 3, 0), vectors(N, 1, 3, 1), None, cells=4, seed=1)


def test_a_query_goes_to_the_nearest_mean(poisoned):
    x = vectors(100, 1, 40, 0)
    labels = torch.arange(100).expand(2, 1, -1) % 70
    labels = labels.where(labels != 3, 4).contiguous()  # cluster 3 is empty
    have = labels.clone()
    move(have, x, moments(x, None), None, KMeansItems(70, None))
    assert torch.equal(have, nearest_mean(x - x.mean(2, keepdim=True), labels, 70))


def test_the_lowest_of_equally_near_means_wins():
    x = torch.zeros(1, 1, 80, 4)
    labels = torch.arange(80).expand(1, 1, -1) % 70 + 2
    labels = labels.contiguous()
    move(labels, x, moments(x, None), None, KMeansItems(72, None))
    assert (labels == 2).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cells_equal_the_reference(poisoned, dtype):
    k, v = vectors(71, 1, 20, 0, dtype), vectors(71, 1, 35, 1, dtype) * 3 + 5
    assert_alike(key_cells, k, v, None, cells=5, seed=1)
    assert_alike(key_cells, k, v, valid_of(71, [71, 4]), cells=5, seed=1)


def test_vectors_that_are_all_equal():
    k = torch.ones(2, 1, 20, 6)
    assert_alike(key_cells, k, k, None, cells=3, seed=1)
    assert_alike(query_clusters, k, k, None, None, space="logits", **HOW)


def test_padding_may_hold_nan():
    q, k, valid = vectors(20, 1, 8, 0), vectors(20, 1, 8, 1), valid_of(20, [20, 13])
    want = on("triton", query_clusters, q, k, valid, valid, space="logits", **HOW)
    cells = on("triton", key_cells, k, q, valid, cells=4, seed=1)
    for x in (q, k):
        x.masked_fill_(~valid[:, None, :, None], torch.nan)
    assert torch.equal(on("triton", query_clusters, q, k, valid, valid, space="logits", **HOW), want)
    assert torch.equal(on("triton", key_cells, k, q, valid, cells=4, seed=1), cells)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite_change_no_other_head(poison):
    q, k = vectors(20, 2, 8, 0), vectors(16, 2, 8, 1)
    want = on("triton", query_clusters, q, k, None, None, space="logits", **HOW)
    for x in (q, k):
        x[1, 0, 4, 2] = poison
        have = on("triton", query_clusters, q, k, None, None, space="logits", **HOW)
        assert torch.equal(have[[0, 0, 1], [0, 1, 1]], want[[0, 0, 1], [0, 1, 1]])
        assert ((have[1, 0] >= 0) & (have[1, 0] < HOW["clusters"])).all()
