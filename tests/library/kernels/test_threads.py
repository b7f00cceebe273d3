"""Results of compiled kernels do not depend on the number of threads, bit for bit."""

import pytest
import torch
from torch import Tensor

import subquad as sq
from subquad.kernels import native
from subquad.kernels.attention.features.op import feature_attention
from subquad.kernels.attention.products.op import causal_product
from subquad.kernels.native import interface
from subquad.testing.oracle import normal
from subquad.tools.bench.calls import threads

pytestmark = pytest.mark.skipif(native.refusal() is not None, reason=f"no compiled kernels: {native.refusal()}")

PATTERNS = [{}, {"causal": True}, {"lagged": (100, 1)}, {"lagged": (7, 3)}]


def both_ways(op, inputs: list[Tensor]) -> list[Tensor]:
    inputs = [x.clone().requires_grad_() for x in inputs]
    outputs = op(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    of_outputs = [normal(*x.shape, seed=9 + i) for i, x in enumerate(outputs)]
    return [*outputs, *torch.autograd.grad(outputs, inputs, of_outputs, materialize_grads=True)]


def assert_equal_for_all_numbers(monkeypatch, op, inputs: list[Tensor]) -> None:
    monkeypatch.setattr(interface, "SMALL", 0)  # several threads for little work too
    results = []
    for number in (1, 2, 3):
        with threads(number), sq.use_backend("cpu"):
            results.append(both_ways(op, inputs))
    for more in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], more, strict=True))


@pytest.mark.parametrize("tokens", [60, 700, 2000])
@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (4, 2)], ids=str)
@pytest.mark.parametrize("scale", [1.0, 100.0])
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_features(monkeypatch, pattern, scale, heads, tokens):
    shapes = (heads[0], 40), (heads[1], 40), (heads[1], 9)
    q, k, v = (normal(1, h, tokens, width, seed=i) for i, (h, width) in enumerate(shapes))
    assert_equal_for_all_numbers(monkeypatch, lambda *given: feature_attention(*given, **pattern), [q, k * scale, v])


@pytest.mark.parametrize("tokens", [60, 700, 2000])
@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (4, 2), (2, 4)], ids=str)
def test_causal_products(monkeypatch, heads, tokens):
    shapes = (heads[0], 20), (heads[1], 20), (heads[1], 9)
    inputs = [normal(1, h, tokens, width, seed=i) for i, (h, width) in enumerate(shapes)]
    assert_equal_for_all_numbers(monkeypatch, causal_product, inputs)


@pytest.mark.parametrize("tokens", [60, 700])
@pytest.mark.parametrize("method", ["clustered", "i-clustered", "clustered-tail", "performer", "linear", "reformer"])
def test_methods(monkeypatch, method, tokens):
    inputs = [normal(1, 3, tokens, 16, seed=i) for i in range(3)]
    assert_equal_for_all_numbers(monkeypatch, lambda *given: sq.attention(*given, method=method), inputs)


def test_values_near_the_largest():
    """One sum over features and keys of values whose mean is finite is finite on all backends."""
    q, k = normal(1, 1, 64, 8, seed=1), normal(1, 1, 64, 8, seed=2)
    v = torch.full((1, 1, 64, 3), 3e38)
    for pattern in PATTERNS[:3]:
        for backend in ("reference", "cpu"):
            with sq.use_backend(backend):
                out, lse = feature_attention(q, k, v, **pattern)
            seen = ~lse.isneginf()
            assert out.isfinite().all()
            torch.testing.assert_close(out[seen], v[seen], rtol=1e-5, atol=0)
