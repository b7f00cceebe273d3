"""Random causal calls by halves: each item of a batch, also behind a cache, against the item alone."""

import random
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import subquad as sq
from subquad import Mask
from subquad.testing.oracle import normal, tracked

SETTINGS = {
    "clustered-tail": {"clusters": [0, 0, 3], "topk": [0, 0, 4], "cells": [2, 8], "window": [0, 0, 2]},
    "clustered": {"clusters": [2, 5, 11]},
    "i-clustered": {"clusters": [2, 5, 11], "topk": [1, 9]},
    "lha-tail": {"buckets": [3, 8], "keys": [2, 20], "cells": [2, 9], "hidden": [8]},
}


@dataclass(frozen=True)
class RandomBatch:
    """Items of different lengths behind caches of different lengths, and how they lie in a batch."""

    method: sq.Method
    cached: list[int]
    new: list[int]
    layout: str  # both paddings on the "left", the new tokens' on the "right", or caches of their "own" lengths

    @staticmethod
    def draw(rng: random.Random) -> "RandomBatch":
        """A batch of two items."""
        name = rng.choice(list(SETTINGS))
        settings = {setting: rng.choice(values) for setting, values in SETTINGS[name].items()}
        settings |= {"block": rng.choice([1, 5, 8, 16]), "last": rng.choice([0, 3])}
        settings["queries"] = rng.choice(["rectangle", "block", *["earlier"] * (name == "clustered-tail")])
        longest, past = rng.randint(2, 100), rng.choice([0, 0, 30])
        new = [rng.randint(1, longest), longest]
        layout = rng.choice(["left", "right", "own"])
        return RandomBatch(sq.METHODS[name](**settings), [rng.randint(0, past) for _ in new], new, layout)

    def valid(self) -> tuple[Tensor, Tensor]:
        """True for real keys, and True for real queries."""
        T, N = max(self.cached), max(self.new)
        cached, new = (torch.tensor(lengths)[:, None] for lengths in (self.cached, self.new))
        tokens, keys = torch.arange(N), torch.arange(T + N)
        queries = tokens >= N - new if self.layout == "left" else tokens < new
        if self.layout == "own":
            return keys < cached + new, queries
        return torch.cat([keys[:T] >= T - cached, queries], 1), queries

    def mask(self) -> Mask:
        """The mask of the whole batch."""
        keys, queries = self.valid()
        offset = torch.tensor(self.cached) if self.layout == "own" else max(self.cached)
        return Mask.padding(keys=keys, queries=queries) & Mask.causal(offset=offset)


def results(bound: sq.BoundMethod, inputs: list[Tensor], mask: Mask) -> list[Tensor]:
    """The output, the log-sum-exp, and the gradients of query, key and value."""
    leaves = tracked(*inputs)
    out, lse = bound(*leaves, mask=mask, return_lse=True)
    return [out.detach(), lse.detach()[..., None], *torch.autograd.grad(out.sin().sum(), leaves)]


@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(12, 300))])
def test_an_item_of_a_batch_is_what_it_is_alone(seed: int):
    rng = random.Random(seed)
    batch, backend = RandomBatch.draw(rng), rng.choice(["fastest", "reference"])
    dtype = torch.float32 if backend == "fastest" else torch.float64
    keys, queries = batch.valid()
    shapes = (2, 4, queries.shape[1], 8), *[(2, 2, keys.shape[1], 8)] * 2
    inputs = [2 * normal(*shape, seed=3 * seed + i, dtype=dtype) for i, shape in enumerate(shapes)]
    bound = batch.method.bind(heads=4, kv_heads=2, head_dim=8).to(dtype).eval()
    sides = queries, queries, queries, keys, keys
    with sq.use_backend("reference") if backend == "reference" else nullcontext():
        together = results(bound, inputs, batch.mask())
        for item in range(2):
            alone = [x[item, :, valid[item]][None] for x, valid in zip(inputs, sides[2:], strict=True)]
            for whole, valid, want in zip(
                together, sides, results(bound, alone, Mask.causal(offset=batch.cached[item])), strict=True
            ):
                torch.testing.assert_close(whole[item][:, valid[item]], want[0], rtol=1e-3, atol=2e-4, msg=str(batch))
