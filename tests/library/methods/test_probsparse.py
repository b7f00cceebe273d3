"""ProbSparse attention against weights computed row by row, its sample, its causal means, and what it refuses."""

import math

import pytest
import torch
from torch import Tensor

import subquad as sq
from subquad import Mask
from subquad.core.randomness import uniform
from subquad.kernels.tokens.positions import ValidPositions
from subquad.methods.probsparse import budget, budgets, sample
from subquad.testing.oracle import naive, normal, qkv
from tests.library.methods.random_calls import FEW_AND_MANY, RandomCall, assert_equal_both_ways, random_calls


def count(tokens: int, factor: int) -> int:
    """c·⌈ln n⌉ of n tokens, one at least."""
    return min(max(factor * math.ceil(math.log(tokens)), 1), tokens) if tokens else 0


def sampled_keys(valid: list[int], head: int, factor: int, seed: int) -> list[int]:
    """One real key out of each of U equal runs."""
    U = count(len(valid), factor)
    drawn = [float(uniform(seed, torch.tensor(head * 2**32 + s))) for s in range(U)]
    runs = [valid[s * len(valid) // U : (s + 1) * len(valid) // U] for s in range(U)]
    return [run[int(share * len(run))] for run, share in zip(runs, drawn, strict=True)]


def rows_of(logits: Tensor, seen: Tensor, queries: list[int], keys: list[int], head: int, method) -> Tensor:
    """The weights (N,M) of one head of one item; `seen` (N,M) says who sees whom."""
    weights = [logits.new_zeros(logits.shape[1]) for _ in logits]
    chosen = sampled_keys(keys, head, method.factor, method.seed)
    measure = {}
    for i in queries:
        some = [float(logits[i, j].detach()) for j in chosen if seen[i, j]]
        measure[i] = max(some) - sum(some) / len(some) if some else 0.0
    best = sorted(queries, key=lambda i: -measure[i])[: count(len(queries), method.factor)]
    for i in (i for i in queries if seen[i].any()):
        exact = logits[i].masked_fill(~seen[i], -torch.inf).softmax(0)
        weights[i] = exact if i in best else seen[i] / seen[i].sum()
    return torch.stack(weights)


def listed(valid: Tensor | None, item: int, tokens: int) -> list[int]:
    """The numbers of an item's real tokens."""
    return list(range(tokens)) if valid is None else valid[item].nonzero()[:, 0].tolist()


def oracle(call: RandomCall) -> Tensor:
    """Every row of weights, one after the other."""
    (query, key, value), mask, method = call.inputs, call.mask, call.bound.method
    (B, H, N, D), M = query.shape, key.shape[2]
    key, value = (x.repeat_interleave(H // x.shape[1], dim=1) for x in (key, value))
    logits, seen = query @ key.mT * D**-0.5, mask.to_dense(N, M).expand(B, 1, N, M)[:, 0]
    items = []
    for b in range(B):
        queries, keys = listed(mask.query_padding(N), b, N), listed(mask.key_padding(M), b, M)
        heads = [rows_of(logits[b, h], seen[b], queries, keys, h, method) @ value[b, h] for h in range(H)]
        items.append(torch.stack(heads))
    return torch.stack(items)


@FEW_AND_MANY
@pytest.mark.parametrize("factor", [1, 2, 5])
def test_equals_the_dense_rows_forward_and_backward(factor: int, shapes: int):
    for call in random_calls(sq.ProbSparse(factor=factor), shapes):
        assert_equal_both_ways(call, call.bound(*call.inputs, mask=call.mask), oracle(call))


# ---------------------------------------------------------------------- the sample


@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 20, 21, 54, 55, 403, 404, 8103, 8104])
def test_the_numbers_of_keys_and_queries_are_those_of_the_paper(n):
    for factor in (1, 5):
        assert budget(n, factor) == count(n, factor)
        assert budgets(torch.tensor([0, n]), factor).tolist() == [0, count(n, factor)]


def test_a_sample_is_one_real_key_of_each_run_and_depends_on_head_seed_and_length_alone():
    valid = torch.arange(60) >= torch.tensor([[0], [13], [60]])
    line = ValidPositions.from_mask(Mask.padding(valid), torch.zeros(3, 4, 60, 1), torch.zeros(3, 4, 60, 1))
    drawn = sample(line, torch.arange(4), 5, seed=3).tokens
    assert drawn.shape == (3, 4, 25)
    assert (drawn[0].diff(dim=-1) > 0).all()  # no key twice
    assert (drawn[1, :, :20] >= 13).all()
    assert (drawn[1, :, 20:] == 60).all()  # 5·⌈ln 47⌉ of the second item
    assert (drawn[2] == 60).all()  # none of an item without keys
    assert len({tuple(of_head) for of_head in drawn[0].tolist()}) == 4
    line = ValidPositions.from_mask(Mask(), torch.zeros(1, 2, 47, 1), torch.zeros(1, 2, 47, 1))
    assert torch.equal(sample(line, torch.arange(2), 5, seed=3).tokens + 13, drawn[1:2, :2, :20])
    assert not torch.equal(sample(line, torch.arange(2), 5, seed=4).tokens + 13, drawn[1:2, :2, :20])


def test_queries_that_stand_out_are_exact_and_flat_ones_are_the_mean():
    q, k, v = qkv(200, B=1, D=8)
    q = 0.01 * q
    q[:, :, [3, 90, 199]] *= 1000
    out, exact = sq.attention(q, k, v, method="probsparse:factor=1"), naive(q, k, v)
    torch.testing.assert_close(out[:, :, [3, 90, 199]], exact[:, :, [3, 90, 199]])
    mean = v.mean(2, keepdim=True).expand_as(out)
    at_mean = torch.isclose(out, mean, atol=1e-6).all(-1)
    assert (at_mean.sum(-1) == 200 - 6).all()  # 6 = ⌈ln 200⌉
    assert (out - exact).abs().max() < 0.1


# ---------------------------------------------------------------------- causal


def test_causal_rows_outside_the_choice_are_means_of_the_prefix_not_sums():
    _, k, v = qkv(100)
    q = torch.zeros(2, 2, 100, 8)  # all measures are 0: the first queries are taken, and exact is the mean too
    out = sq.attention(q, k, v, method="probsparse", is_causal=True)
    prefix = v.cumsum(2) / torch.arange(1, 101)[:, None]
    torch.testing.assert_close(out, prefix, atol=1e-5, rtol=1e-5)
    assert (v.cumsum(2) - prefix).abs().max() > 1  # what published code gives


def test_the_choice_alone_looks_ahead():
    q, k, v = qkv(100)
    other = torch.cat([q[:, :, :60], 20 * q[:, :, 60:]], dim=2)
    ours, theirs = (sq.attention(x, k, v, method="probsparse:factor=2", is_causal=True)[:, :, :60] for x in (q, other))
    changed = (ours - theirs).abs().amax(-1) > 1e-6
    assert changed.any()  # some earlier queries lost their exact rows to later ones
    prefix = (v.cumsum(2) / torch.arange(1, 101)[:, None])[:, :, :60]
    torch.testing.assert_close(theirs[changed], prefix[changed])


def test_causal_queries_that_stand_elsewhere_among_the_keys():
    q, k, v = qkv(20)
    for offset in (3, 25, torch.tensor([2, 11])):
        mask = Mask.causal(offset=offset)
        out = sq.attention(q, k, v, method="probsparse:factor=20", mask=mask)
        torch.testing.assert_close(out, naive(q, k, v, mask.to_dense(20, 20)))
    flat = sq.attention(0 * q, k, v, method="probsparse:factor=1", mask=Mask.causal(offset=3))
    torch.testing.assert_close(flat, torch.stack([v[:, :, : i + 4].mean(2) for i in range(20)], dim=2))


@pytest.mark.parametrize("offset", [0, 49])
def test_causal_steps_are_refused_with_the_reason(offset):
    with pytest.raises(ValueError, match=r"'probsparse' compares all queries .* no step on a cache .*use_cache=False"):
        sq.attention(*qkv(1, 50), method="probsparse", mask=Mask.causal(offset=offset))


# ---------------------------------------------------------------------- log-sum-exp, dropout, what it refuses


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_log_sum_exp_is_exact_or_a_lower_bound(is_causal):
    q, k, v = qkv(60)
    out, lse = sq.attention(q, k, v, method="probsparse:factor=1", is_causal=is_causal, return_lse=True)
    seen = torch.ones(60, 60, dtype=torch.bool).tril() if is_causal else torch.ones(60, 60, dtype=torch.bool)
    logits = q @ k.mT * 8**-0.5
    true = logits.masked_fill(~seen, -torch.inf).logsumexp(-1)
    exact = torch.isclose(out, naive(q, k, v, seen), atol=1e-5).all(-1)
    torch.testing.assert_close(lse[exact], true[exact])
    mean = logits.masked_fill(~seen, 0.0).sum(-1) / seen.sum(-1) + seen.sum(-1).log()
    torch.testing.assert_close(lse[~exact], mean[~exact])
    assert (lse <= true + 1e-5).all()


def test_kept_tokens_are_exact():
    q, k, v = qkv(60)
    out = sq.attention(q, k, v, method="probsparse:factor=1", keep=[0, 17])
    torch.testing.assert_close(out[:, :, [0, 17]], naive(q, k, v)[:, :, [0, 17]])


def test_dropout_drops_keys_of_the_mean_for_all_queries_together():
    torch.manual_seed(0)
    v = torch.eye(50).expand(1, 1, 50, 50)
    out = sq.attention(torch.zeros(1, 1, 50, 4), normal(1, 1, 50, 4), v, method="probsparse:factor=1", dropout_p=0.5)
    rows = out[0, 0, 4:]  # the first 4 are exact
    assert (rows == rows[0]).all()
    assert set(rows[0].mul(50).round().tolist()) == {0.0, 2.0}


@pytest.mark.parametrize("bad", ["factor=0", "factor=-1", "factor=0.5"])
def test_a_factor_below_one_is_refused(bad):
    with pytest.raises(ValueError, match=r"'probsparse': factor=.*a whole number"):
        sq.attention(*qkv(), method=f"probsparse:{bad}")


def test_causal_layers_of_a_model_refuse_it_with_the_reason():
    from tests.library.hf.models import build

    with pytest.raises(ValueError, match="'probsparse' is not causal and this layer is"):
        sq.hf.swap(build("gpt2").model, "probsparse")
