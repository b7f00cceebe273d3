"""Clustered attention with a tail: the rule by length, what is exact, and that it is nearer than its parts."""

import pytest
import torch

import subquad as sq
from subquad import ClusteredTail, Mask
from subquad.methods.clustered_tail import OF_ITEM, OF_RECTANGLE, by_length
from subquad.testing.oracle import normal, qkv


def error(method, q, k, v) -> float:
    exact = sq.attention(q, k, v, method="full")
    return float((sq.attention(q, k, v, method=method) - exact).norm() / exact.norm())


@pytest.mark.parametrize(
    ("length", "clusters", "keys"), [(1, 1, 1), (2, 2, 2), (200, 20, 40), (512, 32, 64), (513, 33, 65)]
)
def test_sizes_by_length(length, clusters, keys):
    assert by_length(0, OF_ITEM.clusters, length, None) == (clusters, None)
    assert by_length(0, OF_ITEM.topk, length, None) == (keys, None)
    assert by_length(7, OF_ITEM.topk, length, torch.tensor([5])) == (min(7, length), None)


@pytest.mark.parametrize("backend", [name for name, state in sq.backends().items() if state == "available"])
def test_sizes_are_each_items_own(backend):
    """An item is computed as if it were alone, however long the others are and wherever its padding stands."""
    lengths = [90, 33, 1]
    q, k, v = qkv(90, B=3, D=8, E=6)
    with sq.use_backend(backend):
        out = sq.attention(q, k, v, method="clustered-tail", mask=Mask.padding(lengths))
        for item, n in enumerate(lengths):
            alone = sq.attention(*(x[item : item + 1, :, :n] for x in (q, k, v)), method="clustered-tail")
            torch.testing.assert_close(out[item : item + 1, :, :n], alone, atol=1e-5, rtol=1e-5)
        left = torch.arange(90) >= 90 - torch.tensor(lengths)[:, None]
        rolled = [torch.stack([x[i].roll(90 - n, 1) for i, n in enumerate(lengths)]) for x in (q, k, v)]
        shifted = sq.attention(*rolled, method="clustered-tail", mask=Mask.padding(left))
        for item, n in enumerate(lengths):
            torch.testing.assert_close(shifted[item, :, 90 - n :], out[item, :, :n], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("exact", ["topk=90", "cells=90", "clusters=70", "topk=1000", "cells=1000"])
def test_exact_limits(exact):
    assert error(f"clustered-tail:{exact}", *qkv(70, 90)) < 1e-6


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("backend", [name for name, state in sq.backends().items() if state == "available"])
def test_a_window_is_that_of_a_sum_with_local(backend, padded):
    """The same keys, each once, and the same weights: the sum goes through other code."""
    q, k, v = qkv(150, B=3, H=4, D=8, E=6)
    mask = Mask.padding([150, 61, 9]) if padded else None
    settings = "clusters=9,topk=12,cells=6"
    for window in (1, 7, 200):
        with sq.use_backend(backend):
            inside = sq.attention(q, k, v, method=f"clustered-tail:{settings},window={window}", mask=mask)
        beside = sq.attention(q, k, v, method=f"local:window={window}+clustered-tail:{settings}", mask=mask)
        torch.testing.assert_close(inside, beside, atol=1e-5, rtol=1e-5)
        assert (window < 200) == (error(f"clustered-tail:{settings},window={window}", q, k, v) > 1e-5)


def test_a_window_of_zero_is_none():
    q, k, v = qkv(80)
    plain = sq.attention(q, k, v, method="clustered-tail:clusters=5,topk=6")
    assert torch.equal(plain, sq.attention(q, k, v, method="clustered-tail:clusters=5,topk=6,window=0"))
    assert not torch.equal(plain, sq.attention(q, k, v, method="clustered-tail:clusters=5,topk=6,window=1"))


@pytest.mark.parametrize("queries", ["rectangle", "earlier"])
def test_a_window_reaches_over_the_edge_of_a_block(queries):
    """Under a causal mask the first query of a block meets the keys before it exactly, wherever padding stands."""
    q, k, v = qkv(64, B=2, D=8)
    lengths = [64, 37]
    left = torch.arange(64) >= 64 - torch.tensor(lengths)[:, None]
    settings = f"clusters=2,topk=1,cells=1,block=16,last=0,queries={queries}"
    mask = Mask.causal() & Mask.padding(lengths)
    exact = sq.attention(q, k, v, method="full", mask=mask)
    wide = sq.attention(q, k, v, method=f"clustered-tail:{settings},window=64", mask=mask)
    torch.testing.assert_close(wide, exact, atol=1e-5, rtol=1e-5)
    near = sq.attention(q, k, v, method=f"clustered-tail:{settings},window=5", mask=mask)
    assert (
        1e-3
        < float((near - exact).norm())
        < float((sq.attention(q, k, v, method=f"clustered-tail:{settings}", mask=mask) - exact).norm())
    )
    rolled = [torch.stack([x[i].roll(64 - n, 1) for i, n in enumerate(lengths)]) for x in (q, k, v)]
    shifted = sq.attention(
        *rolled, method=f"clustered-tail:{settings},window=5", mask=Mask.causal() & Mask.padding(left)
    )
    for item, n in enumerate(lengths):
        torch.testing.assert_close(shifted[item, :, 64 - n :], near[item, :, :n], atol=1e-5, rtol=1e-5)


def test_each_cure_brings_it_nearer():
    """On queries and keys of few directions, as trained models have them, some of which all keys share."""
    basis, shared = normal(24, 32, seed=1), 4 * normal(1, 1, 1, 32, seed=2)
    spread = torch.linspace(3, 0.1, 24)
    q = (normal(1, 4, 400, 24, seed=3) * spread.flip(0)) @ basis / 6
    k = (normal(1, 4, 400, 24, seed=4) * spread) @ basis / 6 + shared
    v = normal(1, 4, 400, 16, seed=5) + k[..., :16]
    plain = error("i-clustered:clusters=30,topk=24", q, k, v)
    one_cell = error("clustered-tail:clusters=30,topk=24,cells=1", q, k, v)
    cells = error("clustered-tail:clusters=30,topk=24,cells=8", q, k, v)
    assert cells < 0.9 * one_cell < 0.9 * 0.9 * plain
    assert error(ClusteredTail(clusters=30, topk=24, cells=8, refine=0), q, k, v) > cells


def test_sizes_in_rectangles_grow_with_the_power_of_three_quarters():
    """The sizes grow as they do from 1,024 tokens on; the sizes of padded items are those that they have alone."""
    for tokens, clusters, topk in ((64, 8, 46), (1024, 32, 182), (4096, 91, 512), (16384, 256, 1449)):
        assert by_length(0, OF_RECTANGLE.clusters, tokens, None) == (clusters, None)
        assert by_length(0, OF_RECTANGLE.topk, tokens, None) == (topk, None)
    lengths = torch.arange(1, 5000)
    for growth in (*OF_RECTANGLE, *OF_ITEM):
        most, sizes = by_length(0, growth, 5000, lengths)
        alone = [by_length(0, growth, int(length), None)[0] for length in lengths]
        assert torch.minimum(sizes, lengths).tolist() == alone
        assert alone[-1] <= most
