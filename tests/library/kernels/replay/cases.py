"""Each kernel on small inputs, with what plain PyTorch in fp64 makes of the same inputs, in a file for `replay.cpp`.

    python -m tests.library.kernels.replay.cases FILE

`test_replay.py` writes such a file and runs it.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import subquad as sq
from subquad import Mask
from subquad.kernels.attention.clustered.op import clustered_attention
from subquad.kernels.attention.exact.op import exact_partial
from subquad.kernels.attention.features.op import feature_attention
from subquad.kernels.attention.listed.op import attend_listed
from subquad.kernels.attention.pairs.op import attend_pairs
from subquad.kernels.attention.products.op import causal_product
from subquad.kernels.attention.steps.op import attend_few
from subquad.kernels.attention.sums.op import group_sums
from subquad.kernels.attention.tail.op import attend_with_tail
from subquad.kernels.attention.windows.op import merge_windows
from subquad.kernels.selection.blocks.op import sorted_blocks
from subquad.kernels.selection.cells.op import key_cells
from subquad.kernels.selection.clusters.op import query_clusters
from subquad.kernels.selection.hash_functions import Hashed, HashFunction
from subquad.kernels.selection.hashing.op import hash_codes
from subquad.kernels.selection.kmeans.op import hamming_kmeans
from subquad.kernels.selection.nearest.op import nearest_clusters
from subquad.kernels.selection.shards.op import assign_codes, assign_means, centred_codes, moments_of
from subquad.kernels.selection.shards.reference import Term
from subquad.kernels.selection.top.op import top_and_best
from subquad.kernels.tokens.slots import Buckets
from subquad.kernels.tokens.token_windows import TokenWindows
from subquad.testing.oracle import integers, normal
from tests.library.kernels.replay.recording import Recording, file_of, recorded
from tests.library.kernels.test_bucket_attention import two_sets

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
CLOSE = {FP32: 2e-5, BF16: 3e-2, FP16: 5e-3}  # as in test_exact_kernel.py
SCALE = 0.3
SIZES = 2, 4, 2, 150, 170, 24, 20  # B, H, G, N, M, D, E
ODD_SIZES = 1, 2, 2, 37, 83, 17, 9
LONG_SIZES = 1, 1, 1, 9, 3500, 8, 6  # more keys than the exact kernel adds up at once


class Numbers(NamedTuple):
    """The numbers of a case: in a dtype for the kernels, and the same ones in fp64 for the reference."""

    dtype: torch.dtype
    exact: bool

    def __call__(self, *shape: int, seed: int = 0, dtype: torch.dtype | None = None) -> Tensor:
        x = normal(*shape, seed=seed).to(dtype or self.dtype)
        return x.double() if self.exact else x

    def qkv(self, sizes: tuple[int, ...]) -> list[Tensor]:
        """Query, key and value, which record gradients."""
        B, H, G, N, M, D, E = sizes
        shapes = (B, H, N, D), (B, G, M, D), (B, G, M, E)
        return [self(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]

    def gradients(self, outputs: tuple[Tensor, ...], inputs: list[Tensor]) -> list[Tensor]:
        """Those of a loss that reads each number of the outputs, infinities left out."""
        weights = []
        for seed, x in enumerate(outputs):
            dtype = FP32 if x.ndim < 4 or x.dtype == FP32 else self.dtype  # log-sum-exps are in fp32
            weights.append(self(*x.shape, seed=90 + seed, dtype=dtype).masked_fill(x.isinf(), 0.0))
        return list(torch.autograd.grad(outputs, inputs, weights))


def padding(B: int, tokens: int) -> Tensor:
    """True for real tokens: those at both ends of an item are padding."""
    at, item = torch.arange(tokens), torch.arange(B)[:, None]
    return (at >= 3 + item) & (at < tokens - 5 * (item + 1))


def of_real(x: Tensor) -> list[Tensor]:
    """Return each item's numbers (B,H,N) for the tokens that are not `padding`, whose numbers are undefined."""
    return [
        each[:, valid.nonzero().min() : valid.nonzero().max() + 1]
        for each, valid in zip(x, padding(*x.shape[::2]), strict=True)
    ]


def exact(x: Numbers, sizes: tuple[int, ...], causal: bool, padded: bool) -> list[Tensor]:
    inputs, (B, _, _, N, M, _, _) = x.qkv(sizes), sizes
    masks = (padding(B, M), padding(B, N)) if padded else (None, None)
    outputs = exact_partial(*inputs, masks[0], causal=causal, offset=M - N, scale=SCALE, valid_queries=masks[1])
    return [*outputs, *x.gradients(outputs, inputs)]


def steps(x: Numbers, window: int | None, softcap: float | None) -> list[Tensor]:
    inputs = [each.detach() for each in x.qkv((2, 6, 2, 3, 700, 20, 13))]
    options = {"causal": True, "offset": 500, "offsets": torch.tensor([40, -9]), "scale": SCALE}
    return list(attend_few(*inputs, padding(2, 700), **options, window=window, softcap=softcap))


def clustered(x: Numbers, topk: int) -> list[Tensor]:
    inputs, (B, _, _, N, M, _, _) = x.qkv(SIZES), SIZES
    settings = {"clusters": 9, "topk": topk, "bits": 31, "iterations": 4, "scale": SCALE, "seed": 1}
    out, lse = clustered_attention(*inputs, padding(B, N), padding(B, M), **settings, wants_lse=True)
    assert lse is not None
    return [out, *of_real(lse), *x.gradients((out, *of_real(lse)), inputs)]


def tail(x: Numbers, window: int, gradient: bool) -> list[Tensor]:
    inputs, (B, H, G, N, M, _, _) = x.qkv(SIZES), SIZES
    labels, cell = integers(8, B, H, N, seed=1), integers(6, B, G, M, seed=2)  # 7 clusters, 5 cells
    settings = {"clusters": 7, "topk": 11, "cells": 5, "scale": SCALE, "window": window}
    inputs = inputs if gradient else [each.detach() for each in inputs]
    outputs = attend_with_tail(*inputs, labels, cell, None, **settings)
    return [*outputs, *(x.gradients(outputs, inputs) if gradient else [])]


def pairs(x: Numbers, mask: Mask) -> list[Tensor]:
    B, H, _, N, M, _, _ = SIZES
    inputs = [*x.qkv(SIZES), x(B, H, M, seed=5).requires_grad_()]
    outputs = attend_pairs(*inputs[:3], two_sets(B, H, N, M), mask, scale=SCALE, key_bias=inputs[3])
    return [*outputs, *x.gradients(outputs, inputs)]


def distances(x: Numbers) -> list[Tensor]:
    (B, H, _, N, M, _, _), span = SIZES, 6
    buckets = Buckets(torch.arange(N).expand(B, H, 1, N), torch.arange(M).expand(B, H, 1, M), span=span)
    inputs = [*x.qkv(SIZES), x(B, H, N, 2 * span + 1, seed=5).requires_grad_()]
    outputs = attend_pairs(*inputs[:3], buckets, Mask(), scale=SCALE, of_distance=inputs[3])
    return [*outputs, *x.gradients(outputs, inputs)]


def features(x: Numbers, projected: bool, **pattern: object) -> list[Tensor]:
    B, H, G, N, _, D, E = SIZES
    inputs = [*x.qkv((B, H, G, N, N, D, E)), x(B, G, N, seed=5).requires_grad_()]
    maps = {"of_query": x(H, 37, D, seed=6) / 5, "of_key": x(1, 37, D, seed=7) / 5, "feature_bias": x(1, 37, seed=8)}
    outputs = feature_attention(*inputs[:3], key_bias=inputs[3], **(maps if projected else {}), **pattern)
    return [*outputs, *x.gradients(outputs, inputs)]


def products(x: Numbers) -> list[Tensor]:
    B, H, G, N, _, D, E = SIZES
    inputs = [(each.detach() / 4).requires_grad_() for each in x.qkv((B, H, G, N, N, D, E))]  # sums of about 1
    out = causal_product(*inputs)
    return [out, *x.gradients((out,), inputs)]


def listed(x: Numbers) -> list[Tensor]:
    B, H, _, N, _, D, E = SIZES
    rows = torch.arange(24).view(6, 4)  # of 6 clusters
    lists = torch.where((rows + rows // 4) % 3 > 0, rows, 24).expand(B, H, 6, 4)
    inputs = [each.requires_grad_() for each in (x(B, H, N, D), *(x(B, H, 24, d, seed=d) for d in (D, E)))]
    inputs.append(x(B, H, 24, seed=9).requires_grad_())
    outputs = attend_listed(*inputs, integers(7, B, H, N, seed=1), lists, scale=SCALE)
    return [*outputs, *x.gradients(outputs, inputs)]


def windows(x: Numbers) -> list[Tensor]:
    parts = [TokenWindows(0, 9, 9, 3), TokenWindows(4, 20, 0, 1), TokenWindows(2, 5, 7, 4)]
    outs = [x(2 * each.count, 3, each.length, 13, seed=n) for n, each in enumerate(parts)]
    lses = [x(2 * each.count, 3, each.length, seed=9 + n, dtype=FP32) for n, each in enumerate(parts)]
    return list(merge_windows(outs, lses, parts, tokens=31))


def hashes(x: Numbers, centre: bool) -> list[Tensor]:
    B, H, _, N, _, D, _ = SIZES
    vectors, valid = x(B, H, N, D), padding(B, N)
    codes = hash_codes(vectors, 63, 1, centre=centre, valid=valid)
    return [codes, hamming_kmeans(codes, valid, 20, 63, 5)]


def choices(x: Numbers) -> list[Tensor]:
    """Clusters, the nearest ones of other queries, and cells."""
    (query, key, value), (B, H, _, N, M, D, _) = x.qkv(SIZES), SIZES
    masks, rounds = (padding(B, N), padding(B, M)), {"bits": 63, "iterations": 3, "seed": 1}
    of_queries = [query_clusters(query, key, *masks, space=s, clusters=12, refine=2, **rounds) for s in SPACES]
    means, sizes = x(B, H, 12, D, seed=7, dtype=FP32), integers(3, B, H, 12, seed=8)
    nearest = nearest_clusters(query, key, means, sizes, *masks)
    return [*of_queries, nearest, key_cells(key, value, masks[1], cells=8, seed=1, bits=63, iterations=3)]


SPACES = "queries", "logits"


def shards(x: Numbers) -> list[Tensor]:
    """Return what ranks compute from their own tokens."""
    B, H, _, N, _, D, _ = SIZES
    vectors, others, valid = x(B, H, N, D), x(B, H, N, 5, seed=1), padding(B, N)
    (mean, squares), (other, more) = moments_of(vectors, valid), moments_of(others, valid)
    means = mean.float().double(), other.float().double()  # what both compute alike from here on
    terms = Term(vectors, means[0], torch.ones_like(squares)), Term(others, means[1], torch.ones_like(squares))
    codes = centred_codes(terms, x(1, 1, 63, D + 5, seed=2, dtype=FP32), valid)
    labels, votes = assign_codes(codes, codes[:, :, 10:21].contiguous(), valid)
    directions, halves = x(B, H, D, 7, seed=3, dtype=FP32), x(B, H, 7, seed=4, dtype=FP32)
    nearest = assign_means(vectors, means[0], directions, halves, valid)
    sums, sizes = group_sums(vectors, integers(8, B, H, N, seed=5) - 1, 6)
    return [mean, squares, other, more, codes, labels, votes, nearest, sums, sizes]


def tops(x: Numbers, odds: bool) -> list[Tensor]:
    """The tokens of buckets, by scores and by learned hash functions."""
    B, H, G, N, _, D, _ = SIZES
    sizes, valid = torch.tensor([11, 7]), padding(B, N)
    functions = HashFunction(H, D, 6, "mlp", 10, 1), HashFunction(G, D, 6, "linear", 0, 2)
    hashed = Hashed(((functions[0], x(B, H, N, D)), (functions[1], x(B, G, N, D, seed=1))), H, 0.5)
    results: list[Tensor] = []
    for scores in (x(B, H, N, 6, seed=2), hashed):
        tokens, best = top_and_best(scores, sizes, 11, valid, odds=odds)
        results += [tokens, *of_real(best)]
    return results


def blocks(x: Numbers) -> list[Tensor]:
    return list(sorted_blocks(integers(9, 2, 3, 150), 8, 16))


def _cases() -> dict[str, tuple[torch.dtype, Callable[[Numbers], list[Tensor]]]]:
    cases: dict[str, tuple[torch.dtype, Callable[[Numbers], list[Tensor]]]] = {}
    for dtype in CLOSE:
        name = str(dtype).removeprefix("torch.")
        for masks, causal, padded in (("none", False, False), ("causal, padded", True, True)):
            for sizes in (SIZES, ODD_SIZES, LONG_SIZES):
                cases[f"exact, {name}, {sizes}, {masks}"] = (
                    dtype,
                    lambda x, s=sizes, c=causal, p=padded: exact(x, s, c, p),
                )
        cases[f"steps, {name}"] = dtype, lambda x: steps(x, None, None)
        cases[f"steps, {name}, window and softcap"] = dtype, lambda x: steps(x, 60, 2.0)
        for topk in (0, 9):
            cases[f"clustered, {name}, {topk} top keys"] = dtype, lambda x, k=topk: clustered(x, k)
        for window in (0, 5):
            cases[f"tail, {name}, window {window}"] = dtype, lambda x, w=window: tail(x, w, True)
            cases[f"tail, {name}, window {window}, no gradient"] = dtype, lambda x, w=window: tail(x, w, False)
        cases[f"windows, {name}"] = dtype, windows
        cases[f"hashes, {name}"] = dtype, lambda x: [*hashes(x, False), *hashes(x, True)]
        cases[f"shards, {name}"] = dtype, shards
        cases[f"choices, {name}"] = dtype, choices
    masks = {"none": Mask(), "causal": Mask.causal(offset=9), "window": Mask.window(6)}
    cases |= {f"pairs, {name}": (FP32, lambda x, m=mask: pairs(x, m)) for name, mask in masks.items()}
    cases["pairs, distances"] = FP32, distances
    for pattern in ({}, {"causal": True}, {"lagged": (16, 1)}):
        cases[f"features, {pattern}"] = FP32, lambda x, p=pattern: features(x, False, **p)
        cases[f"features, projected, {pattern}"] = FP32, lambda x, p=pattern: features(x, True, **p)
    cases |= {"products": (FP32, products), "listed": (FP32, listed), "blocks": (FP32, blocks)}
    return cases | {f"tops, odds {odds}": (FP32, lambda x, o=odds: tops(x, o)) for odds in (False, True)}


CASES = _cases()


def record(name: str, threads: int = 2) -> Recording:
    """A case: what its kernels read here, and what the reference makes of it."""
    dtype, results = CASES[name]
    with sq.use_backend("cpu"), recorded(threads) as recording:
        have = results(Numbers(dtype, exact=False))
    with sq.use_backend("reference"):
        want = results(Numbers(dtype, exact=True))
    for number, (a, b) in enumerate(zip(have, want, strict=True)):
        close = CLOSE.get(a.dtype, 1e-6)
        recording.compare(f"result {number}", a, b, (max(close, CLOSE[dtype]), close))
    return recording


def write(file: Path) -> set[str]:
    """Write all cases, and return the kernels that they call."""
    recordings = {name: record(name) for name in CASES}
    file.write_bytes(file_of(recordings))
    return {kernel for recording in recordings.values() for kernel, _ in recording.calls}


if __name__ == "__main__":
    print(*sorted(write(Path(sys.argv[1]))))
