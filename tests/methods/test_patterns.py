"""Patterns against N×M masks that are written out pair by pair: each key once, in an exact softmax."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import subquad as sq
from subquad import Mask
from subquad.methods.bigbird import draw
from tests.oracle import gradients, naive, normal, qkv, tracked

Pairs = Callable[[int, int], bool]  # whether the query at place i sees the key at place j, but for causality


def longformer(method: sq.Longformer, n: int, head: int, heads: int, causal: bool) -> Pairs:
    """The window, and the first tokens both ways."""

    def near(i: int, j: int) -> bool:
        return abs(i - j) <= method.window * method.dilation and (i - j) % method.dilation == 0

    return lambda i, j: near(i, j) or 0 <= j < method.first or 0 <= i < method.first


def strided(method: sq.Strided, n: int, head: int, heads: int, causal: bool) -> Pairs:
    """Near, or a multiple of the stride away, or one of the two by heads."""
    kinds = kinds_of(method.parts, head, heads)
    return lambda i, j: (
        ("near" in kinds and abs(i - j) <= method.stride) or ("far" in kinds and (i - j) % method.stride == 0)
    )


def fixed(method: sq.Fixed, n: int, head: int, heads: int, causal: bool) -> Pairs:
    """In the own block, or in a column, or one of the two by heads."""
    kinds, size = kinds_of(method.parts, head, heads), method.block
    return lambda i, j: (
        ("near" in kinds and i // size == j // size)
        or ("far" in kinds and (j % size >= size - method.columns or i == j))
    )


def kinds_of(parts: str, head: int, heads: int) -> tuple[str, ...]:
    if parts == "heads":
        return ("near",) if head < heads / 2 else ("far",)
    return ("near", "far") if parts == "merged" else (parts,)


def logsparse(method: sq.LogSparse, n: int, head: int, heads: int, causal: bool) -> Pairs:
    """Near, or a power of two away."""
    return lambda i, j: abs(i - j) <= method.window or abs(i - j).bit_count() == 1


def bigbird(method: sq.BigBird, n: int, head: int, heads: int, causal: bool) -> Pairs:
    """Blocks that are near, global at either end, or drawn from a list of all the others."""
    size = method.block
    count = -(-n // size)
    ends = set(range(method.first)) | (set() if causal else set(range(count - method.last, count)))
    seen = {}
    for t in range(-(-n // size) + 1):
        near = set(range(t - method.window, t + method.window + 1))
        others = [s for s in range(t if causal else count) if s not in near | ends]
        picks = draw(torch.tensor([[len(others)]]), method.random, heads, torch.tensor([[t]]), method.seed)
        seen[t] = near | ends | {others[pick] for pick in picks[0, head, 0].tolist() if pick >= 0}
    everywhere = set() if causal else ends
    return lambda i, j: i // size in everywhere or j // size in seen.get(i // size, ())


ORACLES = {
    "longformer:window=4,first=1": longformer,
    "longformer:window=2,dilation=3,first=3": longformer,
    "longformer:window=0,first=0,dilation=2": longformer,
    "bigbird:block=4,random=1": bigbird,
    "bigbird:block=3,window=0,random=2,first=2,last=0,seed=5": bigbird,
    "bigbird:block=2,random=3,first=0,last=2": bigbird,
    "strided:stride=5": strided,
    "strided:stride=1": strided,
    "strided:stride=4,parts=heads": strided,
    "strided:stride=3,parts=far": strided,
    "fixed:block=5,columns=2": fixed,
    "fixed:block=4,columns=1,parts=heads": fixed,
    "fixed:block=64,columns=50,parts=far": fixed,
    "logsparse:window=3": logsparse,
    "logsparse:window=0": logsparse,
}
every_pattern = pytest.mark.parametrize("text", ORACLES)


def places(real: Tensor, start: int = 0) -> tuple[int, int]:
    """The first real token of an item, and how many there are from it to the last."""
    tokens = real.nonzero()[:, 0].tolist()
    return (tokens[0], tokens[-1] + 1 - tokens[0]) if tokens else (0, 0)


def allowed(text: str, heads: int, mask: Mask, N: int, M: int, batch: int, offsets: list[int] | None = None) -> Tensor:
    """Bool (B,H,N,M): which pairs meet, by the definitions above."""
    method = sq.parse_method(text)
    every = torch.ones(batch, max(N, M), dtype=torch.bool)
    keys = every[:, :M] if mask.key_padding(M) is None else mask.key_padding(M)
    queries = every[:, :N] if mask.query_padding(N) is None else mask.query_padding(N)
    dense = torch.zeros(batch, heads, N, M, dtype=torch.bool)
    for item in range(batch):
        offset = 0 if offsets is None else offsets[item]
        first, n = places(keys[item] | queries[item] if offsets is None else keys[item])
        for head in range(heads):
            sees = ORACLES[text](method, n, head, heads, mask.is_causal)
            rows = [[sees(i + offset - first, j - first) for j in range(M)] for i in range(N)]
            dense[item, head] = torch.tensor(rows).tril(offset) if mask.is_causal else torch.tensor(rows)
    return dense & queries[:, None, :, None] & keys[:, None, None, :]


def some_mask(rng: random.Random, B: int, N: int) -> Mask:
    """Padding at either end and inside, of keys and queries alike or not; causal or not."""

    def real() -> Tensor:
        rows = torch.zeros(B, N, dtype=torch.bool)
        for row in rows:
            first = rng.choice([0, 0, rng.randint(0, N - 1)])
            row[first : rng.choice([N, rng.randint(first, N)])] = True
            row[rng.sample(range(N), rng.choice([0, N // 5]))] = False
        return rows

    mask = rng.choice([Mask(), Mask.padding(real()), Mask.padding(keys=real()), Mask.padding(keys=real(), queries=real())])
    return mask & rng.choice([Mask(), Mask.causal()])


def check(text: str, shapes: range) -> None:
    for shape in shapes:
        rng = random.Random(f"{text} {shape}")
        B, G, times, D, E = rng.randint(1, 2), rng.randint(1, 2), rng.randint(1, 2), rng.randint(1, 4), 3
        N = rng.randint(1, 30)
        mask, sizes = some_mask(rng, B, N), ((B, G * times, N, D), (B, G, N, D), (B, G, N, E))
        inputs, others = (
            tracked(*(normal(*size, seed=3 * shape + i, dtype=torch.float64) for i, size in enumerate(sizes)))
            for _ in range(2)
        )
        out = sq.attention(*inputs, method=text, mask=mask, enable_gqa=True)
        wanted = naive(*others, allowed(text, G * times, mask, N, N, B))
        at = f"shape {shape}: {sizes[0]}, {sizes[1]} under {mask}"
        torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5, msg=lambda m, at=at: f"{at}: {m}")
        grads, wanted_grads = gradients(out, *inputs), gradients(wanted, *others)
        for have, want in zip(grads, wanted_grads, strict=True):
            torch.testing.assert_close(have, want, atol=1e-5, rtol=1e-5, msg=lambda m, at=at: f"{at}: {m}")


@every_pattern
def test_equals_exact_attention_under_the_mask_of_its_definition(text):
    check(text, range(40))


@pytest.mark.long
@every_pattern
def test_equals_it_on_more_shapes(text):
    check(text, range(40, 200))
