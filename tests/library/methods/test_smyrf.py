"""Tests of SMYRF: the asymmetric transformation, equal clusters, keys with more than their share of attention."""

import torch

import subquad as sq
from subquad import Mask, Smyrf
from subquad.kernels.tokens.positions import ValidPositions
from subquad.kernels.tokens.slots import Buckets
from subquad.methods.smyrf import asymmetric
from subquad.testing.oracle import normal, qkv


def meetings(method: Smyrf, q: torch.Tensor, k: torch.Tensor, mask: Mask | None = None) -> Buckets:
    (buckets,) = method.meetings(q, k, method.prepare(q, k, k, mask=mask)[3])
    return buckets


def test_distances_after_the_transformation_fall_with_the_product():
    q, k, _ = qkv(9, 14, dtype=torch.float64)
    f, g = asymmetric(q, 3 * k, ValidPositions.from_mask(Mask(), q, k))
    squares = q.square().sum(-1).amax(-1) + (3 * k).square().sum(-1).amax(-1)
    torch.testing.assert_close(torch.cdist(f, g) ** 2, 2 * squares[..., None, None] - 2 * q @ (3 * k).mT)


def test_all_transformed_vectors_are_equally_long():
    q, k, _ = qkv(9, 14, dtype=torch.float64)
    for x in asymmetric(q, 3 * k, ValidPositions.from_mask(Mask(), q, k)):
        norms = x.norm(dim=-1)
        torch.testing.assert_close(norms, norms[..., :1].expand_as(norms))


def test_the_longest_vectors_are_sought_in_each_item_and_head_without_padding():
    q, k, _ = qkv(9, dtype=torch.float64)
    q[0, 0, 8], k[0, 1, 8] = 100.0, 100.0
    valid = torch.arange(9) < torch.tensor([8, 9])[:, None]
    f, g = asymmetric(q, k, ValidPositions.from_mask(Mask.padding(valid), q, k))
    shorter = q[:1, :, :8], k[:1, :, :8]
    f_alone, g_alone = asymmetric(*shorter, ValidPositions.from_mask(Mask(), *shorter))
    torch.testing.assert_close(f[:1, :, :8], f_alone)
    torch.testing.assert_close(g[:1, :, :8], g_alone)
    assert f.isfinite().all()
    assert not torch.allclose(f[:1, 0, :8], asymmetric(q, k, ValidPositions.from_mask(Mask(), q, k))[0][:1, 0, :8])


def test_each_round_partitions_queries_and_keys_into_equal_clusters():
    q, k, _ = qkv(22, 31)
    buckets = meetings(Smyrf(clusters=4, rounds=3), q, k)
    for slots, tokens in ((buckets.queries, 22), (buckets.keys, 31)):
        for one_round in slots.unflatten(2, (3, 4)).unbind(2):
            sizes = (one_round < tokens).sum(-1)
            assert sizes.min() >= tokens // 4
            assert sizes.max() <= -(-tokens // 4)
            assert all(
                sorted(t for t in head.flatten().tolist() if t < tokens) == list(range(tokens))
                for item in one_round
                for head in item
            )


def test_more_rounds_begin_with_the_same_ones_and_find_other_keys():
    q, k, _ = qkv(40)
    one, three = (meetings(Smyrf(clusters=4, rounds=rounds), q, k) for rounds in (1, 3))
    assert torch.equal(three.queries[:, :, :4], one.queries)
    assert torch.equal(three.keys[:, :, :4], one.keys)
    met = [(buckets.multiplicity(40, 40, Mask()) > 0).float().mean() for buckets in (one, three)]
    assert met[0] == 0.25
    assert met[1] > 0.4


def test_a_cluster_size_sets_the_number_of_clusters_from_each_items_own_length():
    q, k, _ = qkv(20)
    buckets = meetings(Smyrf(cluster_size=6, rounds=1), q, k, Mask.padding([20, 7]))
    used = (buckets.queries < 20).any(-1).sum(-1)
    assert used.tolist() == [[4, 4], [2, 2]]


def test_rounds_count_a_key_as_often_as_it_is_met():
    q, k, v = qkv(6)
    torch.testing.assert_close(Smyrf(clusters=1, rounds=3)(q, k, v), sq.attention(q, k, v, method="full"))


def test_keys_of_the_own_cluster_have_more_than_their_share_of_attention():
    q, k = normal(1, 8, 256, 16, seed=1), normal(1, 8, 256, 16, seed=2)
    attention = (q @ k.mT / 2).softmax(-1)
    met = meetings(Smyrf(clusters=4, rounds=1), q, k).multiplicity(256, 256, Mask())
    assert (attention * met).sum(-1).mean() > 0.3  # 0.25 by chance
