"""The two propositions of the clustered-attention paper, and what the yardsticks of section 4.1 compute."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import subquad as sq
from subquad import Mask
from subquad.kernels.attention.clustered.reference import cluster_queries
from subquad.testing.oracle import naive, normal, qkv

EPSILON = 1e-9  # of fp64, over sums of up to 20 weights

KINDS = ["random", "huge", "tiny", "duplicates", "one-hot", "all-equal", "opposite", "zero"]


def vectors(kind: str, count: int, seed: int) -> torch.Tensor:
    """(1, 2, count, 5) in fp64, of a kind that is known to be awkward."""
    x = normal(1, 2, count, 5, seed=seed, dtype=torch.float64)
    number = torch.arange(count)
    return {
        "random": x,
        "huge": 300 * x,
        "tiny": 1e-8 * x,
        "duplicates": x[:, :, number % 3],
        "one-hot": 20 * torch.eye(5, dtype=torch.float64)[number % 5].expand(1, 2, count, 5),
        "all-equal": x[:, :, :1].expand(1, 2, count, 5),
        "opposite": x[:, :, :1] * (1 - 2 * (number % 2))[:, None],
        "zero": 0 * x,
    }[kind]


@st.composite
def problems(draw) -> dict:
    N, M = draw(st.integers(1, 20)), draw(st.integers(1, 20))
    q = vectors(draw(st.sampled_from(KINDS)), N, draw(st.integers(0, 99)))
    k = vectors(draw(st.sampled_from(KINDS)), M, draw(st.integers(100, 199)))
    lengths = {"keys": [draw(st.integers(1, M))], "queries": [draw(st.integers(1, N))]}
    return {"q": q, "k": k, "lengths": lengths, "clusters": draw(st.integers(1, 8)), "topk": draw(st.integers(1, 8))}


def attention_matrix(method, q, k, mask) -> torch.Tensor:
    """Row i is what query i gives each key: the output for values that are the identity."""
    identity = torch.eye(k.shape[2], dtype=q.dtype).expand(*k.shape[:2], -1, -1)
    return sq.attention(q, k, identity, method=method, mask=mask)


@given(st.sampled_from(KINDS), st.sampled_from(KINDS), st.integers(0, 999), st.integers(1, 20))
@settings(deadline=None)
def test_proposition_1(query_kind, key_kind, seed, M):
    q, k = vectors(query_kind, 12, seed), vectors(key_kind, M, seed + 1)
    weights = (q @ k.mT).softmax(-1)
    moved = torch.linalg.matrix_norm(k, ord=2)[..., None, None] * torch.cdist(q, q)
    assert (
        torch.cdist(weights, weights, compute_mode="donot_use_mm_for_euclid_dist") <= moved * (1 + 1e-6) + 1e-6
    ).all()


@given(problems())
@settings(deadline=None, max_examples=150)
@example(
    {"q": vectors("huge", 20, 0), "k": vectors("huge", 20, 1), "lengths": {"keys": [17]}, "clusters": 2, "topk": 3}
)
@example(
    {"q": vectors("opposite", 20, 0), "k": vectors("huge", 20, 1), "lengths": {"keys": [17]}, "clusters": 1, "topk": 1}
)
def test_proposition_2(problem):
    q, k, mask, clusters = problem["q"], problem["k"], Mask.padding(**problem["lengths"]), problem["clusters"]
    exact = attention_matrix("full", q, k, mask)
    clustered = attention_matrix(sq.Clustered(clusters=clusters), q, k, mask)
    improved = attention_matrix(sq.ImprovedClustered(clusters=clusters, topk=problem["topk"]), q, k, mask)
    assert ((improved - exact).abs().sum(-1) <= (clustered - exact).abs().sum(-1) + EPSILON).all()


@given(problems())
@settings(deadline=None, max_examples=40)
def test_rows_are_distributions_over_the_visible_keys(problem):
    q, k, mask, clusters = problem["q"], problem["k"], Mask.padding(**problem["lengths"]), problem["clusters"]
    for method in (sq.Clustered(clusters=clusters), sq.ImprovedClustered(clusters=clusters, topk=problem["topk"])):
        weights = attention_matrix(method, q, k, mask)
        valid = mask.query_padding(q.shape[2])
        torch.testing.assert_close(weights.sum(-1)[:, :, valid[0]], torch.ones(1, 2, int(valid.sum())).double())
        assert (weights >= 0).all()
        assert (weights.masked_select(~mask.to_dense(q.shape[2], k.shape[2])) == 0).all()


def test_proposition_2_bites():
    """On ordinary inputs the improvement is strict, so that the property above says something."""
    q, k = vectors("random", 20, 0), vectors("random", 20, 1)
    exact = attention_matrix("full", q, k, None)
    errors = [
        (attention_matrix(method, q, k, None) - exact).abs().sum(-1).mean()
        for method in (sq.Clustered(clusters=3), sq.ImprovedClustered(clusters=3, topk=8))
    ]
    assert 0 < errors[1] < 0.8 * errors[0]


def test_members_of_a_cluster_share_a_row_that_is_their_centroids():
    q, k = vectors("random", 20, 0), vectors("random", 20, 1)
    labels = cluster_queries(q, None, clusters=4, bits=63, iterations=10, seed=3)
    weights = attention_matrix(sq.Clustered(clusters=4, seed=3), q, k, None)
    for head in (0, 1):
        for label in labels[0, head].unique():
            members = labels[0, head] == label
            centroid = q[0, head, members].mean(0)
            row = (centroid @ k[0, head].T / 5**0.5).softmax(-1)
            torch.testing.assert_close(weights[0, head, members], row.expand(int(members.sum()), 20))


def test_top_keys_follow_equation_10():
    q, k = vectors("random", 20, 0), vectors("random", 20, 1)
    of_cluster = attention_matrix(sq.Clustered(clusters=4, seed=3), q, k, None)
    weights = attention_matrix(sq.ImprovedClustered(clusters=4, topk=6, seed=3), q, k, None)
    top = of_cluster.topk(6).indices
    own = (q @ k.mT / 5**0.5).gather(-1, top).softmax(-1)
    wanted = of_cluster.scatter(-1, top, of_cluster.gather(-1, top).sum(-1, keepdim=True) * own)
    torch.testing.assert_close(weights, wanted)


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_the_same_seed_gives_both_methods_the_same_clusters(seed):
    """With one key of any weight the rest of a row is the centroid's, so equal rests mean equal clusters."""
    q, k = vectors("random", 20, 0), vectors("random", 20, 1)
    clustered = attention_matrix(sq.Clustered(clusters=4), q, k, None)
    improved = sq.ImprovedClustered(clusters=4, topk=1, seed=seed)
    torch.testing.assert_close(attention_matrix(sq.Clustered(clusters=4, seed=seed), q, k, None),
                               attention_matrix(improved, q, k, None))  # fmt: skip
    if seed:
        assert not torch.allclose(attention_matrix(improved, q, k, None), clustered)


def test_the_mass_of_the_top_keys_carries_gradient():
    """Values that are 1 on the top keys and 0 elsewhere make the output the mass itself."""
    q, k = (x.requires_grad_() for x in (vectors("random", 20, 0).clone(), vectors("random", 20, 1).clone()))
    method = sq.ImprovedClustered(clusters=1, topk=4)
    top = (q.detach().mean(2, keepdim=True) @ k.detach().mT).topk(4).indices
    value = torch.zeros(1, 2, 1, 20, dtype=torch.float64).scatter(-1, top, 1.0).mT
    grads = torch.autograd.grad(method(q, k, value).sum(), (q, k))
    wanted = torch.autograd.grad(20 * ((q.mean(2, keepdim=True) @ k.mT / 5**0.5).softmax(-1) @ value).sum(), (q, k))
    torch.testing.assert_close(grads, wanted)


def dropped(method: sq.Method) -> torch.Tensor:
    """True for weights that dropout sets to 0, (1, 2, 20, 20)."""
    q, k = vectors("random", 20, 0), vectors("random", 20, 1)
    identity = torch.eye(20, dtype=torch.float64).expand(1, 2, 20, 20)
    torch.manual_seed(0)
    return method(q, k, identity, dropout_p=0.5) == 0


def test_dropout_of_clustered_is_one_draw_a_cluster():
    zero = dropped(sq.Clustered(clusters=1))
    assert 0.2 < zero.double().mean() < 0.8
    assert torch.equal(zero, zero[:, :, :1].expand_as(zero))


def test_dropout_of_improved_clustered_is_a_draw_a_cluster_and_one_a_query_on_the_top_keys():
    q, k = vectors("random", 20, 0), vectors("random", 20, 1)
    order = (q.mean(2, keepdim=True) @ k.mT).argsort(descending=True).expand(1, 2, 20, 20)
    top, rest = dropped(sq.ImprovedClustered(clusters=1, topk=8)).gather(-1, order).split([8, 12], dim=-1)
    assert all(0.2 < zero.double().mean() < 0.8 for zero in (top, rest))
    assert torch.equal(rest, rest[:, :, :1].expand_as(rest))
    assert not torch.equal(top, top[:, :, :1].expand_as(top))


# ---------------------------------------------------------------- the yardsticks


def test_shared_full_is_full_with_the_queries_as_keys():
    q, k, v = qkv()
    for mask in (None, Mask.causal(), Mask.padding([24, 7]), Mask.window(3)):
        shared = sq.attention(q, k, v, method="shared-full", mask=mask)
        assert torch.equal(shared, sq.attention(q, q, v, method="full", mask=mask))


@pytest.mark.parametrize("topk", [1, 3, 24])
@pytest.mark.parametrize("mask", [Mask(), Mask.causal(), Mask.padding([24, 2])], ids=repr)
def test_oracle_top_keeps_each_querys_best_keys(topk, mask):
    q, k, v = qkv()
    allowed = mask.to_dense(24, 24).expand(2, 2, 24, 24)
    logits = (q @ k.mT).masked_fill(~allowed, -torch.inf)
    best = torch.zeros_like(allowed)
    for row in torch.cartesian_prod(*(torch.arange(n) for n in logits.shape[:3])).tolist():
        at = tuple(row)
        best[at][logits[at].sort(descending=True).indices[:topk]] = True
    out = sq.attention(q, k, v, method=sq.OracleTopK(topk=topk), mask=mask)
    torch.testing.assert_close(out, naive(q, k, v, best & allowed))


def test_oracle_top_with_ties_keeps_exactly_k_of_the_tied():
    q, k = torch.ones(1, 1, 3, 4), torch.ones(1, 1, 8, 4)
    weights = attention_matrix(sq.OracleTopK(topk=3), q, k, None)
    assert torch.equal(weights.sort(descending=True).values[0, 0, 0], torch.tensor([1 / 3] * 3 + [0] * 5))
    assert torch.equal(weights[0, 0, 0], weights[0, 0, 1])


def test_oracle_top_with_ties_at_the_edge_keeps_what_is_better():
    logits = torch.tensor([5.0, 1.0, 1.0, 9.0, 1.0])
    weights = attention_matrix(sq.OracleTopK(topk=3), torch.ones(1, 1, 1, 1), logits.view(1, 1, 5, 1), None)
    assert weights[0, 0, 0, [0, 3]].min() > 0
    assert (weights > 0).sum() == 3
    torch.testing.assert_close(weights.sum(), torch.tensor(1.0))


def test_oracle_top_in_chunks_equals_one_piece(monkeypatch):
    q, k, v = qkv()
    mask = Mask.causal() & Mask.padding([24, 9])
    whole = sq.attention(q, k, v, method="oracle-top:topk=3", mask=mask, bias=normal(1, 2, 24, 24))
    monkeypatch.setattr("subquad.methods.core.exact.CHUNK", 24 * 5)
    torch.testing.assert_close(
        sq.attention(q, k, v, method="oracle-top:topk=3", mask=mask, bias=normal(1, 2, 24, 24)), whole
    )
