"""Causal inputs of 70,001 tokens, where numbers of pairs of tokens exceed 32 bits; one narrow head makes them cheap."""

import pytest
import torch

import subquad as sq
from subquad.testing.contract import bound_for
from subquad.testing.oracle import qkv

TOKENS, PADDING = 70_001, 5_000
METHODS = [
    "local:window=8",
    "longformer:window=8",
    "bigbird:block=32",
    "logsparse",
    "keep",
    "linear",
    "performer:features=16",
    "learned-feature-map:features=8,window=8",
    "rfa:features=16",
    "linformer:k=16",
    "adaptive-span:span=16",
    "sum",
    "clustered:clusters=20",
    "i-clustered:clusters=20,topk=8",
    "clustered-tail:clusters=20,topk=8,cells=4",
    "cluster-former",
    "reformer",
]
OFTEN = ("local:window=8", "clustered-tail:clusters=20,topk=8,cells=4")


@pytest.mark.parametrize("text", [pytest.param(x, marks=[] if x in OFTEN else [pytest.mark.long]) for x in METHODS])
def test_a_padded_item_equals_it_alone(text: str):
    """Also at the end, where positions are largest."""
    method, inputs = sq.parse_method(text), qkv(TOKENS, B=1, H=1, D=4, E=4)
    bound, valid = bound_for(method, *inputs), (torch.arange(TOKENS) >= PADDING)[None]
    with torch.no_grad():
        padded = bound(*inputs, mask=sq.Mask.causal() & sq.Mask.padding(valid))
        alone = bound(*(x[:, :, PADDING:] for x in inputs), is_causal=True)
    assert padded.isfinite().all()
    torch.testing.assert_close(padded[:, :, PADDING:], alone, atol=1e-5, rtol=1e-4)
