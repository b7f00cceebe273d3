"""Tests of learned hashing's promises: the loss of the dense attention, separate gradients, and groups are found."""

from dataclasses import replace

import pytest
import torch

import subquad as sq
from subquad import LearnedHash, Mask
from subquad.kernels.tokens.slots import members
from subquad.testing.oracle import naive, qkv
from subquad.tools.measure.utility import attention_utility
from tests.library.hf.models import VOCAB, build
from tests.library.methods.hashing import (
    SCALE,
    bound,
    by_hand,
    divergence_by_hand,
    fitted,
    in_every_padding,
    loss_of,
    mask_of,
    packed_and_apart,
    padded_batch,
    planted,
    separate_gradients,
)

SETTINGS = ["buckets=3,hidden=4", "buckets=4,hash=linear,membership=argmax", "buckets=5,hidden=4,targets=features"]


def inside(logits: torch.Tensor, method: LearnedHash) -> torch.Tensor:
    """The matrix ψ of one head's n tokens: 1 where token i is in bucket b."""
    n, B = logits.shape
    found = torch.zeros_like(logits)
    if method.membership == "argmax":
        found[range(n), logits.argmax(-1)] = 1.0
    else:
        for b, of_bucket in enumerate(logits.softmax(-1).T):
            best = of_bucket.sort(descending=True, stable=True).indices  # of equal scores the first
            found[best[: max(1, int(n / B))], b] = 1.0
    return found


def loss_by_hand(layer: sq.BoundMethod, q, k, scale: float, causal: bool = False, valid=None) -> torch.Tensor:
    """KL(ψ ‖ S_Q) + KL(ψ' ‖ S_K), token by token from the dense A."""
    of_queries, of_keys = [], []
    times = q.shape[1] // k.shape[1]
    for item in range(q.shape[0]):
        here = slice(None) if valid is None else valid[item]
        for head in range(q.shape[1]):
            x, y = q[item, head][here], k[item, head // times][here]
            visible = Mask.causal().to_dense(len(x), len(y))[0, 0] if causal else torch.ones(len(x), len(y)) > 0
            weights = (scale * x @ y.T).masked_fill(~visible, -torch.inf).softmax(-1)
            logits = by_hand(layer.learned, "query", head, x * scale**0.5)
            key_logits = by_hand(layer.learned, "key", head // times, y * scale**0.5)
            if causal:
                logits = key_logits = logits + key_logits
            psi = weights @ inside(key_logits.detach(), layer.method)
            psi_key = weights.T @ inside(logits.detach(), layer.method)
            of_queries += [divergence_by_hand(p, z) for p, z in zip(psi, logits, strict=True) if p.sum() > 0]
            of_keys += [divergence_by_hand(p, z) for p, z in zip(psi_key, key_logits, strict=True) if p.sum() > 0]
    return sum(of_queries) / len(of_queries) + sum(of_keys) / len(of_keys)


@pytest.mark.parametrize("membership", ["balanced", "argmax"])
@pytest.mark.parametrize("hash", ["mlp", "linear"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_the_loss_and_its_gradient_are_those_of_the_dense_attention(membership, hash, causal, kv_heads):
    layer = bound(f"lha:buckets=3,hidden=5,hash={hash},membership={membership}", heads=4, kv_heads=kv_heads)
    q, k, _ = qkv(11, H=4, G=kv_heads, dtype=torch.float64)
    loss = loss_of(layer, q, k, scale=0.7, is_causal=causal)
    wanted = loss_by_hand(layer, q, k, 0.7, causal)
    torch.testing.assert_close(loss, wanted)
    assert loss > 0.05
    parameters = list(layer.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(loss, parameters), torch.autograd.grad(wanted, parameters), atol=1e-6, rtol=1e-5
    )


@pytest.mark.parametrize("membership", ["balanced", "argmax"])
def test_the_loss_of_cross_attention(membership):
    layer = bound(f"lha:buckets=4,hidden=5,membership={membership}")
    q, k, _ = qkv(9, 15, dtype=torch.float64)
    torch.testing.assert_close(loss_of(layer, q, k, scale=0.7), loss_by_hand(layer, q, k, 0.7))


@pytest.mark.parametrize("causal", [False, True])
def test_the_loss_of_padded_items_is_that_of_their_real_tokens(causal):
    layer = bound("lha:buckets=4,hidden=5")
    q, k, valid = (x.double() if x.is_floating_point() else x for x in padded_batch("left", 30.0))
    loss = loss_of(layer, q, k, mask=mask_of(valid, causal), scale=0.7)
    torch.testing.assert_close(loss, loss_by_hand(layer, q, k, 0.7, causal, valid))


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("causal", [False, True])
def test_padding_changes_neither_the_loss_nor_its_gradient(settings, causal):
    layer = bound(f"lha:{settings}")
    found = in_every_padding(layer, causal)
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=1e-6, rtol=1e-4)
    assert found[0][1].abs().max() > 0


@pytest.mark.parametrize("settings", SETTINGS)
def test_packed_segments_have_the_loss_of_separate_items(settings):
    layer = bound(f"lha:{settings}")
    packed, apart, none = packed_and_apart(layer)
    torch.testing.assert_close(packed, apart)
    assert apart > 0
    assert none == 0


@pytest.mark.parametrize("settings", [*SETTINGS, "buckets=3,hidden=4,selection=argmax"])
def test_output_and_loss_have_gradients_to_nothing_in_common(settings):
    layer = bound(f"lha:{settings}", heads=4, kv_heads=2)
    assert all(grad.abs().max() > 0 for grad in separate_gradients(layer, qkv(H=4, G=2)).values())


def test_features_give_nearly_the_exact_loss_and_gradient():
    """With eight draws of many features; with few they are far off."""
    exact = bound("lha:buckets=3,hidden=4")
    q, k = (0.4 * x for x in qkv()[:2])

    def error(features: int) -> float:
        method = replace(exact.method, targets="features", features=features)
        layer = sq.BoundMethod(method, heads=2, kv_heads=2, head_dim=8, learned=exact.learned).train()
        losses = torch.stack([loss_of(layer, q, k, scale=1.0, seed=seed) for seed in range(8)])
        return float((losses - loss_of(exact, q, k, scale=1.0)).abs().mean().detach())

    few, many = error(16), error(16 * 64)
    assert few > 0.01
    assert many < few / 4


@pytest.mark.parametrize("targets", ["exact", "features"])
def test_the_loss_of_large_inputs_is_finite(targets):
    layer = bound(f"lha:buckets=3,hidden=4,targets={targets}")
    loss = loss_of(layer, *(10 * x for x in qkv()[:2]), scale=10.0)
    grads = torch.autograd.grad(loss, list(layer.parameters()))
    assert loss.isfinite()
    assert all(grad.isfinite().all() for grad in grads)


# ---------------------------------------------------------------------- buckets


@pytest.mark.parametrize("seed", range(3))
def test_no_real_query_goes_without_keys(seed):
    layer = bound(f"lha:buckets=8,enlarge=1.0,seed={seed}", longest=256)
    q, k, v = qkv(256, seed=seed)
    mask = Mask.padding([256, 131])
    call = layer.prepare(q, k, v, mask=mask)[3]
    chosen, left_over = layer.method.meetings(q, k, call)
    outside = ~members(chosen.queries, 256).any(-1) & mask.query_padding(256)[:, None]
    assert 0.02 < outside.sum() / (2 * (256 + 131)) < 0.3
    assert torch.equal(left_over.multiplicity(256, 256, mask).any(-1), outside)
    out = layer(q, k, v, mask=mask)
    valid = mask.query_padding(256)
    assert out.isfinite().all()
    assert (out.transpose(1, 2)[valid].abs().amax(-1) > 0).all()


def test_a_query_in_no_bucket_attends_in_its_own_best_bucket():
    layer = bound("lha:buckets=8,enlarge=1.0")
    q, k, v = qkv(64)
    call = layer.prepare(q, k, v)[3]
    chosen, _ = layer.method.meetings(q, k, call)
    of_query, _ = layer.method.scores(q, k, call)
    out, keys = layer(q, k, v), members(chosen.keys, 64)
    outside = ~members(chosen.queries, 64).any(-1)
    assert outside.any()
    for item, head, i in outside.nonzero().tolist():
        mine = keys[item, head, :, of_query[item, head, i].argmax()] > 0
        parts = (x[item, head][None, None] for x in (q, k, v))
        alone = naive(*parts, mine[None, None, None].expand(1, 1, 64, 64))
        torch.testing.assert_close(out[item, head, i], alone[0, 0, i], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("enlarge", [1.0, 2**0.5])
def test_bucket_sizes_follow_each_items_own_length(enlarge):
    layer = bound(f"lha:buckets=4,enlarge={enlarge}")
    q, k, v = qkv(40, B=3)
    chosen, _ = layer.method.meetings(q, k, layer.prepare(q, k, v, mask=Mask.padding([40, 18, 3]))[3])
    for slots in (chosen.queries, chosen.keys):
        sizes = (slots < 40).sum(-1)
        assert [row.unique().tolist() for row in sizes] == [[int(n / 4 * enlarge) or 1] for n in (40, 18, 3)]


def test_a_bucket_size_sets_their_number_when_the_method_is_bound():
    method = LearnedHash(buckets=0, bucket_size=10)
    assert method.bind(heads=2, head_dim=8, max_length=96).learned.buckets == 10
    with pytest.raises(ValueError, match="'lha': buckets=0 needs the longest input"):
        method.bind(heads=2, head_dim=8)
    with pytest.raises(ValueError, match="buckets=0 takes their number from bucket_size, which is 0 too"):
        LearnedHash(buckets=0)
    layer = bound("lha:buckets=0,bucket_size=10,enlarge=1.5", longest=96)
    q, k, v = qkv(60)
    chosen, _ = layer.method.meetings(q, k, layer.prepare(q, k, v, mask=Mask.padding([60, 12]))[3])
    assert (chosen.keys < 60).sum(-1)[:, 0].tolist() == [[15] * 10, [12] * 10]


def test_merge_counts_a_key_of_two_shared_buckets_twice_or_once():
    """Two identical buckets hold the same half of the keys; the third holds the other half and one of the first."""
    layer = bound("lha:buckets=2,hash=linear,enlarge=1.5", heads=1, width=2)
    for function in (layer.learned.query, layer.learned.key):
        function.weights[0].data = torch.eye(2)[None]
        function.biases[0].data.zero_()
    points = torch.tensor([[2.0, 0.0], [1.0, 0.9], [0.9, 1.0], [0.0, 2.0]])[None, None]
    v = torch.eye(4)[None, None]
    multiple = layer(points, points, v)
    once = sq.BoundMethod(
        replace(layer.method, merge="union"), heads=1, kv_heads=1, head_dim=2, learned=layer.learned
    )(points, points, v)  # fmt: skip
    logits = points[0, 0] @ points[0, 0].T / 2**0.5
    counts = torch.tensor([[1, 1, 1, 0], [1, 2, 2, 1], [1, 2, 2, 1], [0, 1, 1, 1.0]])  # buckets {0,1,2} and {1,2,3}
    for out, times in ((multiple, counts), (once, counts.clamp(max=1))):
        weights = times * logits.exp()
        torch.testing.assert_close(out[0, 0], weights / weights.sum(-1, keepdim=True))


# ---------------------------------------------------------------------- causal


def test_under_a_causal_mask_queries_and_keys_share_the_sum_of_their_scores():
    layer = bound("lha:buckets=3,hidden=4")
    q, k, v = qkv(12)
    free = layer.method.scores(q, k, layer.prepare(q, k, v)[3])
    tied = layer.method.scores(q, k, layer.prepare(q, k, v, is_causal=True)[3])
    assert not torch.allclose(*free)
    torch.testing.assert_close(tied[0], free[0] + free[1])
    assert torch.equal(*tied)


@pytest.mark.parametrize("settings", ["buckets=3", "buckets=3,selection=argmax"])
def test_other_numbers_of_keys_than_queries_are_refused_by_name_under_a_causal_mask(settings):
    layer = bound(f"lha:{settings}")
    q, k, v = qkv(1, 12)
    with pytest.raises(ValueError, match=r"'lha' (ties the hashes|does not support).*"):
        layer(q, k, v, mask=Mask.causal(offset=11))
    if "argmax" in settings:
        with pytest.raises(ValueError, match="'lha' does not support fewer or more keys than queries"):
            layer(q, k, v)
    else:
        assert layer(q, k, v).isfinite().all()


@pytest.mark.parametrize("causal", [False, True])
def test_argmax_selection_lets_tokens_of_one_best_bucket_meet(causal):
    layer = bound("lha:buckets=3,hidden=4,selection=argmax")
    q, k, v = qkv(70)
    call = layer.prepare(q, k, v, is_causal=causal)[3]
    labels = layer.method.scores(q, k, call)[0].argmax(-1)
    sizes = labels[0, 0].bincount()
    assert sizes.max() > 1.5 * sizes.min()
    allowed = (labels[..., None] == labels[..., None, :]) & call.mask.to_dense(70, 70)
    torch.testing.assert_close(layer(q, k, v, is_causal=causal), naive(q, k, v, allowed), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_causal_language_model_sees_no_future_with_argmax_selection(name):
    case = build(name)
    ids = case.inputs["input_ids"][:1]
    exact = case.model(input_ids=ids).logits
    sq.hf.swap(case.model, "lha:buckets=3,hidden=8,selection=argmax")
    changed = ids.clone()
    changed[:, 9:] = (changed[:, 9:] + 7) % VOCAB
    now, other = (case.model(input_ids=x, use_cache=False).logits for x in (ids, changed))
    torch.testing.assert_close(now[:, :9], other[:, :9], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(now[:, 9:], other[:, 9:], atol=1e-3)
    assert not torch.allclose(now, exact, atol=1e-3)


def test_balanced_selection_is_refused_in_a_causal_language_model():
    """The meaning of "values only": the future enters no output, but the choice of the keys looks at it."""
    with pytest.raises(ValueError, match="'lha' is not causal and this layer is"):
        sq.hf.swap(build("gpt2").model, "lha:buckets=3")
    layer = bound("lha:buckets=8,enlarge=1.0")
    now, other = qkv(48), qkv(48, seed=5)
    changed = [torch.cat([a[:, :, :24], b[:, :, 24:]], dim=2) for a, b in zip(now, other, strict=True)]
    outs = [layer(*inputs, is_causal=True)[:, :, :24] for inputs in (now, changed)]
    assert not torch.allclose(*outs, atol=1e-2)


# ---------------------------------------------------------------------- learning


@pytest.mark.slow
@pytest.mark.parametrize("hash", ["mlp", pytest.param("linear", marks=pytest.mark.long)])
def test_it_learns_groups_that_random_directions_do_not_find(hash):
    layer = bound(f"lha:buckets=4,enlarge=1.0,hash={hash}", heads=4, width=16)
    unseen = planted(0, heads=4)
    start = attention_utility(layer, unseen.query, unseen.key, scale=SCALE).utility.mean()
    utility = attention_utility(
        fitted(layer, 4, steps=250, learning_rate=3e-3), unseen.query, unseen.key, scale=SCALE
    ).utility  # fmt: skip
    assert utility.min() >= 0.99
    assert start < 0.6
    for seed in range(4):
        lsh = sq.RandomHash(buckets=4, enlarge=1.0, seed=seed)
        assert attention_utility(lsh, unseen.query, unseen.key, scale=SCALE).utility.mean() < 0.6


def test_argmax_membership_collapses_where_balanced_membership_learns():
    """The loss of the paper's ψ falls to nothing when all tokens are in one bucket."""
    layer = bound("lha:buckets=4,enlarge=1.0,membership=argmax", heads=1, width=16)
    for function in (layer.learned.query, layer.learned.key):
        function.biases[-1].data[..., 0] = 50.0
    batch = planted(0, heads=1)
    assert loss_of(layer, batch.query, batch.key, scale=SCALE) < 1e-3
    layer = sq.BoundMethod(
        replace(layer.method, membership="balanced"), heads=1, kv_heads=1, head_dim=16, learned=layer.learned
    ).train()  # fmt: skip
    assert loss_of(layer, batch.query, batch.key, scale=SCALE) > 1.0


def test_the_loss_is_zero_where_the_scores_are_the_logarithms_of_the_utilities():
    """Four groups in four buckets, so that ψ is nearly one-hot: scores that say so leave nothing to learn."""
    layer = bound("lha:buckets=4,hash=linear", heads=1, width=4)
    for function in (layer.learned.query, layer.learned.key):
        function.weights[0].data = 30 * torch.eye(4)[None]
        function.biases[0].data.zero_()
    group = torch.arange(16) % 4
    x = 8 * torch.eye(4)[group][None, None]
    assert loss_of(layer, x, x) < 1e-6
    layer.learned.key.weights[0].data = 30 * torch.eye(4).roll(1, 0)[None]
    assert loss_of(layer, x, x) > 10


def test_dropout_and_half_precision_leave_the_loss_alone():
    layer = bound("lha:buckets=3,hidden=4")
    q, k, _ = qkv()
    loss = loss_of(layer, q, k)
    assert torch.equal(loss_of(layer, q, k, dropout_p=0.5), loss)
    half = loss_of(layer, q.bfloat16(), k.bfloat16())
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, loss_of(layer, q.bfloat16().float(), k.bfloat16().float()))


def test_a_seed_starts_other_hash_functions_and_draws_other_features():
    one, two = (bound(f"lha:buckets=3,hidden=4,seed={seed}") for seed in (0, 1))
    q, k, v = qkv()
    assert not torch.allclose(one(q, k, v), two(q, k, v))
    layer = bound("lha:buckets=3,hidden=4,targets=features,features=8")
    assert loss_of(layer, q, k, seed=1) != loss_of(layer, q, k, seed=2)
    assert loss_of(layer, q, k, seed=1) == loss_of(layer, q, k, seed=1)
