"""Calls of random shapes under random masks, for the tests that hold a method against a dense oracle."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import subquad as sq
from subquad import Mask
from subquad.testing.oracle import gradients, normal, tracked

FEW_AND_MANY = pytest.mark.parametrize("shapes", [40, pytest.param(200, marks=pytest.mark.long)])


@dataclass(frozen=True)
class RandomCall:
    """Inputs that record gradients, their mask and the method attached to their heads."""

    number: int
    inputs: list[Tensor]
    mask: Mask
    bound: sq.BoundMethod

    def __str__(self) -> str:
        query, key, _ = self.inputs
        return f"shape {self.number}: {tuple(query.shape)}, {tuple(key.shape)} under {self.mask}"


def some_mask(rng: random.Random, method: sq.Method, B: int, N: int, M: int) -> Mask:
    """Padding to the left, to the right or none, of both sides alike in self-attention; causal where it can be."""

    def valid(tokens: int) -> Tensor:
        lengths = torch.tensor([rng.randint(0, tokens) for _ in range(B)])
        right = torch.arange(tokens) < lengths[:, None]
        return right.flip(1) if rng.random() < 0.5 else right

    mask = Mask()
    if rng.random() < 0.8:
        mask = (
            Mask.padding(valid(N)) if N == M and rng.random() < 0.7 else Mask.padding(keys=valid(M), queries=valid(N))
        )
    causal = mask & Mask.causal(offset=0)
    return causal if rng.random() < 0.4 and method.refuses(causal, cross=N != M) is None else mask


def random_calls(method: sq.Method, shapes: int) -> Iterator[RandomCall]:
    """Calls with 1 to 40 tokens, in fp64, always the same ones."""
    rng = random.Random(0)
    for number in range(shapes):
        B, G, times, D, E = (rng.randint(1, 3), rng.randint(1, 2), rng.randint(1, 2), rng.randint(1, 5), 3)
        N = rng.randint(1, 40)
        M = rng.randint(1, 40) if method.traits.cross and rng.random() < 0.5 else N
        mask = some_mask(rng, method, B, N, M)
        sizes = (B, G * times, N, D), (B, G, M, D), (B, G, M, E)
        inputs = tracked(*(normal(*size, seed=3 * number + i, dtype=torch.float64) for i, size in enumerate(sizes)))
        bound = method.bind(heads=G * times, kv_heads=G, head_dim=D, max_length=40).eval()
        yield RandomCall(number, inputs, mask, bound)


def assert_equal_both_ways(call: RandomCall, out: Tensor, wanted: Tensor, *more: Tensor) -> None:
    """Outputs and gradients agree, also those of `more`, such as learned parameters."""
    inputs = [*call.inputs, *more]
    for have, want in ((out, wanted), (gradients(out, *inputs), gradients(wanted, *inputs))):
        torch.testing.assert_close(have, want, atol=1e-5, rtol=1e-5, msg=lambda m: f"{call}: {m}")
