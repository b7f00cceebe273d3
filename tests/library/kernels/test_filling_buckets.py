"""Filling buckets: every backend takes the same tokens, whatever the ties, the padding and the sample that it saw."""

import functools

import pytest
import torch
from torch import Tensor

import subquad as sq
from subquad import Mask
from subquad.kernels import native
from subquad.kernels.native import interface
from subquad.kernels.selection.balanced import balanced_buckets, enlarged
from subquad.kernels.selection.blocks.op import by_bucket
from subquad.kernels.selection.hash_functions import Hashed, HashFunctions, hashed
from subquad.kernels.selection.top.op import top_and_best
from subquad.kernels.selection.top.reference import log_odds
from subquad.testing.oracle import normal, qkv
from subquad.tools.bench.calls import threads

compiled = pytest.mark.skipif(native.refusal() is not None, reason=f"no compiled kernels: {native.refusal()}")

by_score = functools.partial(balanced_buckets, odds=False)


def top_of_each_bucket(scores: Tensor, sizes: Tensor, most: int, valid: Tensor | None) -> Tensor:
    return top_and_best(scores, sizes, most, valid, odds=False)[0]


def one_by_one(scores, sizes, valid) -> torch.Tensor:
    """The best tokens of each column, by a sort of (score, token) pairs."""
    B, H, N, C = scores.shape
    slots = torch.full((B, H, C, int(sizes.max())), N)
    for b, h, c in torch.cartesian_prod(*map(torch.arange, (B, H, C))).tolist():
        column, taken = scores[b, h, :, c].tolist(), [True] * N if valid is None else valid[b].tolist()
        tokens = [i for i in range(N) if taken[i] and column[i] > -torch.inf]
        best = sorted(tokens, key=lambda i: (-column[i], i))[: int(sizes[b])]
        slots[b, h, c, : len(best)] = torch.tensor(sorted(best))
    return slots


@pytest.mark.covering
@pytest.mark.parametrize(("N", "C"), [(1, 1), (7, 3), (50, 16), (61, 40), (300, 5)])
@pytest.mark.parametrize("kind", ["normal", "ties", "equal", "hidden"])
def test_takes_the_best_of_each_column(implementation, poisoned, N, C, kind):
    scores = normal(2, 2, N, C)
    scores = {"normal": scores, "ties": scores.round(), "equal": 0 * scores, "hidden": scores}[kind]
    if kind == "hidden":
        scores[:, :, 1::2] = -torch.inf
    valid = torch.stack([torch.ones(N, dtype=torch.bool), normal(N, seed=2) > 0])
    sizes = torch.tensor([max(1, N // 3), min(max(1, N // 5), int(valid[1].sum()))])
    for given in (None, valid):
        most = int(sizes.max())
        assert torch.equal(top_of_each_bucket(scores, sizes, most, given), one_by_one(scores, sizes, given))


def test_a_share_of_the_tokens_is_rounded_down_and_no_further():
    """98 tokens in 49 buckets are 2 each, which 98·(1/49) misses in floating point."""
    lengths = torch.arange(3000)
    for buckets in (1, 3, 7, 49, 98, 103, 161):
        assert torch.equal(enlarged(lengths, buckets, 1.0), (lengths // buckets).clamp(min=1).minimum(lengths))


def test_fewer_tokens_than_are_asked_for(implementation):
    valid = torch.tensor([[True, False, True], [False, False, False]])
    have = top_of_each_bucket(normal(2, 1, 3, 2), torch.tensor([2, 0]), 3, valid)
    assert have.tolist() == [[[[0, 2, 3]] * 2], [[[3, 3, 3]] * 2]]


@pytest.mark.covering
@pytest.mark.parametrize("order", ["rising", "falling", "waves", "rare", "equal"])
@pytest.mark.parametrize("wanted", [1, 181, 1500])
def test_long_columns_in_any_order(implementation, order, wanted):
    """Whatever a sample of the tokens says of the rest: orders with its period, and peaks that it misses."""
    N = 5000
    steps = torch.arange(N).float()
    columns = {
        "rising": steps,
        "falling": -steps,
        "waves": (steps * (2 * torch.pi / 5)).cos(),
        "rare": (steps % 7 == 3).float() * steps,
        "equal": torch.zeros(N),
    }
    scores = columns[order][None, None, :, None] * torch.tensor([1.0, -1.0, 3.0])
    have = top_of_each_bucket(scores, torch.tensor([wanted]), wanted, None)
    best = scores.transpose(-1, -2).sort(descending=True, stable=True).indices[..., :wanted].sort().values
    assert torch.equal(have, best)


@pytest.mark.covering
@pytest.mark.parametrize("spread", [1.0, 30.0, 200.0])
@pytest.mark.parametrize("C", [1, 2, 9, 16, 37])
def test_by_log_odds_as_the_softmax_orders_them(implementation, spread, C):
    """Also where the softmax rounds to 1 or to 0."""
    scores = spread * normal(2, 2, 90, C)
    sizes = torch.tensor([20, 9])
    slots, best = top_and_best(scores, sizes, 20, None, odds=True)
    with sq.use_backend("reference"):
        assert torch.equal(slots, top_of_each_bucket(log_odds(scores.double()), sizes, 20, None))
    assert torch.equal(best, scores.argmax(-1))


@pytest.mark.covering
@pytest.mark.parametrize("kind", ["linear", "mlp"])
@pytest.mark.parametrize("tied", [False, True], ids=["one", "tied"])
@pytest.mark.parametrize(("N", "D", "C", "hidden"), [(40, 8, 5, 7), (33, 24, 16, 64), (1500, 5, 37, 3)])
def test_hashes_that_are_still_to_be_computed(implementation, poisoned, kind, tied, N, D, C, hidden):
    """They equal their scores; with more hidden units than the width, fewer, and more tokens than are taken at once."""
    functions = HashFunctions(6, 2, D, C, kind=kind, hidden=hidden, seed=1)
    with torch.no_grad():
        for parameter in functions.parameters():
            parameter += 0.3 * normal(*parameter.shape, seed=7)
    q, k, _ = qkv(N, H=6, G=2, D=D)
    of_query, of_key = hashed(q, k, functions, 0.3)
    valid = torch.arange(N).expand(2, -1) < torch.tensor([[N], [N - 9]])
    how = {"sizes": torch.tensor([11, 3]), "most": 11, "odds": True}
    for scores in (of_query + of_key,) if tied else (of_query, of_key):
        for some in (None, valid):
            slots, best = top_and_best(scores, valid=some, **how)
            with sq.use_backend("reference"):
                want, best_of = top_and_best(scores.scores().detach(), valid=some, **how)
            by = torch.nn.functional.pad(log_odds(scores.scores().detach()).mT, (0, 1), value=torch.inf)
            taken, wanted = (by.gather(3, x).sort(-1).values for x in (slots, want))
            torch.testing.assert_close(taken, wanted, atol=1e-5, rtol=1e-5)  # near ties may go either way
            seen = torch.ones(2, N, dtype=torch.bool) if some is None else some
            assert torch.equal(best * seen[:, None], best_of * seen[:, None])


def test_nan_is_confined_to_its_head(implementation):
    scores = normal(2, 2, 40, 5)
    clean = top_and_best(scores, torch.tensor([9, 9]), 9, None, odds=True)
    scores[0, 0, 3] = torch.nan
    slots, best = top_and_best(scores, torch.tensor([9, 9]), 9, None, odds=True)
    assert slots.max() <= 40
    assert best.max() < 5
    assert torch.equal(slots[1], clean[0][1])
    assert torch.equal(best[0, 1], clean[1][0, 1])


@pytest.mark.parametrize("size", [1, 4, 32])
def test_blocks_hold_the_tokens_of_their_label_in_order(implementation, poisoned, size):
    labels = torch.randint(6, (2, 3, 50), generator=torch.Generator().manual_seed(0))  # 5 is none
    tokens, bucket = by_bucket(labels, 5, size)
    for b, h in torch.cartesian_prod(torch.arange(2), torch.arange(3)).tolist():
        for label in range(5):
            listed = tokens[b, h][bucket[b, h] == label].flatten()
            assert torch.equal(listed[listed < 50], (labels[b, h] == label).nonzero()[:, 0])
    assert (tokens < 50).sum() == (labels < 5).sum()
    assert (tokens < 50).any(3).sum(2).max() == tokens.shape[2]


def test_no_labels_no_blocks(implementation):
    tokens, bucket = by_bucket(torch.full((1, 2, 9), 4), 4)
    assert (tokens.shape[2], bucket.shape[2]) == (0, 0)


@compiled
@pytest.mark.parametrize("fill", [balanced_buckets, by_score])
@pytest.mark.parametrize("mask", [Mask(), Mask.padding([60, 13]), Mask.causal()], ids=["whole", "padded", "causal"])
def test_whole_buckets_equal_the_references(variant, fill, mask):
    scores = normal(2, 3, 60, 7), normal(2, 3, 60, 7, seed=1)
    for options in ({"enlarge": 2**0.5}, {"enlarge": 1.0, "size": 8}):
        results = []
        for backend in ("reference", "cpu"):
            with sq.use_backend(backend):
                results.append(fill(*scores, mask, **options))
        for a, b in zip(*results, strict=True):
            assert torch.equal(a.queries, b.queries)
            assert torch.equal(a.keys, b.keys)
            assert (a.bucket is None) == (b.bucket is None)
            assert a.bucket is None or torch.equal(a.bucket, b.bucket)


@compiled
@pytest.mark.parametrize("count", [2, 5])
def test_the_number_of_threads_changes_nothing(count, monkeypatch):
    monkeypatch.setattr(interface, "SMALL", 0)
    scores = normal(1, 2, 3000, 70)
    results = []
    for number in (1, count):
        with threads(number):
            results.append(balanced_buckets(scores, scores, Mask(), enlarge=1.4))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a.queries, b.queries)
        assert torch.equal(a.keys, b.keys)


@compiled
def test_fp64_is_refused_when_forced_and_left_to_the_reference_otherwise():
    dtype = torch.float64
    scores, sizes = normal(1, 1, 9, 3, dtype=dtype), torch.tensor([2])
    with sq.use_backend("cpu"), pytest.raises(ValueError, match=f"cannot run this call: the dtype is {dtype}"):
        top_of_each_bucket(scores, sizes, 2, None)
    assert torch.equal(top_of_each_bucket(scores, sizes, 2, None), one_by_one(scores, sizes, None))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scores_of_16_bits_are_ranked_as_they_are(implementation, dtype):
    scores, sizes = normal(1, 2, 40, 3, dtype=dtype), torch.tensor([5])
    assert torch.equal(top_of_each_bucket(scores, sizes, 5, None), one_by_one(scores, sizes, None))


def test_heads_that_share_one_function_read_no_other(implementation):
    x, function = normal(2, 3, 30, 5), HashFunctions(1, 1, 5, 4, kind="mlp", hidden=6, seed=0).query
    scores = Hashed(((function, x),), 3, 1.0)
    sizes = torch.full((2,), 6)
    tokens, best = top_and_best(scores, sizes, 6, None, odds=False)
    want, best_of_scores = top_and_best(scores.scores().detach(), sizes, 6, None, odds=False)
    assert torch.equal(tokens.sort(-1).values, want.sort(-1).values)
    assert torch.equal(best, best_of_scores)
