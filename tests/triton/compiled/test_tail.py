import pytest
import torch

from subquad.ops.parts.tail.op import attend_with_tail
from tests.triton.compiled.fits import assert_fits, meta


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("D", [64, 128])
def test_attention_with_a_tail(dtype, D):
    query, key, value = (meta(1, 32, 4096, D, dtype=dtype, grad=True) for _ in range(3))
    labels, cell = meta(1, 32, 4096, dtype=torch.int64), meta(1, 32, 4096, dtype=torch.int64)

    def both_directions() -> None:
        sizes = {"clusters": 128, "topk": 64, "cells": 16, "scale": D**-0.5}
        out, lse = attend_with_tail(query, key, value, labels, cell, None, **sizes)
        (out.sum() + lse.sum()).backward()

    assert len(assert_fits(both_directions)) == 23
