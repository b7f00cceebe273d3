"""Tests of random hashing: opposite directions shared by queries and keys, or scores that see no content."""

from dataclasses import replace

import pytest
import torch

import subquad as sq
from subquad import Mask, RandomHash
from subquad.methods.lsh import plane_scores, position_scores
from subquad.testing.oracle import naive, normal, qkv
from subquad.tools.measure.utility import attention_utility


def met(method: RandomHash, q, k, **options) -> torch.Tensor:
    """The number of times that each query meets each key."""
    call = method.prepare(q, k, k, enable_gqa=q.shape[1] != k.shape[1], **options)[3]
    return sum(part.multiplicity(q.shape[2], k.shape[2], call.mask) for part in method.meetings(q, k, call))


def scores(method: RandomHash, q, k, **options) -> tuple[torch.Tensor, torch.Tensor]:
    return method.scores(q, k, method.prepare(q, k, k, **options)[3])


# ---------------------------------------------------------------------- directions


@pytest.mark.parametrize("buckets", [1, 2, 7, 8])
def test_directions_come_in_opposite_pairs(buckets):
    found = plane_scores(normal(2, 3, 9, 6), buckets, seed=3)
    assert found.shape == (2, 3, 9, buckets)
    for b in range(0, buckets - 1, 2):
        assert torch.equal(found[..., b + 1], -found[..., b])
    assert len(found[0, 0, 0].abs().unique()) == (buckets + 1) // 2


def test_scores_are_products_with_directions_that_depend_on_the_seed_alone():
    x = normal(2, 3, 9, 6, dtype=torch.float64)
    directions = plane_scores(torch.eye(6, dtype=torch.float64)[None, None], 8, seed=3)[0, 0]  # (D,B)
    torch.testing.assert_close(plane_scores(x, 8, seed=3), x @ directions)
    assert not torch.allclose(plane_scores(x, 8, seed=4), x @ directions)
    gram = directions.T[::2] @ directions[:, ::2]
    assert gram.tril(-1).abs().max() > 1e-3  # independent, not orthogonal


def test_the_same_vector_has_the_same_scores_as_query_and_as_key():
    q, k, _ = qkv(9, H=4, G=2)
    of_query, of_key = scores(RandomHash(buckets=6), k.repeat_interleave(2, dim=1), k, enable_gqa=True)
    assert torch.equal(of_query, of_key)
    of_query, of_key = scores(RandomHash(buckets=6), q, k, enable_gqa=True, is_causal=True)
    assert torch.equal(of_query, of_key)
    free = scores(RandomHash(buckets=6), q, k, enable_gqa=True)
    torch.testing.assert_close(of_query, free[0] + free[1])


def test_the_length_of_vectors_and_the_scale_change_no_argmax():
    q, k, _ = qkv(40)
    labels = []
    for size, scale in ((1.0, 1.0), (7.0, 1.0), (1.0, 0.01)):
        labels.append(scores(RandomHash(buckets=8), size * q, k, scale=scale)[0].argmax(-1))
    assert torch.equal(labels[0], labels[1])
    assert torch.equal(labels[0], labels[2])
    assert labels[0].unique().numel() == 8


def test_fewer_buckets_are_the_first_ones_of_more():
    x = normal(2, 3, 9, 6)
    for few, many in ((3, 8), (4, 5), (1, 12)):
        torch.testing.assert_close(plane_scores(x, many, seed=3)[..., :few], plane_scores(x, few, seed=3))


@pytest.mark.parametrize("hash", ["planes", "random"])
def test_a_bucket_size_gives_each_item_its_own_number_of_buckets(hash):
    method = RandomHash(buckets=0, bucket_size=10, enlarge=1.0, hash=hash)
    q, k, _ = qkv(60, B=4)
    lengths = [60, 31, 10, 3]
    mask = Mask.padding(lengths)
    call = method.prepare(q, k, k, mask=mask)[3]
    of_query, of_key = method.scores(q, k, call)
    assert [(row[0, 0] > -torch.inf).sum() for row in of_query] == [6, 4, 1, 1]
    assert torch.equal(of_query > -torch.inf, of_key > -torch.inf)
    together = met(method, q, k, mask=mask)
    for item, n in enumerate(lengths):
        alone = met(method, q[item : item + 1, :, :n], k[item : item + 1, :, :n])[0]
        assert torch.equal(together[item, :, :n, :n], alone)
        assert together[item].sum() == alone.sum()
        fixed = replace(method, buckets=-(-n // 10))
        assert torch.equal(alone, met(fixed, q[item : item + 1, :, :n], k[item : item + 1, :, :n])[0])
    chosen, _ = method.meetings(q, k, call)
    assert [int((row[0] < 60).sum(-1).max()) for row in chosen.keys] == [10, 10, 10, 3]
    with pytest.raises(ValueError, match="'lsh': buckets=0 takes their number from bucket_size, which is 0 too"):
        RandomHash(buckets=0)


@pytest.mark.parametrize("enlarge", [1.0, 2**0.5])
def test_bucket_sizes_follow_each_items_own_length(enlarge):
    method = RandomHash(buckets=4, enlarge=enlarge)
    q, k, _ = qkv(40, B=3)
    chosen, _ = method.meetings(q, k, method.prepare(q, k, k, mask=Mask.padding([40, 18, 3]))[3])
    for slots in (chosen.queries, chosen.keys):
        sizes = (slots < 40).sum(-1)
        assert [row.unique().tolist() for row in sizes] == [[int(n / 4 * enlarge) or 1] for n in (40, 18, 3)]


# ---------------------------------------------------------------------- random numbers


@pytest.mark.parametrize("settings", [{}, {"buckets": 0, "bucket_size": 7}, {"tail": 2}])
def test_random_scores_do_not_look_at_the_vectors(settings):
    method = RandomHash(hash="random", **({"buckets": 5} | settings))
    (q, k, _), (other_q, other_k, _) = qkv(31), qkv(31, seed=5)
    assert torch.equal(met(method, q, k), met(method, other_q, other_k))
    assert not torch.equal(met(method, q, k, seed=1), met(method, q, k, seed=2))
    planes = replace(method, hash="planes")
    assert not torch.equal(met(planes, q, k), met(planes, other_q, other_k))


def test_random_scores_go_by_the_place_among_the_real_tokens():
    x = normal(3, 2, 20, 6)
    valid = torch.stack([torch.arange(20) < 11, torch.arange(20) >= 9, torch.arange(20) % 2 == 0])
    found, whole = position_scores(x, valid, 5, seed=3), position_scores(x, None, 5, seed=3)
    for item, here in enumerate(valid):
        assert torch.equal(found[item][:, here], whole[item, :, : int(here.sum())])
    assert torch.equal(whole[:, 0], whole[:, 1])
    assert len(whole[0, 0].unique()) == 100


def test_random_scores_of_queries_and_of_keys_are_others_and_no_seed_swaps_them():
    q, k, _ = qkv(31)
    method = RandomHash(buckets=5, hash="random")
    drawn = [side for seed in range(4) for side in scores(method, q, k, seed=seed)]
    assert len(torch.stack(drawn)[:, 0, 0, 0, 0].unique()) == 8


def test_random_buckets_have_a_utility_of_about_one_in_b_and_directions_more():
    """Queries equal keys here, so the attention of similar ones is large."""
    q = k = 2 * normal(1, 4, 256, 16)
    found = {}
    for hash in ("planes", "random"):
        methods = [RandomHash(buckets=8, enlarge=1.0, hash=hash, seed=seed) for seed in range(4)]
        found[hash] = torch.stack([attention_utility(method, q, k).utility for method in methods]).mean()
    assert 0.08 < found["random"] < 0.2
    assert found["planes"] > 2 * found["random"]


# ---------------------------------------------------------------------- attention


@pytest.mark.parametrize("hash", ["planes", "random"])
@pytest.mark.parametrize("causal", [False, True])
def test_no_real_query_goes_without_keys(hash, causal):
    method = RandomHash(buckets=8, enlarge=1.0, hash=hash)
    q, k, v = qkv(256)
    mask = Mask.padding([256, 131]) & Mask(is_causal=causal)
    counts = met(method, q, k, mask=mask).sum(-1)
    valid = mask.query_padding(256)
    assert ((counts > 0) == valid[:, None]).all()
    out = method(q, k, v, mask=mask)
    assert out.isfinite().all()
    assert (out.transpose(1, 2)[valid].abs().amax(-1) > 0).all()


def test_merge_counts_shared_buckets_or_each_key_once():
    q, k, v = qkv(40)
    multiple, once = RandomHash(buckets=4), RandomHash(buckets=4, merge="union")
    counts = met(multiple, q, k)
    assert counts.max() > 1
    allowed = counts > 0
    torch.testing.assert_close(once(q, k, v), naive(q, k, v, allowed), atol=1e-5, rtol=1e-4)
    weighted = naive(q, k, v, allowed, counts.clamp(min=1).log())
    torch.testing.assert_close(multiple(q, k, v), weighted, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(weighted, once(q, k, v), atol=1e-3)


def test_a_tail_keeps_one_bucket_and_is_not_causal():
    q, k, v = qkv(40)
    method = RandomHash(buckets=4, tail=3)
    assert met(method, q, k).max() == 1
    assert met(method, q, k).sum(-1).unique().tolist() == [int(40 / 4 * 2**0.5)]
    exact = naive(q, k, v)
    errors = [(sq.RandomHash(buckets=4, tail=tail)(q, k, v) - exact).norm() for tail in (0, 1, 16, 40)]
    assert errors[1] < 0.8 * errors[0]
    assert errors[2] < errors[1]
    assert errors[3] < 1e-4  # a cell for each key
    with pytest.raises(ValueError, match="'lsh' does not support a causal mask"):
        method(q, k, v, is_causal=True)


def test_other_numbers_of_keys_than_queries_are_refused_by_name_under_a_causal_mask():
    q, k, v = qkv(1, 12)
    with pytest.raises(ValueError, match=r"'lsh' ties the hashes .* use_cache=False"):
        RandomHash()(q, k, v, mask=Mask.causal(offset=11))
    assert RandomHash()(q, k, v).isfinite().all()


# ---------------------------------------------------------------------- strict causality


@pytest.mark.parametrize("kind", ["planes", "random"])
def test_argmax_buckets_are_those_of_equal_labels_and_earlier_tokens(kind):
    method = RandomHash(buckets=3, hash=kind, selection="argmax")
    q, k, v = qkv(30)
    labels = scores(method, q, k, is_causal=True)[0].argmax(-1)
    same = (labels[..., :, None] == labels[..., None, :]) & torch.ones(30, 30, dtype=torch.bool).tril()
    assert torch.equal(met(method, q, k, is_causal=True) > 0, same)
    assert method.traits.causal == "strict"
    want = sq.attention(q, k, v, mask=Mask.dense(same), method="full")
    torch.testing.assert_close(method(q, k, v, is_causal=True), want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("settings", [{"tail": 2}, {"buckets": 0, "bucket_size": 8}])
def test_argmax_buckets_have_no_size_and_no_tail(settings):
    setting = next(iter(settings))
    with pytest.raises(ValueError, match=f"'lsh': {setting}={settings[setting]} needs selection='balanced'"):
        RandomHash(**settings, selection="argmax")


@pytest.mark.parametrize("method", ["lsh:buckets=4,selection=argmax", "cluster-former:window=2,chunk=5,clusters=4"])
def test_a_padded_query_leaves_no_trace_in_the_hash_of_the_key_at_its_place(method: str):
    valid, (q, k, v) = normal(2, 50, seed=4) > -0.5, qkv(50)
    dirty = q.masked_fill(~valid[:, None, :, None], torch.nan)
    out, want = (sq.attention(x, k, v, method=method, mask=Mask.padding(queries=valid)) for x in (dirty, q))
    torch.testing.assert_close(out, want)
