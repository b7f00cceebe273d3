"""First meetings of pairs against counting them one by one; the rest less what it gave; keys' weights by features."""

import random

import pytest
import torch
from torch import Tensor

from subquad import Mask
from subquad.kernels.attention.pairs.op import attend_pairs
from subquad.kernels.attention.residual_merging import merge_with_residual
from subquad.kernels.selection.deduplication import BITS, first_meetings
from subquad.kernels.tokens.slots import Buckets
from subquad.testing.oracle import gradients, normal, tracked


def random_set(draw: random.Random, N: int, M: int, buckets: int, span: int | None) -> Buckets:
    """Buckets of random queries and keys, each once in a list; some blocks share a bucket, some slots are empty."""

    def lists(tokens: int, count: int, size: int) -> Tensor:
        rows = [draw.sample(range(tokens + 1), min(size, tokens + 1)) for _ in range(count)]
        return torch.tensor(rows).view(1, 1, count, -1)

    keys = lists(M, buckets, 3)
    if draw.random() < 0.5:
        return Buckets(lists(N, buckets, 4), keys, span=span)
    order = torch.tensor(draw.sample(range(N), N // 2 * 2)).view(1, 1, 2, -1)  # a query is in one block
    return Buckets(order, keys, torch.tensor([[draw.choices(range(buckets), k=2)]]), span=span)


@pytest.mark.parametrize("seed", range(12))
def test_a_pair_is_shown_where_it_meets_first(seed: int):
    draw = random.Random(seed)
    N, M = draw.randint(8, 12), draw.randint(8, 12)
    mask = Mask(offset=draw.choice([None, 2]))
    sets = [
        random_set(draw, N, M, draw.choice([2, 3, BITS + 5]), draw.choice([None, None, 3])) for _ in range(3)
    ]  # fmt: skip
    met: set[tuple[int, int]] = set()
    firsts = (None, *first_meetings(sets[1:], N, M, mask, before=sets[:1]))
    for each, first in zip(sets, firsts, strict=True):
        keys = each.keys_of_block()
        order = range(each.queries.shape[2])
        if each.bucket is not None:  # buckets count in their order, whatever the order of the blocks
            order = sorted(order, key=lambda block: int(each.bucket[0, 0, block]))
        for block in order:
            for i, query in enumerate(each.queries[0, 0, block].tolist()):
                for j, key in enumerate(keys[0, 0, block].tolist()):
                    meets = each.span is None or abs(query + (mask.offset or 0) - key) <= each.span
                    if query < N and key < M and meets:
                        if first is not None:
                            assert bool(first[0, 0, block, i, j]) == ((query, key) not in met)
                        met.add((query, key))


def test_sets_without_tokens_meet_nowhere():
    none = torch.zeros(1, 1, 0, 4, dtype=torch.int64)
    (first,) = first_meetings([Buckets(none, none)], 3, 3, Mask())
    assert first.shape == (1, 1, 0, 4, 4)


def test_pairs_that_are_not_shown_do_not_count():
    q, k, v = tracked(*(normal(1, 2, 6, 4, seed=seed, dtype=torch.float64) for seed in range(3)))
    slots = torch.arange(6).expand(1, 2, 1, 6)
    shown = normal(1, 2, 1, 6, 6, seed=4) > 0
    out, lse = attend_pairs(q, k, v, Buckets(slots, slots), Mask(), scale=0.5, shown=(shown,))
    logits = (q @ k.mT * 0.5).masked_fill(~shown[:, :, 0], -torch.inf)
    torch.testing.assert_close(lse, logits.logsumexp(-1))
    want = logits.softmax(-1).nan_to_num() @ v
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(gradients(out, q, k, v), gradients(want, q, k, v))


def test_logits_of_features_are_logarithms_of_their_products():
    q, k, v = tracked(*(normal(1, 2, 6, 4, seed=seed, dtype=torch.float64) for seed in range(3)))
    slots = torch.arange(6).expand(1, 2, 1, 6)
    out, lse = attend_pairs(q, k, v, Buckets(slots, slots), Mask(), scale=9.0, by_features=True)
    weights = q.exp() @ k.exp().mT
    torch.testing.assert_close(lse, weights.sum(-1).log())
    want = weights / weights.sum(-1, keepdim=True) @ v
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(gradients(out, q, k, v), gradients(want, q, k, v))


def partial(weights: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights @ values / total.clamp(min=1e-30), 0.0), total[..., 0].log()


def test_the_rest_is_merged_less_what_it_gave():
    values = normal(1, 1, 5, 3, seed=1, dtype=torch.float64)
    exact, rest = (normal(1, 1, 4, 5, seed=seed, dtype=torch.float64).exp() for seed in (2, 3))
    met = torch.tensor([[1, 0, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0], [0, 0, 0, 0, 1]])
    want = partial(torch.where(met > 0, exact, rest), values)
    have = merge_with_residual(partial(exact * met, values), partial(rest, values), partial(rest * met, values))
    torch.testing.assert_close(have, want)


def test_rounding_of_the_rest_is_left_out_and_nan_is_not():
    met = torch.tensor([[[[1.0]]]]), torch.tensor([[[-50.0]]])
    rest, almost = ((torch.tensor([[[[9.0]]]]), torch.tensor([[[lse]]])) for lse in (3.0, 2.999999))
    out, lse = merge_with_residual(met, rest, almost)
    assert (out.item(), lse.item()) == (1.0, -50.0)
    lost = rest[0], torch.full_like(rest[1], torch.nan)
    assert merge_with_residual(met, lost, almost)[0].isnan().all()
