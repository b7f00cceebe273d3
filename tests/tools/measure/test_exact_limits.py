"""Up to which length settings make a method exact attention."""

import math

import pytest
import torch

from subquad.methods import parse_method
from subquad.tools.measure.exact_limits import exact_up_to


@pytest.mark.parametrize(
    ("method", "causal", "dtype", "most"),
    [
        ("full", True, torch.float32, math.inf),
        ("full:kernel=subquad", True, torch.float32, 0),
        ("clustered-tail", True, torch.float32, 1024),
        ("clustered-tail", True, torch.bfloat16, 2048),
        ("i-clustered:block=64", True, torch.bfloat16, 128),
        ("i-clustered:block=64,last=0", True, torch.float16, 64),
        ("clustered-tail", False, torch.bfloat16, 0),
        ("clustered-tail:topk=300", False, torch.float32, 300),
        ("local:window=16", False, torch.float32, 16),
        ("lsh", False, torch.float32, 0),
    ],
)
def test_exact_attention_up_to(method, causal, dtype, most):
    assert exact_up_to(parse_method(method), causal, dtype) == most
