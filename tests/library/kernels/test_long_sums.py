"""Sums over many keys or queries: their rounding errors do not grow with the number of addends, as in SDPA.

Equal addends are the hardest: each step of one long sum rounds in the same direction, so errors add up.
"""

import pytest
import torch
from torch import Tensor

import subquad as sq
from subquad.kernels import native
from subquad.testing.oracle import normal

pytestmark = pytest.mark.skipif(native.refusal() is not None, reason=f"no compiled kernels: {native.refusal()}")

MANY, FEW, LIMIT = 32_768, 48, 3e-6  # that of SDPA is 2e-6 for 2,048 equal values, and no larger for more
OF_MANY_KEYS = [
    "full:kernel=subquad",
    "clustered:clusters=4",
    "i-clustered:clusters=4,topk=8",
    "clustered-tail:clusters=4,topk=8,cells=4",
    "clustered-tail:clusters=4,topk=0,cells=1",
    "lsh:buckets=2",
    "linear",
    "performer:features=16",
]
WITH_EQUAL_WEIGHTS = OF_MANY_KEYS[:5]  # if all logits are 0
OF_LONG_INPUTS = [
    ("clustered:clusters=64", True),
    ("i-clustered:clusters=64,topk=8", True),
    ("clustered-tail", True),
    ("linear", True),
    ("performer:features=16", True),
    ("keep:first=4", False),
]


def values(kind: str) -> Tensor:
    """(1,1,MANY,16): all .1, or 1 with noise."""
    return torch.full((1, 1, MANY, 16), 0.1) if kind == "equal" else 1 + 0.1 * normal(1, 1, MANY, 16, seed=3)


def assert_close(have: Tensor, want: Tensor) -> None:
    error = ((have.double() - want) / want).abs().max()
    assert error < LIMIT, f"the largest relative error is {error:.1e}"


@pytest.mark.parametrize("method", OF_MANY_KEYS)
def test_values_of_many_keys(method: str, variant: str):
    """Equal values come through as they are; queries of 0 have the mean of other values, whatever their clusters."""
    query, key = torch.zeros(1, 1, FEW, 16), normal(1, 1, MANY, 16, seed=1)
    for kind in ("equal", "nearly equal")[: 2 if method in WITH_EQUAL_WEIGHTS else 1]:
        value = values(kind)
        assert_close(sq.attention(query, key, value, method=method), value.double().mean(2, keepdim=True))


@pytest.mark.parametrize(("method", "causal"), OF_LONG_INPUTS)
def test_values_of_long_inputs(method: str, causal: bool):
    """Equal values come through as they are."""
    query, key = 0.2 * normal(1, 1, MANY, 16), normal(1, 1, MANY, 16, seed=1)
    value = values("equal")
    assert_close(sq.attention(query, key, value, method=method, is_causal=causal), value.double())


@pytest.mark.parametrize("method", OF_MANY_KEYS)
def test_gradients_of_many_queries(method: str, variant: str):
    """A value's gradient is the sum of its weights; keys of 0 have equal ones."""
    query, key = normal(1, 1, MANY, 16), torch.zeros(1, 1, FEW, 16)
    value = normal(1, 1, FEW, 16, seed=2).requires_grad_()
    out = sq.attention(query, key, value, method=method)
    (have,) = torch.autograd.grad(out.sum(), value)
    assert_close(have.sum(2), torch.full((1, 1, 16), float(MANY)).double())


@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_long_sums_of_16_bit_numbers(dtype: torch.dtype, limit: float, variant: str):
    query, key = torch.zeros(1, 1, 16, 16, dtype=dtype), torch.zeros(1, 1, 2**18, 16, dtype=dtype)
    value = torch.full((1, 1, 2**18, 16), 0.1, dtype=dtype)
    have = sq.attention(query, key, value, method="full:kernel=subquad")
    torch.testing.assert_close(have, value[:, :, :16], rtol=limit / 2, atol=0)
