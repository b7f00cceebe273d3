"""Causal products in Triton's interpreter equal the reference in fp64, forward and backward."""

import pytest
import torch

import subquad as sq
from subquad.kernels.attention.products.op import causal_product
from subquad.testing.oracle import gradients, qkv, tracked
from tests.library.kernels.test_feature_attention_cpu import assert_near
from tests.library.triton.interpreted.fences import fenced

SHAPES = [
    {"N": 131, "D": 33, "E": 35, "B": 1, "H": 1},
    {"N": 65, "H": 4, "G": 2, "D": 7, "E": 20},
    {"N": 37, "H": 3, "G": 1, "D": 5, "E": 3},
    {"N": 1, "D": 5, "E": 7},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_reference(poisoned, shape):
    inputs, results = qkv(**shape), []
    for backend, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        some = tracked(*(x.to(dtype) for x in inputs))
        with sq.use_backend(backend):
            out = causal_product(*some)
        results.append([out, *gradients(out, *some)])
    assert_near(*results)


def test_gradients_have_gradients():
    results = []
    for backend, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        some = tracked(*(x.to(dtype) for x in qkv(20, H=4, G=2, D=5, E=3)))
        with sq.use_backend(backend):
            first = torch.autograd.grad(causal_product(*some).square().sum(), some, create_graph=True)
            results.append(gradients(torch.cat([x.flatten() for x in first]), *some))
    assert_near(*results)


def test_strides_and_fences():
    q, k, v = qkv(70, B=1, D=5, E=3)
    inside = fenced(q), fenced(k.transpose(1, 2).contiguous()).transpose(1, 2), fenced(v.mT.contiguous()).mT
    with sq.use_backend("triton"):
        assert torch.equal(causal_product(*inside), causal_product(q, k, v))


def test_a_later_nan_stays_in_its_head():
    q, k, v = qkv(70, H=2, D=5, E=3)
    k[0, 1, 30, 2] = torch.nan
    with sq.use_backend("triton"):
        out = causal_product(q, k, v)
    assert out[1].isfinite().all()
    assert out[0, 0].isfinite().all()
    assert out[0, 1, 30:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_dtypes_are_refused_by_name(dtype):
    with sq.use_backend("triton"), pytest.raises(ValueError, match=str(dtype)):
        causal_product(*(x.to(dtype) for x in qkv(8, D=6)))


def test_heads_that_do_not_share_are_refused():
    q, k, v = qkv(8, H=3, G=2)
    with pytest.raises(ValueError, match="3 query heads and 2 key heads"):
        torch.ops.subquad.directed_product("triton", q, k, v, False)
