"""Centroids that follow what passes by."""

import torch
import torch.nn.functional as F

from subquad.kernels.selection.spherical import Centroids
from subquad.testing.oracle import normal


def test_they_start_as_unit_vectors_of_the_seed_and_a_head_keeps_its_own():
    few, many = (Centroids(heads, 8, 4, seed=1).centroids for heads in (2, 3))
    assert torch.equal(many[:2], few)
    torch.testing.assert_close(many.norm(dim=-1), torch.ones(3, 4))
    assert not torch.equal(Centroids(2, 8, 4, seed=2).centroids, few)


def test_scores_are_cosines():
    centroids, x = Centroids(2, 8, 4, seed=1), normal(3, 2, 10, 8)
    torch.testing.assert_close(centroids(x), centroids(5 * x))
    wanted = F.cosine_similarity(x[:, :, :, None], centroids.centroids[None, :, None], dim=-1)
    torch.testing.assert_close(centroids(x), wanted)


def test_each_moves_a_thousandth_towards_its_own_and_stays_where_it_has_none():
    centroids, x = Centroids(1, 2, 3, seed=0), torch.tensor([[0.1, 3.0], [-0.2, 1.0], [2.0, 0.1]])
    start = torch.tensor([[0.0, 1.0], [1.0, 0.0], [-0.6, -0.8]])
    centroids.centroids.copy_(start)
    centroids.follow(x[None, None], None)
    up = F.normalize(F.normalize(x[0], dim=0) + F.normalize(x[1], dim=0), dim=0)
    wanted = [
        F.normalize(0.999 * s + 0.001 * to, dim=0)
        for s, to in zip(start[:2], (up, F.normalize(x[2], dim=0)), strict=True)
    ]
    torch.testing.assert_close(centroids.centroids[0, :2], torch.stack(wanted), atol=1e-7, rtol=0)
    assert torch.equal(centroids.centroids[0, 2], start[2])


def test_padding_moves_nothing():
    x, valid = normal(2, 2, 10, 8), torch.arange(10) < torch.tensor([10, 4])[:, None]
    padded = x.masked_fill(~valid[:, None, :, None], torch.inf)
    batch, apart = Centroids(2, 8, 3, seed=1), Centroids(2, 8, 3, seed=1)
    batch.follow(padded, valid)
    apart.follow(torch.cat([x[:1], x[1:, :, :4]], dim=2), None)
    torch.testing.assert_close(batch.centroids, apart.centroids)


def test_nothing_real_leaves_them_where_they_are():
    centroids, before = Centroids(2, 8, 3, seed=1), Centroids(2, 8, 3, seed=1)
    centroids.follow(normal(1, 2, 5, 8), torch.zeros(1, 5, dtype=torch.bool))
    assert torch.equal(centroids.centroids, before.centroids)


def test_they_find_the_clusters_of_what_passes_by():
    centres = F.normalize(normal(1, 2, 3, 8, seed=5), dim=-1)
    centroids = Centroids(2, 8, 3, seed=1)
    centroids.centroids.copy_(F.normalize(centres[0] + 0.5 * normal(2, 3, 8, seed=6), dim=-1))
    before = F.cosine_similarity(centroids.centroids, centres[0], dim=-1)
    for step in range(4000):
        noise = 0.1 * normal(2, 2, 30, 8, seed=step)
        centroids.follow(centres.repeat_interleave(10, dim=2) + noise, None)
    after = F.cosine_similarity(centroids.centroids, centres[0], dim=-1)
    assert before.min() < 0.9
    assert after.min() > 0.97
