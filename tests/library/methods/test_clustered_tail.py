"""Clustered attention with a tail: the rule by length, what is exact, and that it is nearer than its parts."""

import pytest
import torch

import subquad as sq
from subquad import ClusteredTail, Mask
from subquad.methods.clustered_tail import by_length
from subquad.testing.oracle import normal, qkv


def error(method, q, k, v) -> float:
    exact = sq.attention(q, k, v, method="full")
    return float((sq.attention(q, k, v, method=method) - exact).norm() / exact.norm())


@pytest.mark.parametrize(
    ("length", "clusters", "keys"), [(1, 1, 1), (2, 2, 2), (200, 20, 40), (512, 32, 64), (513, 33, 65)]
)
def test_sizes_by_length(length, clusters, keys):
    assert by_length(0, 2, length, None) == (clusters, None)
    assert by_length(0, 8, length, None) == (keys, None)
    assert by_length(7, 8, length, torch.tensor([5])) == (min(7, length), None)


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
