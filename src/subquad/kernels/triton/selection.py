"""The top keys of each centroid, without a matrix of all centroids and all keys.

Of blocks of 8 keys only the largest score is kept. The K largest scores of a centroid lie in the K blocks whose
largest scores are the largest, so that only the scores of these are written, when all are computed once more: a second
product on tensor cores takes less time than gathering the keys of each centroid's own blocks.

    keys        [· · · · ∙ ∙][· · 7 · · ·][3 · · · · ·][· · 9 · 8 ·]      blocks
    maxima            2            7            3            9            C×M/8, of which the K largest are chosen
    candidates                [· · 7 · · ·]             [· · 9 · 8 ·]      C×8K, of which the K largest are listed
    top                       7 · 9 · 8 as numbers of keys, ascending
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.triton.largest import list_largest
from subquad.kernels.triton.launch import dot, launch, load_rows, padded, rows, strides, tile
from subquad.kernels.triton.recording import LaunchCost

BLOCK = 8  # keys


def choose_top(
    centroids: Tensor,
    key: Tensor,
    bias: Tensor | None,
    present: Tensor | None,
    scale: float,
    top: Tensor,
    wanted: Tensor | None = None,
    lse: Tensor | None = None,
) -> None:
    """Fill `top`, (B,H,C,K) int32, with the keys with the largest scale·centroid·key + bias, ascending; then M.

    Args:
        centroids: (B,H,C,D).
        key: (B,G,M,D).
        bias: (B,H,M) fp32, or None.
        present: (B,G,M), not 0 for keys that may be taken; None: all.
        scale: the factor of the products.
        top: at most M slots for each centroid.
        wanted: (B,), how many of the largest an item takes; None: all K.
        lse: (B,H,C) fp32, to be filled with ln Σ e^score over the K keys, or None.
    """
    K, M = top.shape[3], key.shape[2]
    if K == 0:
        return
    key, blocks = rows(key), triton.cdiv(M, BLOCK)
    inputs = centroids, key, bias, present, scale
    chosen = ranks = None
    if blocks > K:
        maxima = _maxima(*inputs, blocks=blocks)
        chosen, ranks = top.new_empty(top.shape), top.new_empty(maxima.shape)
        list_largest(maxima, chosen, empty=0, finite=False, ranks=ranks)
    scores = _candidates(*inputs, blocks=blocks, ranks=ranks, K=min(blocks, K))
    list_largest(scores, top, empty=M, wanted=wanted, of_blocks=chosen, block=BLOCK, lse=lse)


def _maxima(centroids: Tensor, key: Tensor, *inputs: Any, blocks: int) -> Tensor:
    """The largest score of each block: (B,H,C,blocks)."""
    maxima = centroids.new_empty(*centroids.shape[:3], blocks, dtype=torch.float32)
    _launch(block_maxima, centroids, key, *inputs, written=maxima.numel(), maxima=maxima, blocks=blocks)
    return maxima


def _candidates(*inputs: Any, blocks: int, ranks: Tensor | None, K: int) -> Tensor:
    """The scores of the keys in K chosen blocks, in ascending order: (B,H,C,K·BLOCK)."""
    centroids = inputs[0]
    scores = centroids.new_empty(*centroids.shape[:3], K * BLOCK, dtype=torch.float32)
    sizes: dict[str, Any] = {"scores": scores, "ranks": ranks, "blocks": blocks, "K": K}
    _launch(candidate_scores, *inputs, written=scores.numel(), **sizes)
    return scores


def _launch(
    kernel: Any,
    centroids: Tensor,
    key: Tensor,
    bias: Tensor | None,
    present: Tensor | None,
    scale: Any,
    *,
    written: Any,
    **more: Any,
) -> None:
    (B, H, C, D), (G, M), of_16_bits = centroids.shape, key.shape[1:3], key.element_size() == 2
    rows_of_tile, keys_of_tile = tile(C, 64 if of_16_bits else 32), tile(M, 64)
    launch(
        kernel,
        (triton.cdiv(M, keys_of_tile), triton.cdiv(C, rows_of_tile), B * H),
        cost=LaunchCost(B * H * C * M * D, B * G * M * D * key.element_size() + 4 * written),
        **{"centroids": centroids, "key": key, **strides("key", key), "bias": bias, "present": present, "scale": scale},
        **{"H": H, "G": G, "M": M, "C": C, "D": D, "SLICE": min(padded(D), 64 if of_16_bits else 32)},
        **{"ROWS": rows_of_tile, "KEYS": keys_of_tile, "BLOCK": BLOCK},
        **more,
    )


@triton.jit
def ranked(logits, bias, present, of_head, of_key, key, M):
    """The scores by which keys are ranked: −∞ for absent keys alone. NaN stays, and is the largest."""
    inside = key < M
    if bias is not None:
        logits += tl.load(bias + of_head + key, mask=inside, other=0.0)[None, :]
    if present is not None:
        inside = inside & (tl.load(present + of_key + key, mask=inside, other=0) != 0)
    logits = tl.where(logits == float("-inf"), -3e38, logits)
    return tl.where(inside[None, :], logits, float("-inf"))


@triton.jit
def scores_of_tile(
    centroids,
    key,
    key_b,
    key_h,
    key_n,
    bias,
    present,
    scale,
    head,
    row,
    column,
    H,
    G,
    M,
    C,
    D,
    SLICE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """The scores by which a tile of centroids ranks the keys of a tile: (ROWS, KEYS)."""
    of_key = head // H * G + head % H // (H // G)
    key += of_key // G * key_b + of_key % G * key_h
    logits = tl.zeros((ROWS, KEYS), tl.float32)
    for start in range(0, D, SLICE):
        means = load_rows(centroids + head * C * D + start, D, row, row < C, D - start, SLICE)
        vectors = load_rows(key + start, key_n, column, column < M, D - start, SLICE)
        logits += dot(means.to(vectors.dtype), tl.trans(vectors))
    return ranked(logits * scale, bias, present, head * M, of_key * M, column, M)


@triton.jit
def block_maxima(
    centroids,
    key,
    key_b,
    key_h,
    key_n,
    bias,
    present,
    maxima,
    scale,
    H,
    G,
    M,
    C,
    blocks,
    D,
    SLICE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest score of each block of keys, for a tile of centroids and a tile of keys."""
    head = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    inputs = centroids, key, key_b, key_h, key_n, bias, present, scale
    scores = scores_of_tile(*inputs, head, row, column, H, G, M, C, D, SLICE, ROWS, KEYS)
    scores = tl.where(scores != scores, float("inf"), scores)  # a maximum would drop NaN
    largest = tl.max(tl.reshape(scores, (ROWS, KEYS // BLOCK, BLOCK)), 2)
    block = tl.program_id(0) * (KEYS // BLOCK) + tl.arange(0, KEYS // BLOCK)
    pointers = maxima + (head * C + row)[:, None] * blocks + block[None, :]
    tl.store(pointers, largest, mask=(row < C)[:, None] & (block < blocks)[None, :])


@triton.jit
def candidate_scores(
    centroids,
    key,
    key_b,
    key_h,
    key_n,
    bias,
    present,
    ranks,
    scores,
    scale,
    H,
    G,
    M,
    C,
    K,
    blocks,
    D,
    SLICE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The scores of each centroid's chosen blocks of keys, where they are among them; `ranks` is −1 for the others."""
    head = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    inputs = centroids, key, key_b, key_h, key_n, bias, present, scale
    tile_scores = scores_of_tile(*inputs, head, row, column, H, G, M, C, D, SLICE, ROWS, KEYS)
    block = column // BLOCK
    written = (row < C)[:, None] & (block < blocks)[None, :]
    rank = tl.broadcast_to(block[None, :], (ROWS, KEYS))
    if ranks is not None:
        rank = tl.load(ranks + (head * C + row)[:, None] * blocks + block[None, :], mask=written, other=-1)
    slot = (head * C + row)[:, None] * K * BLOCK + rank * BLOCK + (column % BLOCK)[None, :]
    tl.store(scores + slot, tile_scores, mask=written & (rank >= 0))
