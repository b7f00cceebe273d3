"""Tokens by label and by score: torch's own sorts, so that any sizes are quick."""

import pytest
import torch

import subquad as sq
from subquad.kernels.selection.blocks.op import sorted_blocks
from subquad.kernels.selection.hash_functions import HashFunctions, hashed
from subquad.kernels.selection.top import triton
from subquad.kernels.selection.top.op import top_and_best
from subquad.kernels.selection.top.reference import log_odds
from subquad.testing.oracle import normal, qkv
from tests.library.triton.devices import DEVICE
from tests.library.triton.interpreted.fences import fenced


def on_both(function, *arguments, **options):
    """Return the results of the reference and of the backend."""
    results = []
    for backend in ("reference", "triton"):
        with sq.use_backend(backend):
            results.append(function(*arguments, **options))
    return results


@pytest.mark.parametrize(("N", "C", "size"), [(1, 1, 1), (50, 5, 4), (131, 40, 32), (7, 3, 9), (0, 2, 4)])
def test_blocks_equal_the_reference(poisoned, N, C, size):
    labels = torch.randint(C + 1, (2, 3, N), generator=torch.Generator(DEVICE).manual_seed(0))  # C is none
    labels[1] = C
    want, have = on_both(sorted_blocks, fenced(labels), C, size)
    for a, b in zip(have, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("number", [-1, 6, 2**31, 2**32 + 1, -(2**63), 2**63 - 1])
def test_labels_of_no_bucket_are_in_none(number):
    labels = torch.tensor([0, number, 4, 0]).view(1, 1, 4)
    want, have = on_both(sorted_blocks, torch.where(labels == number, 5, labels), 5, 2)[0], None
    with sq.use_backend("triton"):
        have = sorted_blocks(labels, 5, 2)
    for a, b in zip(have, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.long)], ids=str)
@pytest.mark.parametrize(("N", "C", "most"), [(1, 1, 1), (61, 5, 20), (50, 3, 70)])
@pytest.mark.parametrize("kind", ["normal", "ties", "none", "nan"])
def test_scores_are_ranked_as_by_the_reference(poisoned, dtype, N, C, most, kind):
    scores = normal(2, 3, N, C).to(dtype)
    scores = scores.round() if kind == "ties" else scores
    if kind in ("none", "nan"):
        scores[0, 1, ::3] = -torch.inf if kind == "none" else torch.nan
    valid = torch.arange(N)[None] < torch.tensor([N, N // 2])[:, None]
    for given in (None, valid):
        how = {"sizes": torch.tensor([min(most, N), N // 3]), "most": most, "valid": given, "odds": False}
        for a, b in zip(*on_both(top_and_best, fenced(scores), **how), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("kind", ["linear", "mlp"])
@pytest.mark.parametrize("tied", [False, True], ids=["one", "tied"])
@pytest.mark.parametrize("at_once", [False, True], ids=["head by head", "all heads"])
def test_hashes_that_are_still_to_be_computed(poisoned, monkeypatch, kind, tied, at_once):
    """Also where two terms have different numbers of heads; scores that nearly tie may go either way."""
    monkeypatch.setattr(triton, "SCORES", 10**9 if at_once else 0)
    functions = HashFunctions(6, 2, 24, 5, kind=kind, hidden=7, seed=1)
    with torch.no_grad():
        for parameter in functions.parameters():
            parameter += 0.3 * normal(*parameter.shape, seed=7)
    q, k, _ = qkv(33, H=6, G=2, D=24)
    of_query, of_key = hashed(fenced(q), fenced(k), functions, 0.3)
    for scores in (of_query + of_key,) if tied else (of_query, of_key):
        how = {"sizes": torch.tensor([11, 3]), "most": 11, "valid": None, "odds": True}
        (slots, best), (want, best_of) = on_both(top_and_best, scores, **how)
        by = torch.nn.functional.pad(log_odds(scores.scores().detach()).mT, (0, 1), value=torch.inf)
        taken, wanted = (by.gather(3, x).sort(-1).values for x in (slots, want))
        torch.testing.assert_close(taken, wanted, atol=1e-5, rtol=1e-5)
        assert torch.equal(best, best_of)


def test_fp64_is_refused():
    with sq.use_backend("triton"), pytest.raises(ValueError, match=r"the dtype is torch\.float64"):
        top_and_best(normal(1, 1, 4, 2).double(), torch.tensor([2]), 2, None, odds=False)
