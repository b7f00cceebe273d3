"""Gradients of compiled kernels at large logits are as exact as those of plain PyTorch in fp32.

Weights that a backward pass makes again as e^{logit − lse} are wrong by what rounding took from the log-sum-exp, and
where one key has all the weight, dO·V − δ must be exactly 0: keys of 1e18 multiply whatever is left of it.
"""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import subquad as sq
from subquad import Mask
from subquad.kernels import native
from subquad.kernels.attention.clustered.op import clustered_attention
from subquad.kernels.attention.features.op import feature_attention
from subquad.kernels.attention.listed.op import attend_listed
from subquad.kernels.attention.pairs.op import attend_pairs
from subquad.kernels.attention.tail.op import attend_with_tail
from subquad.kernels.tokens.slots import Buckets
from subquad.testing.oracle import normal

pytestmark = pytest.mark.skipif(native.refusal() is not None, reason=f"no compiled kernels: {native.refusal()}")
N, M, D, E, SCALE = 60, 70, 16, 12, 0.25
LABELS = (torch.arange(N) * 7 % 5).expand(1, 2, -1).contiguous()
CELL = (torch.arange(M) * 3 % 4).expand(1, 2, -1).contiguous()
LISTED = normal(1, 2, 5, M, seed=5).argsort(-1)[..., :6].sort(-1).values
QUERY_SLOTS = normal(1, 2, 6, N, seed=6).argsort(-1)[..., :20]  # a query is in up to six buckets, or in none
KEY_SLOTS = normal(1, 2, 6, M, seed=7).argsort(-1)[..., :24]
DRAWN = normal(24, D, seed=9)  # the rows of random features
ROWS = torch.arange(M).view(1, 1, 5, 14).expand(1, 2, -1, -1).contiguous()


def pairs(q: Tensor, k: Tensor, v: Tensor):
    return attend_pairs(q, k, v, Buckets(QUERY_SLOTS, KEY_SLOTS), Mask(), scale=SCALE)


def whole(q: Tensor, k: Tensor, v: Tensor):
    every = torch.arange(N).expand(1, 2, 1, -1), torch.arange(M).expand(1, 2, 1, -1)
    return attend_pairs(q, k, v, Buckets(*every), Mask(), scale=SCALE)


def tail(q: Tensor, k: Tensor, v: Tensor):
    return attend_with_tail(q, k, v, LABELS, CELL, LISTED, clusters=5, topk=6, cells=4, scale=SCALE)


def clustered(q: Tensor, k: Tensor, v: Tensor, topk: int = 0):
    settings = {"clusters": 5, "topk": topk, "bits": 7, "iterations": 1, "scale": SCALE, "seed": 0}
    return clustered_attention(q, k, v, None, None, **settings, labels=LABELS, wants_lse=True)


def improved(q: Tensor, k: Tensor, v: Tensor):
    return clustered(q, k, v, topk=9)


def listed(q: Tensor, k: Tensor, v: Tensor):
    return attend_listed(q, k, v, k.new_zeros(1, 2, M), LABELS, ROWS, scale=SCALE)


def projected(q: Tensor, k: Tensor, v: Tensor, **pattern: Any):
    tokens, rows = N if pattern else M, DRAWN.to(q.dtype)[None]
    return feature_attention(q, k[:, :, :tokens], v[:, :, :tokens], of_query=rows, of_key=rows, **pattern)


def performer(q: Tensor, k: Tensor, v: Tensor, **pattern: Any):
    tokens = N if pattern else M
    q, k = (x @ DRAWN.to(x.dtype).mT - x.square().sum(-1, keepdim=True) / 2 for x in (q, k))
    return feature_attention(q, k[:, :, :tokens], v[:, :, :tokens], **pattern)


def linear(q: Tensor, k: Tensor, v: Tensor, **pattern: Any):
    tokens = N if pattern else M
    q, k = (torch.where(x > 0, x.clamp(min=0).log1p(), x) for x in (q, k))  # ln (elu + 1)
    return feature_attention(q, k[:, :, :tokens], v[:, :, :tokens], **pattern)


PATTERNS: list[dict[str, Any]] = [{}, {"causal": True}, {"lagged": (7, 2)}]
OPS = [pairs, whole, tail, clustered, improved, listed]
FEATURES = [partial(op, **pattern) for op in (projected, performer, linear) for pattern in PATTERNS]
WANTED = {"out": (1.0, 0.0), "lse": (0.0, 1.0), "both": (1.0, 1.0)}


def repr_of(op) -> str:
    return f"{op.func.__name__} {op.keywords}" if isinstance(op, partial) else op.__name__


def gradients_of(op, backend: str, dtype: torch.dtype, inputs: list[Tensor], wanted: str) -> list[Tensor]:
    inputs = [x.to(dtype).requires_grad_() for x in inputs]
    with sq.use_backend(backend):
        outputs = op(*inputs)
        chosen = [(x, i) for i, x in enumerate(outputs) if WANTED[wanted][i]]
        chosen = [(x if i == 0 else x.masked_fill(x.isneginf(), 0.0), i) for x, i in chosen]
        given = [normal(*x.shape, seed=8 + i).to(x.dtype) for x, i in chosen]
        grads = torch.autograd.grad([x for x, _ in chosen], inputs, given, allow_unused=True)
    return [torch.zeros_like(x) if grad is None else grad for grad, x in zip(grads, inputs, strict=True)]


def drawn(seed: int = 0, copies: int = 1) -> list[Tensor]:
    """Queries, keys that are each there `copies` times, and values."""
    key = normal(1, 2, M // copies, D, seed=seed + 10).repeat(1, 1, copies, 1)
    return [normal(1, 2, N, D, seed=seed), key, normal(1, 2, M, E, seed=seed + 20)]


@pytest.mark.parametrize("scale", [1e0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6])
@pytest.mark.parametrize("wanted", WANTED)
@pytest.mark.parametrize("op", [*OPS, *FEATURES], ids=repr_of)
def test_errors_are_those_of_plain_pytorch(variant, op, wanted, scale):
    q, k, v = drawn()
    inputs = [q, k * scale, v]
    truth = gradients_of(op, "reference", torch.float64, inputs, wanted)
    plain = gradients_of(op, "reference", torch.float32, inputs, wanted)
    for have, of_plain, want in zip(gradients_of(op, "cpu", torch.float32, inputs, wanted), plain, truth, strict=True):
        error, allowed = ((x - want).abs().max() for x in (have, of_plain))
        assert error <= 8 * allowed + 4e-6 * want.abs().max()


# The truth at 1e18 is that of fp64 at 1e4, where one key has all the weight already: fp64 too has no digits left of
# logits of 1e36. From there on the gradients of queries and keys grow with their scale.
SATURATED, LARGE = 1e4, 1e18


def at_large_scale(op, wanted: str, inputs: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients at 1e18, those of queries and keys divided by it, and what they should be."""
    q, k, v = inputs
    truth = gradients_of(op, "reference", torch.float64, [q * SATURATED, k * SATURATED, v], wanted)
    have = gradients_of(op, "cpu", torch.float32, [q * LARGE, k * LARGE, v], wanted)
    sides = [[x / scale for x in grads[:2]] + grads[2:] for grads, scale in ((have, LARGE), (truth, SATURATED))]
    return sides[0], sides[1]


@pytest.mark.parametrize("wanted", WANTED)
@pytest.mark.parametrize("op", OPS)
def test_one_key_with_all_the_weight(variant, op, wanted):
    have, want = at_large_scale(op, wanted, drawn())
    for a, b in zip(have, want, strict=True):
        torch.testing.assert_close(a.double(), b, atol=1e-5, rtol=1e-5)
    if wanted == "out" and op is not pairs:  # a key met in three buckets has three weights of a third
        assert all((x == 0).all() for x in have[:2])


@pytest.mark.parametrize("op", [pairs, whole, clustered, listed])
def test_equal_keys_share_the_weight(variant, op):
    """ln 2 and ln 5 are lost in a log-sum-exp of 1e36, and the weights are a half and a fifth all the same."""
    for copies in (2, 5):
        (_, _, of_value), (_, _, want) = at_large_scale(op, "out", drawn(copies=copies))
        torch.testing.assert_close(of_value.double(), want, atol=1e-5, rtol=1e-5)
        for a, b in zip(*at_large_scale(op, "lse", drawn(copies=copies)), strict=True):
            torch.testing.assert_close(a.double(), b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("wanted", WANTED)
@pytest.mark.parametrize("op", FEATURES[:2], ids=repr_of)
def test_one_feature_of_one_key_with_all_the_weight(variant, op, wanted):
    """The gradients of exponents are those of weights, which are 0 and 1."""
    q, k, v = drawn()
    want = gradients_of(op, "reference", torch.float64, [q * SATURATED, k * SATURATED, v], wanted)
    have = gradients_of(op, "cpu", torch.float32, [q * LARGE, k * LARGE, v], wanted)
    for a, b in zip(have, want, strict=True):
        torch.testing.assert_close(a.double(), b, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("wanted", WANTED)
@pytest.mark.parametrize("op", [whole, tail, improved])
def test_the_truth_is_as_exact(op, wanted):
    """A log-sum-exp that is rounded makes no weights in the reference either."""
    q, k, v = drawn()
    want = gradients_of(op, "reference", torch.float64, [q * SATURATED, k * SATURATED, v], wanted)
    for dtype, scale in ((torch.float32, SATURATED), (torch.float64, 1e12)):
        have = gradients_of(op, "reference", dtype, [q * scale, k * scale, v], wanted)
        for number, (a, b) in enumerate(zip(have, want, strict=True)):
            a = a.double() if number == 2 else a.double() * (SATURATED / scale)
            torch.testing.assert_close(a, b, atol=1e-6 * b.abs().max().item(), rtol=1e-5)
