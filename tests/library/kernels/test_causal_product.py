"""Causal products against the masked quadratic form, forward and backward."""

import pytest
import torch
from torch import Tensor

from subquad.kernels.attention.products.op import causal_product
from subquad.testing.oracle import gradients, normal, tracked


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """tril(q kᵀ) v."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return (q @ k.mT).tril() @ v


def some(N: int, *, H: int = 2, G: int = 2, R: int = 5, E: int = 3, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    shapes = (2, H, N, R), (2, G, N, R), (2, G, N, E)
    return tracked(*(normal(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)))


@pytest.mark.parametrize("N", [1, 2, 63, 64, 65, 127, 200])
@pytest.mark.parametrize(("H", "G"), [(2, 2), (4, 2), (3, 1)])
def test_equals_the_masked_quadratic_forward_and_backward(N: int, H: int, G: int):
    inputs = some(N, H=H, G=G)
    out, wanted = causal_product(*inputs), masked(*inputs)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(gradients(out, *inputs), gradients(wanted, *inputs))


def test_in_fp32():
    inputs = some(300, R=32, E=16, dtype=torch.float32)
    out, wanted = causal_product(*inputs), masked(*(x.double() for x in inputs))
    assert out.dtype == torch.float32
    assert (out - wanted).norm() / wanted.norm() < 1e-6


def test_the_gradient_is_the_operation_on_reversed_sequences():
    q, k, v = inputs = some(150)
    g = normal(2, 2, 150, 3, seed=9, dtype=torch.float64)
    dq, dk, dv = torch.autograd.grad(causal_product(*inputs), inputs, g)

    def backwards(*given: Tensor) -> Tensor:
        return causal_product(*(x.flip(2) for x in given)).flip(2)

    torch.testing.assert_close([dq, dk, dv], [causal_product(g, v, k), backwards(v, g, q), backwards(k, q, g)])


def test_the_future_changes_nothing_and_the_past_everything():
    q, k, v = some(130)
    for x in (q, k, v):
        changed = [torch.cat([a[:, :, :70], 1e6 + a[:, :, 70:]], 2) if a is x else a for a in (q, k, v)]
        assert torch.equal(causal_product(*changed)[:, :, :70], causal_product(q, k, v)[:, :, :70])
    first = torch.cat([1 + v[:, :, :1], v[:, :, 1:]], 2)
    assert (causal_product(q, k, first) != causal_product(q, k, v)).all()


def test_strided_inputs_equal_contiguous_ones():
    inputs = some(70)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    assert not strided[0].is_contiguous()
    torch.testing.assert_close(causal_product(*strided), causal_product(*inputs))
