import pytest
import torch

from subquad.kernels.triton import largest
from subquad.testing.oracle import normal
from tests.library.triton.interpreted.fences import fenced


def listed(values, K, *, dtype=torch.int32, **how):
    out = torch.full((*values.shape[:3], K), -5, dtype=dtype)
    lse = torch.empty(values.shape[:3])
    ranks = torch.full(values.shape, -5, dtype=torch.int32)
    largest.list_largest(fenced(values), out, empty=values.shape[3], lse=lse, ranks=ranks, **how)
    return out, lse, ranks


def by_sort(values, K, wanted=None, *, finite=True):
    """A stable sort: of equal numbers those in front; NaN is the largest."""
    n = values.shape[3]
    by = torch.where(values.isnan(), torch.inf, values.double().clamp(max=1e300))
    order = by.sort(dim=-1, descending=True, stable=True).indices[..., :K]
    count = torch.tensor([K] * values.shape[0]) if wanted is None else wanted.clamp(0, K)
    taken = (torch.arange(K) < count[:, None, None, None]).expand(*values.shape[:3], K)
    if finite:
        taken = taken & ~values.gather(3, order).isneginf()
    return torch.where(taken, order, n).sort(-1).values


KINDS = {
    "normal": lambda x: x,
    "ties": lambda x: x.round(),
    "equal": lambda x: x * 0 + 2,
    "zeros of both signs": lambda x: x.sign() * 0.0,
    "none": lambda x: x.where(x > 0.5, -torch.inf),
    "nan and infinity": lambda x: x.where(x < 1, torch.nan).where(x < 1.5, torch.inf),
    "tiny": lambda x: x * 1e-42,
    "huge": lambda x: x * 1e37,
}


@pytest.mark.parametrize(
    ("kind", "n", "K", "finite"),
    [(kind, 50, 17, True) for kind in KINDS]
    + [("none", 50, 17, False), ("normal", 1, 1, True), ("ties", 20, 20, True)],
)
@pytest.mark.parametrize("front", [16, largest.FRONT], ids=["in parts", "whole"])
def test_lists_equal_those_of_a_stable_sort(poisoned, monkeypatch, kind, n, K, finite, front):
    monkeypatch.setattr(largest, "FRONT", front)
    values = KINDS[kind](normal(2, 1, 2, n))
    out, lse, ranks = listed(values, K, finite=finite)
    want = by_sort(values, K, finite=finite)
    assert torch.equal(out.long(), want)
    padded = torch.cat([values, torch.full((2, 1, 2, 1), -torch.inf)], -1)
    torch.testing.assert_close(lse, padded.gather(3, want).logsumexp(3), equal_nan=True)
    slots = torch.full((2, 1, 2, n + 1), -1).scatter(3, want, torch.arange(K).expand(2, 1, 2, K))[..., :n]
    assert torch.equal(ranks.long(), slots)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_items_want_their_own_numbers(dtype):
    values, wanted = normal(4, 2, 1, 30), torch.tensor([5, 0, 9, 3])
    out, _, _ = listed(values, 5, wanted=wanted, dtype=dtype)
    assert torch.equal(out.long(), by_sort(values, 5, wanted))


def test_places_in_blocks_are_those_of_the_whole():
    values = normal(1, 1, 2, 12)
    blocks = torch.tensor([[[[0, 2, 7], [1, 4, 5]]]], dtype=torch.int32)
    out, _, _ = listed(values, 4, of_blocks=blocks, block=4)
    place = by_sort(values, 4)
    assert torch.equal(out.long(), blocks.long().gather(3, place // 4) * 4 + place % 4)
