"""Tests of what clustered attention does to queries before it clusters them, and of its settings for that."""

from dataclasses import replace

import pytest
import torch

import subquad as sq
from subquad import Clustered, ImprovedClustered, Mask
from subquad.kernels.attention.clustered.reference import cluster_queries
from subquad.kernels.selection.clusters.op import query_clusters
from subquad.kernels.selection.hashing.reference import centred
from subquad.methods import from_dict, parse_method
from subquad.testing.oracle import gradients, normal, qkv, tracked

METHODS = [Clustered(clusters=7), ImprovedClustered(clusters=7, topk=9)]


def test_centring_leaves_padding_out_of_the_mean():
    query = normal(2, 3, 10, 4)
    valid = torch.arange(10) < torch.tensor([10, 6])[:, None]
    out = centred(query, valid)
    torch.testing.assert_close(out[0].mean(1), torch.zeros(3, 4), atol=1e-6, rtol=0)
    torch.testing.assert_close(out[1, :, :6].mean(1), torch.zeros(3, 4), atol=1e-6, rtol=0)
    torch.testing.assert_close(centred(query[1:, :, :6], None)[0], out[1, :, :6])


def test_a_common_offset_of_all_queries_changes_no_cluster():
    query, offset = normal(1, 2, 40, 8), 5 * normal(1, 2, 1, 8, seed=1)
    plain, shifted = (
        cluster_queries(q, None, clusters=6, bits=63, iterations=10, seed=0) for q in (query, query + offset)
    )
    assert (plain == shifted).float().mean() > 0.99  # rounding may turn a bit
    assert plain.unique().numel() == 6


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_the_paper_is_the_default(method):
    named = replace(method, space="queries", refine=0)
    assert named == method
    assert "space" not in str(method) + str(named)
    older = {k: v for k, v in method.to_dict().items() if k not in ("space", "refine")}
    assert from_dict(older) == method
    assert parse_method(f"{method},space=logits,refine=2") == replace(method, space="logits", refine=2)


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"space": "keys"}, "space='keys', but it must be one of 'queries', 'logits'"), ({"refine": -1}, "refine=-1")],
)
def test_other_settings_are_refused(method, wrong, message):
    with pytest.raises(ValueError, match=message):
        replace(method, **wrong)


@pytest.mark.parametrize("settings", [{"space": "logits"}, {"refine": 3}, {"space": "logits", "refine": 2}], ids=str)
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_members_share_the_row_of_the_clusters_that_the_settings_ask_for(settings, padded):
    q, k, _ = qkv(40, 30, H=4, G=2, dtype=torch.float64)
    mask = Mask.padding(queries=[40, 25], keys=[30, 21]) if padded else Mask()
    how = {"space": "queries", "refine": 0, "clusters": 7, "bits": 63, "iterations": 10, "seed": 3} | settings
    labels = query_clusters(q, k, mask.query_padding(40), mask.key_padding(30), **how)
    eye = torch.eye(30, dtype=q.dtype).expand(2, 2, -1, -1)
    rows = sq.attention(q, k, eye, method=Clustered(clusters=7, seed=3, **settings), mask=mask, enable_gqa=True)
    for b, h in ((0, 0), (0, 3), (1, 1)):
        for label in range(7):
            members = labels[b, h] == label
            if members.any():
                logits = q[b, h, members].mean(0) @ k[b, h // 2].T / q.shape[3] ** 0.5
                logits[mask.key_padding(30)[b].logical_not() if padded else slice(0, 0)] = -torch.inf
                row = logits.softmax(-1).expand(int(members.sum()), 30)
                torch.testing.assert_close(rows[b, h, members], row)


@pytest.mark.parametrize("settings", [{"space": "logits"}, {"refine": 2}, {"space": "logits", "refine": 2}], ids=str)
def test_exact_limits_stay(settings):
    q, k, v = qkv(40, 30, dtype=torch.float64)
    exact = sq.attention(q, k, v, method="full")
    for method in (Clustered(clusters=40, **settings), ImprovedClustered(clusters=3, topk=30, **settings)):
        torch.testing.assert_close(sq.attention(q, k, v, method=method), exact)


def test_the_labels_are_constants():
    """With the clusters of another space the gradient is still that of means, weights and mass alone."""
    q, k, v = tracked(*qkv(20, 16, B=1, H=1, dtype=torch.float64))
    method = ImprovedClustered(clusters=4, topk=5, space="logits", refine=2)
    assert torch.autograd.gradcheck(lambda *x: method(*x), (q, k, v), fast_mode=True)
    assert torch.autograd.gradcheck(lambda *x: method(*x, return_lse=True)[1], (q, k, v), fast_mode=True)


def test_refining_brings_queries_nearer_to_the_means_that_stand_for_them():
    """On queries and keys whose spread differs by direction, in the space that is clustered."""
    spread = torch.tensor([4.0, 2, 1, 1, 0.5, 0.2, 0.1, 0.1])
    q, k, v = qkv(200, 200, D=8)
    q, k = q * spread, k * spread.flip(0)
    exact = sq.attention(q, k, v, method="full")
    errors = [
        float((sq.attention(q, k, v, method=Clustered(clusters=20, **settings)) - exact).norm())
        for settings in ({}, {"space": "logits"}, {"space": "logits", "refine": 3})
    ]
    assert errors[0] > 1.1 * errors[1] > 1.1 * errors[2]


def test_gradients_reach_all_inputs():
    inputs = tracked(*qkv(40, 30))
    out = sq.attention(*inputs, method="i-clustered:clusters=5,topk=4,space=logits,refine=1")
    assert all(x.isfinite().all() and x.any() for x in gradients(out, *inputs))
