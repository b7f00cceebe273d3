"""Every bucketed method equals an N×N softmax with the counts of its own meetings, forward and backward."""

import random

import pytest
import torch
from torch import Tensor

import subquad as sq
from subquad import Mask
from tests.methods.dense import Bucketed, added, once_a_set, oracle, others_first, shared_keys, shared_unit_keys
from tests.oracle import gradients, normal, tracked

SHAPES = 80
METHODS = [
    Bucketed("lha:buckets=4,hidden=8"),
    Bucketed("lha:buckets=3,hash=linear,merge=union", once_a_set),
    Bucketed("lha:buckets=3,hidden=8,selection=argmax"),
    Bucketed("lha:buckets=5,bucket_size=4,hidden=8"),
    Bucketed("smyrf:clusters=3,rounds=2"),
    Bucketed("smyrf:cluster_size=6,rounds=1"),
    Bucketed("reformer:rounds=3,chunk=5", others_first, shared_unit_keys),
    Bucketed("reformer:rounds=1,chunk=3,buckets=6", others_first, shared_unit_keys),
    Bucketed("cluster-former:window=3,chunk=6,clusters=4"),
    Bucketed("lsh:buckets=4"),
    Bucketed("local:window=5"),
    Bucketed("routing:clusters=4", keys=shared_keys),
    Bucketed("routing:clusters=3,window=4", keys=shared_keys),
]


def some_mask(rng: random.Random, method: sq.Method, B: int, N: int, M: int) -> Mask:
    """Padding to the left, to the right or none, of both sides alike in self-attention; causal where it can be."""

    def real(tokens: int) -> Tensor:
        lengths = torch.tensor([rng.randint(0, tokens) for _ in range(B)])
        right = torch.arange(tokens) < lengths[:, None]
        return right.flip(1) if rng.random() < 0.5 else right

    mask = Mask()
    if rng.random() < 0.8:
        mask = Mask.padding(real(N)) if N == M and rng.random() < 0.7 else Mask.padding(keys=real(M), queries=real(N))
    causal = mask & Mask.causal(offset=0)
    return causal if rng.random() < 0.4 and method.refuses(causal, cross=N != M) is None else mask


@pytest.mark.parametrize("bucketed", METHODS, ids=lambda bucketed: bucketed.text)
def test_equals_dense_attention_with_the_same_meetings(bucketed: Bucketed):
    method = bucketed.method
    rng = random.Random(0)
    met = 0
    for shape in range(SHAPES):
        B, G, times, D, E = (rng.randint(1, 3), rng.randint(1, 2), rng.randint(1, 2), rng.randint(1, 5), 3)
        N = rng.randint(1, 40)
        M = rng.randint(1, 40) if method.traits.cross and rng.random() < 0.5 else N
        mask = some_mask(rng, method, B, N, M)
        sizes = (B, G * times, N, D), (B, G, M, D), (B, G, M, E)
        inputs = tracked(*(normal(*size, seed=3 * shape + i, dtype=torch.float64) for i, size in enumerate(sizes)))
        bound = method.bind(heads=G * times, kv_heads=G, head_dim=D, max_length=40).eval()
        *_, call = bound.prepare(*inputs, mask=mask)
        out, wanted = method.run(*inputs, call), oracle(bucketed, *inputs, call)
        at = f"shape {shape}: {sizes[0]}, {sizes[1]} under {mask}"
        torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5, msg=lambda m, at=at: f"{at}: {m}")
        grads, wanted_grads = gradients(out, *inputs), gradients(wanted, *inputs)
        torch.testing.assert_close(grads, wanted_grads, atol=1e-5, rtol=1e-5, msg=lambda m, at=at: f"{at}: {m}")
        met += int((out != 0).sum())
    assert met > 0


@pytest.mark.parametrize("counts", [added, once_a_set])
def test_the_oracle_tells_multiplicity_from_union(counts):
    bucketed = Bucketed("smyrf:clusters=2,rounds=3", counts)
    inputs = [normal(1, 1, 12, 4, seed=i, dtype=torch.float64) for i in range(3)]
    call = bucketed.method.prepare(*inputs)[3]
    same = torch.allclose(oracle(bucketed, *inputs, call), bucketed.method(*inputs), atol=1e-5)
    assert same == (counts is added)
