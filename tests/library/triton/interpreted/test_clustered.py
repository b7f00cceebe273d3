"""Clustered attention and attention with a tail in Triton equal plain PyTorch, forward and backward."""

import pytest
import torch

import subquad as sq
from subquad.kernels.attention.clustered import triton as clustered
from subquad.kernels.attention.clustered.centroids import attend_and_list
from subquad.kernels.attention.clustered.op import clustered_attention
from subquad.kernels.attention.tail.op import attend_with_tail
from subquad.kernels.attention.tail.visible_key_cells import visible_key_cells
from subquad.testing.oracle import normal, qkv, tracked
from tests.library.triton.devices import CLOSE, DTYPES
from tests.library.triton.interpreted.clustered_calls import both
from tests.library.triton.interpreted.fences import fenced

SHAPES = {
    "shared key heads": {"N": 19, "M": 17, "B": 1, "H": 2, "G": 1, "D": 9, "E": 17},
    "several tiles": {"N": 70, "M": 67, "B": 1, "H": 1, "D": 8, "E": 3},
    "padded": {"N": 18, "M": 15, "B": 2, "H": 1, "D": 5, "E": 6},
    "one key": {"N": 5, "M": 1, "B": 1, "H": 1, "D": 3, "E": 2},
    "one query": {"N": 1, "M": 20, "B": 1, "H": 1, "D": 3, "E": 2},
}
# Numbers of 16 bits differ in their tiles alone.
CASES = [(shape, torch.float32) for shape in SHAPES] + [("several tiles", dtype) for dtype in DTYPES[1:]]
CALLS = {
    "clustered": {"clusters": 4, "topk": 0},
    "improved": {"clusters": 4, "topk": 5},
    "all keys": {"clusters": 3, "topk": 80},
    "tail": {"clusters": 4, "topk": 5, "cells": 3},
    "many cells": {"clusters": 3, "topk": 0, "cells": 19},
    "tail of others": {"clusters": 4, "topk": 5, "cells": 3},
}


def valid(B: int, N: int, M: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Padding in the middle of both sides; the last item has no key."""
    queries, keys = torch.arange(N) % 5 != 3, torch.arange(M) % 4 != 1
    return queries.expand(B, N), keys.expand(B, M) & (torch.arange(B) < B - 1)[:, None]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of logarithms of 0
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("shape", "dtype"), CASES)
def test_equals_the_reference(poisoned, call, shape, dtype):
    if call == "many cells" and shape != "several tiles":
        pytest.skip("each cell and head is one more program, which takes the interpreter long")
    sizes = SHAPES[shape]
    inputs = qkv(**sizes, dtype=dtype)
    padding = valid(sizes["B"], sizes["N"], sizes["M"]) if shape == "padded" else (None, None)
    have = both(kind(call), "triton", *map(fenced, inputs), padding, **CALLS[call])
    want = both(kind(call), "reference", *inputs, padding, **CALLS[call])
    for a, b in zip(have, want, strict=True):
        largest = max(1.0, b[b.isfinite()].abs().max().item()) if b.isfinite().any() else 1.0
        torch.testing.assert_close(a.float(), b.float(), atol=CLOSE[dtype] * largest, rtol=CLOSE[dtype])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("call", ["clustered", "improved"])
@pytest.mark.parametrize("padded", [False, True])
def test_cells_of_neighbours_are_merged(poisoned, monkeypatch, call, padded):
    monkeypatch.setattr(clustered, "CHUNK", 16)
    inputs, padding = qkv(9, 37, B=2, H=2, G=1, D=5, E=6), valid(2, 9, 37) if padded else (None, None)
    have, want = (both("clustered", b, *inputs, padding, **CALLS[call]) for b in ("triton", "reference"))
    torch.testing.assert_close(have, want, atol=1e-5, rtol=1e-5)


def kind(call: str) -> str:
    return call if call == "tail of others" else "tail" if "cells" in CALLS[call] else "clustered"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("call", "place"), [("improved", 0), ("tail", 1), ("improved", 2)])
def test_nan_is_kept_and_stays_in_its_head(poisoned, call, place):
    inputs = qkv(9, 12, B=2, H=2, D=4, E=3)
    dirty = [x.clone() for x in inputs]
    dirty[place][0, 1, 4] = torch.nan
    have, want = (both(kind(call), b, *dirty, (None, None), **CALLS[call]) for b in ("triton", "reference"))
    clean = both(kind(call), "triton", *inputs, (None, None), **CALLS[call])
    for a, b, c in zip(have, want, clean, strict=True):
        assert (a.isfinite() <= b.isfinite()).all()  # what is NaN in the reference is not finite here
        other = torch.ones(2, 2, dtype=torch.bool)
        other[0, 1] = False
        assert torch.equal(a[other], c[other])


def test_strides_of_any_kind_are_read():
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv(20, 24, B=2, H=2, D=6, E=6))
    upcast = torch.empty(2, 2, 24, 12)[..., ::2].copy_(k)
    have = both("tail", "triton", q, upcast, v[:, :1].expand(-1, 2, -1, -1), (None, None), **CALLS["tail"])
    want = both("tail", "reference", q, k, v[:, :1].expand(-1, 2, -1, -1), (None, None), **CALLS["tail"])
    torch.testing.assert_close(have, want, atol=1e-5, rtol=1e-5)


LABELS, CELL = torch.arange(6).expand(2, 2, 6) % 2, torch.arange(8).expand(2, 2, 8) % 2


def clustered_call(q, k, v, topk):
    how = {"clusters": 2, "bits": 4, "iterations": 1, "scale": 0.4, "seed": 0, "wants_lse": True}
    return clustered_attention(q, k, v, None, None, topk=topk, labels=LABELS, **how)


CALLS_WITH_LSE = {
    "clustered": lambda q, k, v: clustered_call(q, k, v, 0),
    "improved": lambda q, k, v: clustered_call(q, k, v, 3),
    "tail": lambda q, k, v: attend_with_tail(q, k, v, LABELS, CELL, None, clusters=2, topk=3, cells=2, scale=0.4),
}
W = normal(2, 2, 6, seed=5)
GRADIENTS_OF_LSE = {
    "items and heads exchanged": W.transpose(0, 1).contiguous().transpose(0, 1),
    "heads and queries exchanged": W.transpose(1, 2).contiguous().transpose(1, 2),
    "one number": torch.ones(()).expand(2, 2, 6),
}


@pytest.mark.parametrize("call", CALLS_WITH_LSE.values(), ids=CALLS_WITH_LSE)
@pytest.mark.parametrize("grad", GRADIENTS_OF_LSE.values(), ids=GRADIENTS_OF_LSE)
def test_a_gradient_of_lse_may_have_any_strides(call, grad):
    results = []
    for backend in ("reference", "triton"):
        inputs = tracked(*qkv(6, 8, B=2, H=2, D=4, E=3))
        with sq.use_backend(backend):
            out, lse = call(*inputs)
        results.append(torch.autograd.grad((out, lse), inputs, (torch.ones_like(out), grad)))
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("lost", [slice(None), slice(0, None, 2), slice(0, 4)], ids=["all", "a cell", "a run"])
@pytest.mark.parametrize("call", ["clustered", "improved", "tail", "cells"])
def test_keys_whose_logits_are_all_minus_infinity_have_no_mean(monkeypatch, call, lost):
    """In a cell of a tail, too; a run of keys that is a cell for the sake of the work alone does not count."""
    monkeypatch.setattr(clustered, "CHUNK", 4)
    q, k, v = qkv(6, 8, B=2, H=2, D=4, E=3)
    q, k[..., lost, 0] = q.abs() + 0.1, -torch.inf
    calls = CALLS_WITH_LSE | {
        "cells": lambda q, k, v: attend_with_tail(q, k, v, LABELS, CELL, None, clusters=2, topk=0, cells=2, scale=0.4)
    }
    results = []
    for backend in ("reference", "triton"):
        inputs = tracked(q, k, v)
        with sq.use_backend(backend):
            out, _ = calls[call](*inputs)
        results.append([out, *torch.autograd.grad(out.sum(), inputs)])
    (want, *of_want), (have, *of_have) = results
    torch.testing.assert_close(have, want, atol=1e-5, rtol=1e-5, equal_nan=True)
    assert all((a.isfinite() <= b.isfinite()).all() for a, b in zip(of_want, of_have, strict=True))


@pytest.mark.parametrize("call", CALLS_WITH_LSE.values(), ids=CALLS_WITH_LSE)
def test_values_near_the_largest(monkeypatch, call):
    monkeypatch.setattr(clustered, "CHUNK", 4)
    q, k, v = qkv(6, 8, B=2, H=2, D=4, E=3)
    with sq.use_backend("triton"):
        out, _ = call(q, k, torch.full_like(v, 3e38))
    torch.testing.assert_close(out, torch.full_like(out, 3e38))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_cells_have_gradients_of_their_own(poisoned):
    """Ranks send each other parts of their keys: the cells, and the numbers of the keys that are not in them."""
    cell, terms = torch.arange(17)[None, None] % 3, normal(1, 2, 17, seed=4)
    found = []
    for backend in ("triton", "reference"):
        q, k, v = inputs = tracked(*qkv(4, 17, B=1, H=2, G=1, D=5, E=6))
        with sq.use_backend(backend):
            seen = visible_key_cells(q, k, v, cell, terms, cells=3, topk=3, scale=0.4)
            listed = attend_and_list(q, k, v, None, topk=3, scale=0.4)
        loss = sum((x * normal(*x.shape, seed=n)).sum() for n, x in enumerate((*seen[:3], *listed[:2])))
        found.append([*seen, *listed, *torch.autograd.grad(loss, inputs)])
    torch.testing.assert_close(*found, atol=2e-5, rtol=1e-5)
