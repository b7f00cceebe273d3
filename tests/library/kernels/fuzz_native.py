"""Call every compiled kernel with random shapes, patterns and lists, and NaN, infinity or huge numbers in one head.

    python -m tests.library.kernels.fuzz_native --calls 20000 --seed 0

Every case runs twice, with the poison and without, on workspaces that hold different rubbish. What has no part in the
poisoned head of item 0 must come out equal bit for bit, and the memory on both sides of the workspace must stay as it
was. Each case follows from the seed and its number alone: after a crash, `--verbose` shows which one it was, and
`--first` starts there. Under the sanitizers (CONTRIBUTING.md) fences stand between the pieces of the workspace too.
"""

import argparse
import json
import math
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any

import torch
from torch import Tensor

import subquad  # noqa: F401  (registers the ops)
from subquad.kernels import native
from subquad.kernels.native import interface

GUARD, CANARY = 4096, 0xA5
POISONS = (math.nan, math.inf, -math.inf, 3.3e38, -3.3e38, 1e-45, 0.0)
SCALES = (0.1, 1.0, 1.0, 1.0, 9.0, 1e3, 1e4, 1e6, 1e12, 1e18)  # of the numbers themselves
HOSTILE = (-(2**63), -(2**31) - 1, -(2**31), -7, -1, 2**31 - 1, 2**31, 2**62, 2**63 - 1)
OPS = torch.ops.subquad

calls: Counter[tuple[str, str]] = Counter()
rubbish = 0xFF  # of the bytes of the next workspaces: NaN and −1


def guarded_run(kernel: str, **arguments: Any) -> None:
    """Like `interface.run`, with a workspace that holds rubbish and has guards on both sides."""
    held: list[Any] = []
    packed = interface.structure_of(kernel).pack(arguments, held)
    function = getattr(native.library(), f"subquad_{kernel}")
    room = -(-function(packed, None) // interface.ALIGNMENT) * interface.ALIGNMENT
    memory = torch.full((room + 2 * GUARD + interface.ALIGNMENT,), CANARY, dtype=torch.uint8)
    start = GUARD + -(memory.data_ptr() + GUARD) % interface.ALIGNMENT
    memory[start : start + room] = rubbish
    refused = function(packed, memory.data_ptr() + start) < 0
    calls[kernel, native.variant()] += 1
    for side in (memory[:start], memory[start + room :]):
        assert (side == CANARY).all(), f"{kernel} wrote outside of its workspace"
    if refused:
        raise ValueError(f"{kernel}: a list names what is not there")


# ---------------------------------------------------------------------- what is drawn


class Draw:
    """Random numbers, lists and tensors of one case, and the poison in them."""

    def __init__(self, seed: str, poisoned: bool):
        self.rng, self.poisoned = Random(seed), poisoned
        self.broke_lists = False  # of any head of item 0

    def size(self, most: int) -> int:
        """A length from 1 to `most`, short ones more often."""
        return min(most, 1 + int(most * self.rng.random() ** 3))

    def maybe(self, chance: float = 0.5) -> bool:
        return self.rng.random() < chance

    def heads(self) -> tuple[int, int]:
        return self.rng.choice([(1, 1), (2, 2), (2, 1), (4, 2)])

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.rng.getrandbits(60))

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Normal numbers; a poison in head 0 of item 0 of some of those that have heads."""
        x = torch.randn(shape, generator=self.generator()) * self.rng.choice(SCALES)
        # Drawn with and without poison alike, so that both runs go on with the same numbers.
        spoil, poison, place = self.maybe(), self.rng.choice(POISONS), self.rng.randrange(6)
        chosen = torch.rand(shape[2] if len(shape) > 2 else 1, generator=self.generator())
        share = self.rng.choice((0.05, 0.5, 0.95))
        if len(shape) == 4 and spoil and self.poisoned and x.numel() > 0:
            head = x[0, 0]
            if place == 0:
                head[0, 0] = poison
            elif place == 1:
                head[-1] = poison
            elif place == 2:
                head[:] = poison
            elif place == 3:
                head[:, 0] = poison
            else:
                head[chosen < share] = poison
        most = torch.finfo(dtype).max
        return torch.where(x.isinf(), x, x.clamp(-most, most)).to(dtype)

    def valid(self, batch: int, tokens: int) -> Tensor | None:
        """A padding mask, or None; an item may have no real token."""
        keep, share = self.maybe(), self.rng.choice((0.0, 0.1, 0.9))
        mask = torch.rand(batch, tokens, generator=self.generator()) < share
        return mask if keep else None

    def whole(self, low: int, high: int, *shape: int) -> Tensor:
        """Whole numbers from `low` to `high`; a few in item 0 are hostile where it is poisoned."""
        x = torch.randint(low, high + 1, shape, generator=self.generator())
        spoil, at = self.maybe(0.3), torch.rand(shape, generator=self.generator()) < 0.05
        hostile = self.rng.choice(HOSTILE)
        if spoil and self.poisoned:
            x[0] = x[0].masked_fill(at[0], hostile)
            self.broke_lists = True
        return x


def tracked(*tensors: Tensor) -> list[Tensor]:
    return [x.requires_grad_() for x in tensors]


def backward(draw: Draw, outputs: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Gradients, those of the outputs being poisoned too."""
    given = [draw.normal(*x.shape, dtype=x.dtype) for x in outputs]
    grads = torch.autograd.grad(outputs, inputs, given, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(grads, inputs, strict=True)]


# ---------------------------------------------------------------------- the kernels
# Each returns tensors (B, heads, …).


def clustered(draw: Draw) -> list[Tensor]:
    B, (H, G), long = draw.rng.randint(1, 3), draw.heads(), draw.maybe(0.02)
    N, M = draw.size(150), 4200 if long else draw.size(200)
    D, E = draw.size(3 if long else 40), draw.size(3 if long else 40)
    C, topk = min(N, draw.size(20)), min(M, draw.rng.choice((0, 1, draw.size(40), draw.size(M), M)))
    dtype = draw.rng.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16))
    inputs = tracked(*(draw.normal(*shape, dtype=dtype) for shape in ((B, H, N, D), (B, G, M, D), (B, G, M, E))))
    masks = draw.valid(B, N), draw.valid(B, M)
    bits, iterations, seed = draw.rng.randint(1, 63), draw.rng.randint(0, 4), draw.rng.randrange(9)
    labels, wants_lse = draw.whole(0, C - 1, B, H, N) if draw.maybe(0.3) else None, draw.maybe(0.3)
    settings = C, topk, bits, iterations, 0.3, seed, wants_lse
    if labels is not None:
        with suppress(ValueError):
            OPS.clustered_forward("cpu", *inputs, *masks, labels, *settings)
        labels = labels.clamp(0, C - 1)
    given = (*inputs, *masks, labels, *settings)
    out, *saved, lse = OPS.clustered_forward("cpu", *given)
    of_lists, at = draw.maybe(0.1), draw.rng.randrange(3)
    of_lse = draw.normal(B, H, N, 1)[..., 0] if wants_lse and draw.maybe() else None
    of_outputs = draw.normal(*out.shape, dtype=dtype), *[None] * 8, of_lse
    lists = [x.clone() for x in saved[:3]]
    if of_lists and draw.poisoned and lists[at].numel() > 0:
        lists[at].flatten()[draw.rng.randrange(lists[at].numel())] = draw.rng.choice((-(2**31), -1, N, M, 2**31 - 1))
        with suppress(ValueError):
            OPS.clustered_backward("cpu", *of_outputs, out, *lists, *saved[3:], lse, *given)
    grads = OPS.clustered_backward("cpu", *of_outputs, out, *saved, lse, *given)
    return [out, lse, *saved[1:], *grads]  # what `order` holds behind an item's real queries is not read


def hashing(draw: Draw) -> list[Tensor]:
    B, H, N, D = draw.rng.randint(1, 3), draw.rng.choice((1, 2)), draw.size(1500), draw.size(40)
    x, valid = draw.normal(B, H, N, D, dtype=draw.rng.choice(tuple(interface.DTYPES))), draw.valid(B, N)
    codes = OPS.hash_words("cpu", x, draw.rng.randint(1, 63), draw.rng.randrange(9), draw.maybe(), valid)
    return [codes, OPS.kmeans_labels("cpu", codes, valid, draw.size(N + 2), draw.rng.randint(0, 4))]


def in_buckets(draw: Draw) -> list[Tensor]:
    B, (H, G), N, M = draw.rng.randint(1, 3), draw.heads(), draw.size(120), draw.size(120)
    D, E, sets = draw.size(40), draw.size(40), draw.rng.randint(1, 3)
    inputs = [draw.normal(B, H, N, D), draw.normal(B, G, M, D), draw.normal(B, G, M, E)]
    bias = draw.normal(B, H, M, 1)[..., 0] if draw.maybe() else None
    queries: list[Tensor] = []
    keys: list[Tensor] = []
    bucket, spans = [], []
    for _ in range(sets):
        C, K, S = draw.size(6), draw.size(40) if draw.maybe(0.9) else 600, draw.size(40)
        T = draw.size(8) if draw.maybe() else C
        queries.append(draw.whole(-1, N + 1, B, H, T, S))
        keys.append(keys[-1] if keys and draw.maybe(0.3) else draw.whole(-1, M + 1, B, H, C, K))
        C = keys[-1].shape[2]
        named = draw.maybe() or T != C
        bucket.append(draw.whole(0, C - 1, B, H, T) if named else torch.empty(0, dtype=torch.int64))
        spans.append(draw.rng.choice((-1, -1, 0, 5, 2**40)))
    offsets = draw.whole(-5, 5, B) if draw.maybe(0.3) else None
    hidden = torch.rand(B, H, draw.size(4), M, generator=draw.generator()) < 0.4 if draw.maybe(0.3) else None
    rows, distances = draw.rng.choice((1, N)), draw.rng.choice((1, 6, 11))
    terms = draw.normal(B, H, rows, distances) if draw.maybe(0.4) else None
    tracks = tracked(*inputs, *(x for x in (bias, terms) if x is not None))
    pattern = offsets, hidden, draw.rng.choice((0, 0, 3, -200)), draw.maybe(), draw.maybe(0.3)
    out, lse, residual = OPS.pairs_forward("cpu", *inputs, bias, queries, keys, bucket, spans, *pattern, 0.3, terms)
    grads = backward(draw, [[out], [lse], [out, lse]][draw.rng.randrange(3)], tracks)
    return [out.detach(), lse.detach(), residual.detach(), *grads]


def top_of_buckets(draw: Draw) -> list[Tensor]:
    B, H, C = draw.rng.randint(1, 3), draw.rng.choice((1, 2)), draw.size(20)
    N = draw.rng.randint(1025, 1300) if draw.maybe(0.1) else draw.size(300)
    scores, valid, most = draw.normal(B, H, N, C), draw.valid(B, N), draw.size(N)
    return list(OPS.top_by_score("cpu", scores, draw.whole(0, most, B), most, valid, draw.maybe()))


def top_by_hash(draw: Draw) -> list[Tensor]:
    B, H, C, N = draw.rng.randint(1, 3), draw.rng.choice((1, 2)), draw.size(20), draw.size(200)
    vectors, weights, biases, layers = [], [], [], []
    for _ in range(draw.rng.randint(1, 2)):
        widths = [draw.size(20) for _ in range(draw.rng.randint(1, 3))]
        vectors.append(draw.normal(B, H, N, widths[0]))
        for upcast, out in zip(widths, [*widths[1:], C], strict=True):
            weights.append(draw.normal(H, upcast, out))
            biases.append(draw.normal(H, 1, out))
        layers.append(len(widths))
    valid, most = draw.valid(B, N), draw.size(N)
    sizes = draw.whole(0, most, B)
    return list(OPS.top_by_hash("cpu", vectors, weights, biases, layers, H, 0.5, sizes, most, valid, draw.maybe()))


def blocks(draw: Draw) -> list[Tensor]:
    B, H, N, C = draw.rng.randint(1, 3), draw.rng.choice((1, 2)), draw.size(300), draw.size(20)
    return list(OPS.label_blocks("cpu", draw.whole(0, C, B, H, N), C, draw.size(40)))


def features(draw: Draw) -> list[Tensor]:
    B, (H, G), N, R = draw.rng.randint(1, 3), draw.heads(), draw.size(700 if draw.maybe(0.1) else 150), draw.size(40)
    block, lag = draw.rng.choice(((0, 0), (1, 0), (draw.size(90), draw.size(3))))
    M = N if block else draw.size(150)
    mapped = draw.maybe(), draw.maybe()
    D, E, K = (draw.size(40) if mapped[0] else R), draw.size(40), (draw.size(40) if mapped[1] else R)
    inputs = [draw.normal(B, H, N, D), draw.normal(B, G, M, K), draw.normal(B, G, M, E)]
    of_query = draw.normal(draw.rng.choice((1, H)), R, D) if mapped[0] else None
    of_key = draw.normal(draw.rng.choice((1, G)), R, K) if mapped[1] else None
    feature_bias = draw.normal(draw.rng.choice((1, H)), R) if draw.maybe() else None
    key_bias = draw.normal(B, draw.rng.choice((1, G)), M) if draw.maybe() else None
    if key_bias is not None:
        key_bias[torch.rand(key_bias.shape, generator=draw.generator()) < 0.3] = -torch.inf
    tracks = tracked(*inputs, *([] if key_bias is None else [key_bias]))
    out, lse, residual = OPS.features_forward("cpu", *inputs, of_query, of_key, feature_bias, key_bias, block, lag)
    grads = backward(draw, [[out], [lse], [out, lse]][draw.rng.randrange(3)], tracks)
    return [out.detach(), lse.detach(), residual.detach(), *grads[:3]]  # the bias's may be a sum over heads


def products(draw: Draw) -> list[Tensor]:
    B, N, R, E = draw.rng.randint(1, 3), draw.size(700 if draw.maybe(0.1) else 150), draw.size(40), draw.size(40)
    H, G = draw.heads()
    H, G = (H, G) if draw.maybe() else (G, H)
    inputs = tracked(draw.normal(B, H, N, R), draw.normal(B, G, N, R), draw.normal(B, G, N, E))
    out = OPS.directed_product("cpu", *inputs, draw.maybe())
    return [out.detach(), *backward(draw, [out], inputs)]


def clusters(draw: Draw) -> list[Tensor]:
    B, (H, G), N, M, D = draw.rng.randint(1, 3), draw.heads(), draw.size(700), draw.size(300), draw.size(40)
    dtype = draw.rng.choice(tuple(interface.DTYPES))
    q, k, v = (draw.normal(B, h, n, d, dtype=dtype) for h, n, d in ((H, N, D), (G, M, D), (G, M, draw.size(40))))
    valid, C = (draw.valid(B, N), draw.valid(B, M)), draw.size(min(N, 60))
    counts = draw.whole(-1, C + 2, B) if draw.maybe(0.3) else None
    rounds = draw.rng.randint(1, 63), draw.rng.randint(0, 3), draw.rng.randint(0, 3), draw.rng.randrange(9)
    space = draw.rng.choice(("logits", "queries"))
    labels = OPS.cluster_labels("cpu", q, k, *valid, counts, space, C, *rounds)
    means, sizes = draw.normal(B, q.shape[1], C, q.shape[3]), draw.whole(0, 2, B, q.shape[1], C)
    nearest = OPS.nearest_labels("cpu", q, k, means, sizes, *valid)
    return [labels, nearest, OPS.cell_labels("cpu", k, v, valid[1], draw.size(M + 2), *rounds[:2], rounds[3])]


def tails(draw: Draw) -> list[Tensor]:
    B, (H, G), long = draw.rng.randint(1, 3), draw.heads(), draw.maybe(0.02)
    N, M = draw.size(150), 9000 if long else draw.size(200)
    D, E, C, X = draw.size(3 if long else 40), draw.size(3 if long else 40), draw.size(90), draw.size(20)
    topk = min(M, draw.rng.choice((0, 1, draw.size(40), draw.size(M), M)))
    dtype = draw.rng.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16))
    inputs = tracked(*(draw.normal(*shape, dtype=dtype) for shape in ((B, H, N, D), (B, G, M, D), (B, G, M, E))))
    labels, cell = draw.whole(0, C, B, H, N), draw.whole(0, X, B, G, M)
    keys = draw.whole(-1, M, B, H, C, topk) if draw.maybe(0.3) else None
    wanted = draw.whole(-1, topk + 1, B) if draw.maybe(0.3) else None
    terms = draw.normal(B, H, M, 1)[..., 0] if draw.maybe(0.3) else None
    others = draw.maybe(0.3)
    means, around = (draw.normal(B, H, C, D), draw.normal(B, H, D, D)) if others else (None, None)
    window = draw.rng.choice((1, draw.size(40), draw.size(300))) if draw.maybe(0.4) else 0
    start = draw.whole(-M, M, B) if draw.maybe(0.3) else None
    settings = keys, wanted, terms, means, around, start, C, topk, X, 0.3, window
    with suppress(ValueError):
        OPS.tail_forward("cpu", *inputs, labels, cell, *settings)
    given = (*inputs, labels.clamp(0, C), cell.clamp(0, X), *settings)
    out, lse, *saved = OPS.tail_forward("cpu", *given)
    for alone, beside in zip(OPS.tail_output("cpu", *given), (out, lse), strict=True):
        assert torch.equal(alone.nan_to_num(7.0), beside.detach().nan_to_num(7.0)), "without the cells it differs"
    of_lse = draw.normal(B, H, N, 1)[..., 0] if draw.maybe() else None
    of_cells = [draw.normal(B, H, C * X, x.shape[4]).view_as(x) for x in saved[6:8]] if draw.maybe(0.3) else [None] * 2
    of_cells += draw.normal(B, H, C, X) if draw.maybe(0.3) else None, None
    of_outputs = (
        draw.normal(*out.shape, dtype=dtype) if draw.maybe(0.9) else None,
        of_lse,
        *[None] * 6,
        *of_cells,
        *[None] * 3,
    )
    spoil, at = draw.maybe(0.1), draw.rng.randrange(5)
    lists = [x.clone() for x in saved[:5]]
    if spoil and draw.poisoned and lists[at].numel() > 0:
        lists[at].flatten()[draw.rng.randrange(lists[at].numel())] = draw.rng.choice((-(2**31), -2, N, M, 2**31 - 1))
        with suppress(ValueError):
            OPS.tail_backward("cpu", *of_outputs, out, lse, *lists, *saved[5:], *given)
    grads = OPS.tail_backward("cpu", *of_outputs, out, lse, *saved, *given)
    return [out, lse, *saved[5 : 13 if window else 10], *(grads if others else grads[:3])]


def of_ranks(draw: Draw) -> list[Tensor]:
    B, H, N, D, C = draw.rng.randint(1, 3), draw.rng.choice((1, 2)), draw.size(700), draw.size(40), draw.size(40)
    dtype = draw.rng.choice(tuple(interface.DTYPES))
    x, y, valid = (
        draw.normal(B, H, N, D, dtype=dtype),
        draw.normal(B, H, N, draw.size(9), dtype=dtype),
        draw.valid(B, N),
    )
    (mean, squares), (other, _) = (OPS.means_and_squares("cpu", each, valid) for each in (x, y))
    bits, ones = draw.rng.randint(1, 63), torch.ones_like(squares)
    shape, width = draw.rng.choice(((1, 1), (1, H), (B, 1), (B, H))), D + y.shape[3]
    if shape == (B, H):
        planes = draw.normal(B, H, bits, width)
    else:  # planes that several heads share have a part in each of them, and are not poisoned
        planes = draw.normal(math.prod(shape), bits, width).view(*shape, bits, width)
    codes = OPS.words_of_terms("cpu", [x, y], [mean, other], [ones, ones], planes, valid)
    labels, votes = OPS.labels_and_votes("cpu", codes, codes[:, :, :C].contiguous(), valid)
    nearest = OPS.labels_of_means("cpu", x, mean, draw.normal(B, H, D, C), draw.normal(B, H, C, 1)[..., 0], valid)
    sums, sizes = OPS.sums_and_sizes("cpu", x, draw.whole(-1, C + 1, B, H, N), C)
    return [mean, squares, codes, labels, votes, nearest, sums, sizes]


def lists_of_clusters(draw: Draw) -> list[Tensor]:
    B, H, N, C, K = draw.rng.randint(1, 3), draw.rng.choice((1, 2)), draw.size(150), draw.size(20), draw.size(40)
    D, E, R = draw.size(40), draw.size(40), C * K + draw.size(5)
    inputs = tracked(draw.normal(B, H, N, D), draw.normal(B, H, R, D), draw.normal(B, H, R, E), draw.normal(B, H, R, 1))
    rows = torch.arange(C * K).view(C, K).expand(B, H, C, K)
    lists = rows.where(draw.whole(0, 3, B, H, C, K) > 0, R)
    bias = inputs[3][..., 0]
    out, lse = OPS.listed_forward("cpu", *inputs[:3], bias, draw.whole(-1, C + 1, B, H, N), lists, 0.3)
    return [out.detach(), lse.detach(), *backward(draw, [[out], [lse], [out, lse]][draw.rng.randrange(3)], inputs)]


def exactly(draw: Draw) -> list[Tensor]:
    B, (H, G), long = draw.rng.randint(1, 3), draw.heads(), draw.maybe(0.05)
    N, M, dtype = draw.size(200), 2500 if long else draw.size(250), draw.rng.choice(tuple(interface.DTYPES))
    D, E = draw.size(3 if long else 40), draw.size(3 if long else 40)
    inputs = tracked(*(draw.normal(*shape, dtype=dtype) for shape in ((B, H, N, D), (B, G, M, D), (B, G, M, E))))
    pattern = draw.valid(B, M), draw.valid(B, N), draw.maybe(), draw.rng.choice((0, M - N, -7, 2**40))
    out, lse, residual = OPS.exact_forward("cpu", *inputs, *pattern, 0.3)
    grads = backward(draw, [[out], [lse], [out, lse]][draw.rng.randrange(3)], inputs)
    return [out.detach(), lse.detach(), residual.detach(), *grads]


def steps(draw: Draw) -> list[Tensor]:
    B, (H, G), long = draw.rng.randint(1, 3), draw.heads(), draw.maybe(0.05)
    N, M, dtype = draw.size(32), 9000 if long else draw.size(700), draw.rng.choice(tuple(interface.DTYPES))
    D, E = draw.size(3 if long else 80), draw.size(3 if long else 80)
    inputs = [draw.normal(*shape, dtype=dtype) for shape in ((B, H, N, D), (B, G, M, D), (B, G, M, E))]
    offsets = draw.whole(-9, M + 9, B) if draw.maybe() else None
    pattern = draw.valid(B, M), draw.valid(B, N), offsets, draw.maybe(), draw.rng.choice((0, M - N, -7, 2**62))
    window, softcap = draw.rng.choice((None, 0, 5, 300, 2**62)), draw.rng.choice((None, None, 0.5, 30.0))
    results = OPS.steps_forward("cpu", *inputs, *pattern, 0.3, window, softcap)
    return [*results, torch.zeros(B, G)]  # its heads show which query heads share one: see `run_case`


def merged(draw: Draw) -> list[Tensor]:
    B, H, E, tokens = draw.rng.randint(1, 3), draw.rng.choice((1, 2)), draw.size(40), draw.rng.randint(20, 600)
    numbers, outs, lses = [], [], []
    for _ in range(draw.rng.randint(1, 4)):
        count = draw.size(4)
        step = draw.rng.randint(1, tokens // count)
        length = draw.rng.randint(1, step)
        first = draw.rng.randint(0, tokens - (count - 1) * step - length)
        numbers += [first, length, step, count]
        outs.append(draw.normal(B * count, H, length, E))
        lses.append(draw.normal(B * count, H, length, 1)[..., 0])
    return list(OPS.merged_windows("cpu", outs, lses, numbers, tokens, draw.maybe()))


CASES: dict[str, Callable[[Draw], list[Tensor]]] = {
    "clustered": clustered,
    "hashing": hashing,
    "buckets": in_buckets,
    "top": top_of_buckets,
    "top by hash": top_by_hash,
    "blocks": blocks,
    "features": features,
    "products": products,
    "clusters": clusters,
    "tails": tails,
    "of ranks": of_ranks,
    "lists of clusters": lists_of_clusters,
    "exactly": exactly,
    "steps": steps,
    "merged": merged,
}


# ---------------------------------------------------------------------- runs


def untouched(x: Tensor, groups: int) -> list[Tensor]:
    """The parts that do not belong to head 0 of item 0, nor to the heads that share a key head with it."""
    return [x[1:], x[0, x.shape[1] // groups :]]


def run_case(name: str, seed: str) -> None:
    """One case, clean and poisoned.

    Raises:
        AssertionError: the poison went where it has no part, or something was written outside of the workspace.
    """
    global rubbish
    results = []
    for poisoned in (False, True):
        draw, rubbish = Draw(seed, poisoned), 0x7F if poisoned else 0xFF
        torch.set_num_threads(draw.rng.choice((1, 1, 2)))
        results.append(CASES[name](draw))
    groups = 1 if draw.broke_lists else min(x.shape[1] for x in results[0])
    for number, (clean, other) in enumerate(zip(*results, strict=True)):
        for a, b in zip(untouched(clean, groups), untouched(other, groups), strict=True):
            same = (a == b) | (a.isnan() & b.isnan()) if a.is_floating_point() else a == b
            assert same.all(), f"result {number}: the poison went where it has no part"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=20000, help="at least so many calls of kernels")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--verbose", action="store_true", help="name every case before it runs")
    given = parser.parse_args()
    interface.run = guarded_run
    interface.SMALL = 0  # two threads for little work too
    case, names, variants = given.first, list(CASES), native.variants()
    while sum(calls.values()) < given.calls:
        name, variant = names[case % len(names)], variants[case // len(names) % len(variants)]
        if given.verbose:
            print(case, name, variant, flush=True)
        with native.use_variant(variant):
            try:
                run_case(name, f"{given.seed}/{case}")
            except Exception as error:
                raise SystemExit(f"case {case} of seed {given.seed}, {name}, {variant}: {error}") from error
        case += 1
    counts: dict[str, dict[str, int]] = {}
    for (kernel, variant), count in sorted(calls.items()):
        counts.setdefault(kernel, {})[variant] = count
    print(json.dumps({"cases": case - given.first, "calls": sum(calls.values()), "of": counts}, indent=1))


if __name__ == "__main__":
    main()
