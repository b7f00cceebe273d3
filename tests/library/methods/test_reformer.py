"""Tests of what Reformer promises: shared unit keys, the own bucket only, itself only where alone."""

import pytest
import torch

from subquad import Mask, Reformer
from subquad.methods.reformer import hash_labels
from subquad.testing.oracle import naive, normal, qkv


def met(method: Reformer, q: torch.Tensor, mask: Mask | None = None) -> list[torch.Tensor]:
    N = q.shape[2]
    call = method.prepare(q, q, q, mask=mask)[3]
    return [part.multiplicity(N, N, call.mask) for part in method.meetings(q, q, call)]


@pytest.mark.parametrize("rounds", [1, 3])
def test_in_one_chunk_it_is_exact_attention_to_the_others(rounds):
    q, k, v = qkv(9)
    others = ~torch.eye(9, dtype=torch.bool)[None, None]
    unit = q / q.norm(dim=-1, keepdim=True)
    method = Reformer(rounds=rounds, chunk=9)
    torch.testing.assert_close(method(q, k, v), naive(q, unit, v, others))
    causal = method(q, k, v, is_causal=True)
    torch.testing.assert_close(causal[:, :, 1:], naive(q, unit, v, others & Mask.causal().to_dense(9, 9))[:, :, 1:])
    torch.testing.assert_close(causal[:, :, 0], v[:, :, 0])


def test_the_keys_that_are_passed_are_not_read():
    q, k, v = qkv()
    assert torch.equal(Reformer(chunk=8)(q, k, v), Reformer(chunk=8)(q, torch.full_like(k, torch.nan), v))


def test_labels_are_the_argmax_over_both_signs():
    q, directions = normal(2, 3, 50, 8), normal(5, 8, seed=1)
    both = torch.cat([q @ directions.T, -q @ directions.T], dim=-1)
    assert torch.equal(hash_labels(q, directions, torch.tensor([5, 5])), both.argmax(-1))
    few = hash_labels(q, directions, torch.tensor([2, 0]))
    assert torch.equal(few[0], both[0, :, :, [0, 1, 5, 6]].argmax(-1))
    assert (few[1] == 0).all()


def test_the_length_of_a_query_changes_no_label_and_its_sign_does():
    q, directions = normal(1, 2, 50, 8), normal(5, 8, seed=1)
    used = torch.tensor([5])
    labels = hash_labels(q, directions, used)
    assert torch.equal(hash_labels(7 * q, directions, used), labels)
    assert torch.equal(hash_labels(-q, directions, used), (labels + 5) % 10)


def test_buckets_are_counted_from_each_items_own_length():
    q = normal(3, 1, 400, 8)
    lengths = [400, 64, 9]
    seen = met(Reformer(rounds=1, chunk=10, buckets=30), q, Mask.padding(lengths))[0]
    for item, (n, buckets) in enumerate(zip(lengths, (30, 14, 1), strict=True)):
        alone = met(Reformer(rounds=1, chunk=10, buckets=buckets + buckets % 2), q[item : item + 1, :, :n])[0]
        assert torch.equal(seen[item, :, :n, :n], alone[0])
        assert seen[item].sum() == alone.sum()


def test_more_rounds_begin_with_the_same_ones():
    q = normal(1, 2, 60, 8)
    one, three = (met(Reformer(rounds=rounds, chunk=8), q) for rounds in (1, 3))
    assert len(three) == 3
    assert torch.equal(three[0], one[0])
    assert not torch.equal(three[1], one[0])


def test_a_query_sees_itself_only_where_no_round_finds_another_key():
    method = Reformer(rounds=2, chunk=2, buckets=16)
    q, k, _ = qkv(12, B=1, H=1)
    v = torch.eye(12)[None, None]  # the outputs are the weights
    weights = method(q, k, v)[0, 0]
    others = [(part[0, 0] * (1 - torch.eye(12))).sum(-1) for part in met(method, q)]
    alone = (others[0] + others[1]) == 0
    once = (others[0] > 0) ^ (others[1] > 0)
    assert alone.any()
    assert once.any()
    assert ((weights.diagonal() == 1) == alone).all()
    assert (weights.diagonal()[~alone] == 0).all()


def test_similar_queries_meet():
    centres = 4 * normal(1, 2, 8, 16, seed=3)
    q = centres.repeat_interleave(32, dim=2) + 0.3 * normal(1, 2, 256, 16)
    together = torch.arange(256) // 32
    same = (together[:, None] == together).float()
    pairs = sum(met(Reformer(rounds=4, chunk=32), q))
    assert (pairs * same).sum() / pairs.sum() > 0.6  # 1/8 by chance
