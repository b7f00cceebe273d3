"""Tests of buckets made from scores: sizes, queries that no bucket takes, and buckets of one label."""

import functools

import pytest
import torch

from subquad import Mask
from subquad.kernels.selection import balanced
from subquad.kernels.selection.balanced import balanced_buckets, best_bucket, same_label_buckets
from subquad.kernels.tokens.slots import members
from subquad.testing.oracle import normal

N, C = 256, 8
ROOT = 2**0.5

by_score = functools.partial(balanced_buckets, odds=False)


def in_none(scores, fill, enlarge: float) -> float:
    """The share of queries that no bucket takes."""
    _, left_over = fill(scores, scores, Mask(), enlarge=enlarge)
    return float((left_over.queries < N).sum()) / scores[..., 0].numel()


def test_random_logits_leave_queries_without_a_bucket():
    logits = normal(12, 4, N, C)
    assert abs(in_none(logits, balanced_buckets, 1.0) - 0.156) < 0.015
    assert abs(in_none(logits, balanced_buckets, ROOT) - 0.034) < 0.01
    uniform = torch.special.ndtr(logits)
    assert abs(in_none(uniform, balanced_buckets, 1.0) - 0.27) < 0.015
    assert abs(in_none(uniform, balanced_buckets, ROOT) - 0.12) < 0.015


@pytest.mark.parametrize(("enlarge", "size"), [(1.0, 32), (ROOT, 45)])
def test_buckets_that_choose_independently_leave_the_expected_share(enlarge, size):
    found = in_none(normal(12, 4, N, C), by_score, enlarge)
    assert abs(found - (1 - size / N) ** C) < 0.015


@pytest.mark.parametrize("fill", [balanced_buckets, by_score])
@pytest.mark.parametrize("mask", [Mask(), Mask.padding([60, 13]), Mask.padding(keys=[60, 9])], ids=str)
def test_a_query_in_no_bucket_meets_the_keys_of_its_best_one_and_no_others(fill, mask):
    of_query, of_key = normal(2, 3, 60, 5), normal(2, 3, 60, 5, seed=1)
    chosen, left_over = fill(of_query, of_key, mask, enlarge=1.0)
    taken, met = chosen.multiplicity(60, 60, mask), left_over.multiplicity(60, 60, mask)
    inside = members(chosen.queries, 60).any(-1)
    best = of_query.argmax(-1)
    keys = members(chosen.keys, 60).mT  # (B,H,C,M)
    wanted = keys.gather(2, best[..., None].expand(-1, -1, -1, 60)) * ~inside[..., None]
    valid = mask.query_padding(60)
    wanted = wanted if valid is None else wanted * valid[:, None, :, None]
    assert torch.equal(met, wanted)
    assert (wanted.sum() > 0) & (taken.sum() > 0)
    assert ((taken > 0) & (met > 0)).sum() == 0


def test_under_a_causal_mask_it_meets_itself_as_well():
    scores, mask = normal(2, 3, 60, 5), Mask.causal() & Mask.padding([60, 13])
    chosen, left_over, alone = balanced_buckets(scores, scores, mask, enlarge=1.0)
    counts = sum(part.multiplicity(60, 60, mask) for part in (chosen, left_over, alone))
    valid = mask.query_padding(60)[:, None]
    assert (counts.diagonal(dim1=-2, dim2=-1) > 0).logical_and(valid).sum() == 3 * 73
    assert (counts.triu(1) == 0).all()
    outside = ~members(chosen.queries, 60).any(-1) & valid
    assert outside.any()
    assert torch.equal(alone.multiplicity(60, 60, mask), torch.diag_embed(outside.float()))
    assert (left_over.multiplicity(60, 60, mask).diagonal(dim1=-2, dim2=-1) == 0).all()


@pytest.mark.parametrize("enlarge", [1.0, ROOT, 20.0])
def test_sizes_are_each_items_own(enlarge):
    lengths = [60, 13, 3, 0]
    buckets, _ = balanced_buckets(
        normal(4, 2, 60, 5), normal(4, 2, 60, 5, seed=1), Mask.padding(lengths), enlarge=enlarge
    )  # fmt: skip
    for item, n in enumerate(lengths):
        wanted = min(n, max(1, int(n / 5 * enlarge)))
        assert ((buckets.queries[item] < 60).sum(-1) == wanted).all()
        assert ((buckets.keys[item] < 60).sum(-1) == wanted).all()


def test_a_bucket_size_is_enlarged_and_at_most_the_item():
    buckets, _ = balanced_buckets(
        normal(3, 2, 60, 5), normal(3, 2, 60, 5, seed=1), Mask.padding([60, 13, 5]), enlarge=1.5, size=6
    )  # fmt: skip
    assert (buckets.keys < 60).sum(-1)[:, 0, 0].tolist() == [9, 9, 5]


@pytest.mark.parametrize("mask", [Mask(), Mask.padding([70, 9]), Mask.causal(), Mask.causal() & Mask.padding([70, 9])])
@pytest.mark.parametrize("may_read", [True, False], ids=["parts", "one set"])
def test_tokens_of_a_label_meet_each_other_and_nobody_else(mask, may_read, monkeypatch):
    """Also where a label has more tokens than one block, and where it has none."""
    monkeypatch.setattr(balanced, "shapes_may_follow_data", lambda _: may_read)
    labels = torch.stack([torch.zeros(70), torch.arange(70) % 3 * 2]).long()[:, None].repeat(1, 2, 1)
    parts = same_label_buckets(labels, 6, mask)
    assert (len(parts) == 1) == (not may_read)
    counts = sum(part.multiplicity(70, 70, mask) for part in parts)
    same = labels[..., None] == labels[..., None, :]
    assert torch.equal(counts, (same & mask.to_dense(70, 70)).float())


def test_every_query_is_in_its_one_best_bucket():
    of_query, of_key, mask = (
        normal(2, 3, 60, 5),
        normal(2, 3, 40, 5, seed=1),
        Mask.padding(keys=[40, 4], queries=[9, 60]),
    )
    lengths = torch.tensor([7, 4])
    buckets = best_bucket(of_query, of_key, mask, lengths, 7)
    counts = buckets.multiplicity(60, 40, mask)
    for item in range(2):
        valid = mask.key_padding(40)[item]
        for head in range(3):
            for i in range(60):
                of_bucket = of_key[item, head, :, of_query[item, head, i].argmax()].masked_fill(~valid, -torch.inf)
                wanted = torch.zeros(40)
                if mask.query_padding(60)[item, i]:
                    wanted[of_bucket.topk(lengths[item]).indices] = 1.0
                assert torch.equal(counts[item, head, i], wanted)
