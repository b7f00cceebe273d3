"""Tests of what routing attention promises: balanced clusters, shared keys, centroids that move in training only."""

import torch

import subquad as sq
from subquad import Mask, Routing
from subquad.testing.oracle import gradients, naive, qkv, tracked


def bound(method: Routing, width: int = 8) -> sq.BoundMethod:
    return method.bind(heads=2, head_dim=width).eval()


def state(layer: sq.BoundMethod) -> torch.Tensor:
    return layer.learned.centroids.clone()


def test_one_cluster_is_exact_attention_to_the_queries():
    q, k, v = qkv()
    layer = bound(Routing(clusters=1))
    torch.testing.assert_close(layer(q, k, v), naive(q, q, v))
    torch.testing.assert_close(layer(q, k, v, is_causal=True), naive(q, q, v, Mask.causal().to_dense(24, 24)))


def test_the_keys_that_are_passed_are_not_read():
    q, k, v = qkv()
    layer = bound(Routing(clusters=3))
    assert torch.equal(layer(q, k, v), layer(q, torch.full_like(k, torch.nan), v))


def test_each_centroid_takes_the_tokens_that_are_nearest_to_it():
    q, k, v = qkv()
    layer = bound(Routing(clusters=4))
    buckets, _ = layer.method.meetings(q, k, layer.prepare(q, k, v)[3])
    cosines = torch.nn.functional.cosine_similarity(q[:, :, None], layer.learned.centroids[None, :, :, None], dim=-1)
    assert torch.equal(buckets.queries.sort(-1).values, cosines.topk(6, dim=-1).indices.sort(-1).values)
    assert torch.equal(buckets.keys, buckets.queries)


def test_the_window_is_the_size_of_a_cluster_whatever_the_length():
    for N in (24, 60):
        q, k, v = qkv(N)
        layer = bound(Routing(clusters=4, cluster_size=5))
        buckets, _ = layer.method.meetings(q, k, layer.prepare(q, k, v)[3])
        assert buckets.keys.shape == (2, 2, 4, 5)


def test_a_query_that_no_centroid_takes_meets_the_keys_of_its_nearest():
    q, k, v = qkv()
    layer = bound(Routing(clusters=4, cluster_size=2))
    call = layer.prepare(q, k, v)[3]
    taken, left_over = layer.method.meetings(q, k, call)
    nearest = layer.learned(q).argmax(-1)
    met = sum(part.multiplicity(24, 24, Mask()) for part in (taken, left_over))
    for token in set(range(24)) - set(taken.queries[0, 0].flatten().tolist()):
        assert met[0, 0, token].nonzero()[:, 0].tolist() == sorted(taken.keys[0, 0, nearest[0, 0, token]].tolist())


def test_centroids_move_in_training_and_stand_still_in_evaluation():
    q, k, v = qkv()
    layer = bound(Routing(clusters=4))
    before, out = state(layer), layer(q, k, v)
    assert torch.equal(state(layer), before)
    # They move after they were used.
    assert torch.equal(layer.train()(q, k, v), out)
    moved = state(layer)
    assert not torch.equal(moved, before)
    assert (moved - before).abs().max() < 0.003
    torch.testing.assert_close(moved.norm(dim=-1), torch.ones(2, 4))
    layer.eval()(q, k, v)
    assert torch.equal(state(layer), moved)


def test_centroids_follow_real_tokens_only():
    q, k, v = qkv(B=1)
    masks = {
        "both": Mask.padding([17]),
        "keys": Mask.padding(keys=[17]),
        "queries": Mask.padding(queries=[17]),
        "segments": Mask.segments([[0] * 9 + [1] * 8 + [-1] * 7]),
    }
    wanted = bound(Routing(clusters=4)).train()
    wanted(*(x[:, :, :17] for x in (q, k, v)))
    for name, mask in masks.items():
        layer = bound(Routing(clusters=4)).train()
        layer(q, k, v, mask=mask)
        torch.testing.assert_close(state(layer), state(wanted), msg=lambda m, name=name: f"{name}: {m}")


def test_centroids_are_saved_and_are_no_parameters():
    layer, other = bound(Routing(clusters=4)).train(), bound(Routing(clusters=4, seed=3))
    layer(*qkv())
    assert list(layer.parameters()) == []
    other.load_state_dict(layer.state_dict())
    assert torch.equal(state(other), state(layer))
    assert torch.equal(other(*qkv()), layer.eval()(*qkv()))


def test_training_has_gradients_to_queries_and_values():
    inputs = tracked(*qkv())
    grads = gradients(bound(Routing(clusters=4)).train()(*inputs), *inputs)
    assert [bool(grad.abs().max() > 0) for grad in grads] == [True, False, True]
