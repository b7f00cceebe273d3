"""The top keys of each centroid, without a matrix of all centroids and all keys.

Of blocks of 8 keys only the largest score is kept. The K largest scores of a centroid lie in the K blocks whose
largest scores are the largest, so that only the scores of these are written, when all are computed once more: a second
product on tensor cores takes less time than gathering the keys of each centroid's own blocks.

    keys        [· · · · ∙ ∙][· · 7 · · ·][3 · · · · ·][· · 9 · 8 ·]      blocks
    maxima            2            7            3            9            C×M/8, and their top K by torch
    candidates                [· · 7 · · ·]             [· · 9 · 8 ·]      C×8K, and their top K by torch
    top                       7 · 9 · 8 as numbers of keys, ascending: a key stands behind those with lower numbers
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.ops.triton.launch import dot, launch, load_rows, padded, rows, strides, tile
from subquad.ops.triton.recording import Work

BLOCK = 8  # keys
SLOTS = 64  # of a list, for one program


def choose_top(
    centroids: Tensor,
    key: Tensor,
    bias: Tensor | None,
    there: Tensor | None,
    scale: float,
    top: Tensor,
    wanted: Tensor | None = None,
    lse: Tensor | None = None,
) -> None:
    """Fill `top`, (B,H,C,K) int32, with the keys with the largest scale·centroid·key + bias, ascending; then M.

    Args:
        centroids: (B,H,C,D).
        key: (B,G,M,D).
        bias: (B,G,M) fp32, or None.
        there: (B,G,M), not 0 for keys that may be taken; None: all.
        scale: of the products.
        top: at most M slots for each centroid.
        wanted: (B,), how many of the largest an item takes; None: all K.
        lse: (B,H,C) fp32, to be filled with ln Σ e^score over the K keys, or None.
    """
    (B, H, C, K), M = top.shape, key.shape[2]
    if K == 0:
        return
    key, blocks = rows(key), triton.cdiv(M, BLOCK)
    given = centroids, key, bias, there, scale
    chosen = None if blocks <= K else _maxima(*given, blocks=blocks).topk(K, dim=-1, sorted=False).indices
    scores = _candidates(*given, blocks=blocks, chosen=chosen, K=min(blocks, K))
    found, place = scores.topk(K, dim=-1)  # the largest first
    launch(
        list_keys,
        (triton.cdiv(K, SLOTS), C, B * H),
        work=Work(bytes=B * H * C * K * 24),
        **{"found": found, "place": place, "chosen": chosen, "wanted": wanted, "top": top, "lse": lse},
        **{"H": H, "M": M, "C": C, "K": K, "blocks": 0 if chosen is None else K, "BLOCK": BLOCK, "SLOTS": SLOTS},
    )


def _maxima(centroids: Tensor, key: Tensor, *given: Any, blocks: int) -> Tensor:
    """The largest score of each block: (B,H,C,blocks)."""
    maxima = centroids.new_empty(*centroids.shape[:3], blocks, dtype=torch.float32)
    _launch(block_maxima, centroids, key, *given, written=maxima.numel(), maxima=maxima, blocks=blocks)
    return maxima


def _candidates(centroids: Tensor, key: Tensor, *given: Any, blocks: int, chosen: Tensor | None, K: int) -> Tensor:
    """The scores of the keys in K chosen blocks, in the order in which these were chosen: (B,H,C,K·BLOCK)."""
    scores = centroids.new_empty(*centroids.shape[:3], K * BLOCK, dtype=torch.float32)
    ranks = None
    if chosen is not None:
        number = torch.arange(K, dtype=torch.int32, device=key.device).expand(chosen.shape)
        ranks = torch.full((*chosen.shape[:3], blocks), -1, dtype=torch.int32, device=key.device)
        ranks.scatter_(3, chosen, number)
    sizes: dict[str, Any] = {"scores": scores, "ranks": ranks, "blocks": blocks, "K": K}
    _launch(candidate_scores, centroids, key, *given, written=scores.numel(), **sizes)
    return scores


def _launch(
    kernel: Any,
    centroids: Tensor,
    key: Tensor,
    bias: Tensor | None,
    there: Tensor | None,
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
        work=Work(B * H * C * M * D, B * G * M * D * key.element_size() + 4 * written),
        **{"centroids": centroids, "key": key, **strides("key", key), "bias": bias, "there": there, "scale": scale},
        **{"H": H, "G": G, "M": M, "C": C, "D": D, "SLICE": min(padded(D), 64 if of_16_bits else 32)},
        **{"ROWS": rows_of_tile, "KEYS": keys_of_tile, "BLOCK": BLOCK},
        **more,
    )


@triton.jit
def ranked(logits, bias, there, base, key, M):
    """What keys are ranked by: −∞ for those that are not there alone. NaN stays, and is the largest."""
    inside = key < M
    if bias is not None:
        logits += tl.load(bias + base + key, mask=inside, other=0.0)[None, :]
    if there is not None:
        inside = inside & (tl.load(there + base + key, mask=inside, other=0) != 0)
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
    there,
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
    """What the keys of a tile are ranked by for a tile of centroids: (ROWS, KEYS)."""
    of_key = head // H * G + head % H // (H // G)
    key += of_key // G * key_b + of_key % G * key_h
    logits = tl.zeros((ROWS, KEYS), tl.float32)
    for start in range(0, D, SLICE):
        means = load_rows(centroids + head * C * D + start, D, row, row < C, D - start, SLICE)
        vectors = load_rows(key + start, key_n, column, column < M, D - start, SLICE)
        logits += dot(means.to(vectors.dtype), tl.trans(vectors))
    return ranked(logits * scale, bias, there, of_key * M, column, M)


@triton.jit
def block_maxima(
    centroids,
    key,
    key_b,
    key_h,
    key_n,
    bias,
    there,
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
    given = centroids, key, key_b, key_h, key_n, bias, there, scale
    scores = scores_of_tile(*given, head, row, column, H, G, M, C, D, SLICE, ROWS, KEYS)
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
    there,
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
    given = centroids, key, key_b, key_h, key_n, bias, there, scale
    found = scores_of_tile(*given, head, row, column, H, G, M, C, D, SLICE, ROWS, KEYS)
    block = column // BLOCK
    written = (row < C)[:, None] & (block < blocks)[None, :]
    rank = tl.broadcast_to(block[None, :], (ROWS, KEYS))
    if ranks is not None:
        rank = tl.load(ranks + (head * C + row)[:, None] * blocks + block[None, :], mask=written, other=-1)
    place = (head * C + row)[:, None] * K * BLOCK + rank * BLOCK + (column % BLOCK)[None, :]
    tl.store(scores + place, found, mask=written & (rank >= 0))


@triton.jit
def load_keys(found, place, chosen, of_row, slot, count, blocks, M, K, BLOCK: tl.constexpr):
    """The keys in these slots of a list whose largest scores come first; M where a slot is empty."""
    at = tl.load(place + of_row * K + slot, mask=slot < K, other=0).to(tl.int32)
    block = at // BLOCK
    if chosen is not None:
        block = tl.load(chosen + of_row * blocks + block, mask=slot < K, other=0).to(tl.int32)
    score = tl.load(found + of_row * K + slot, mask=slot < K, other=-float("inf"))
    return tl.where((score == -float("inf")) | (slot >= count), M, block * BLOCK + at % BLOCK)


@triton.jit
def list_keys(found, place, chosen, wanted, top, lse, H, M, C, K, blocks, BLOCK: tl.constexpr, SLOTS: tl.constexpr):
    """A tile of one centroid's list: each key's slot is how many keys of the list stand before it."""
    head, row = tl.program_id(2).to(tl.int64), tl.program_id(1)
    of_row = head * C + row
    count = K if wanted is None else tl.load(wanted + head // H).to(tl.int32)
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    key = load_keys(found, place, chosen, of_row, slot, count, blocks, M, K, BLOCK)
    before = tl.zeros((SLOTS,), tl.int32)
    for first in range(0, K, SLOTS):
        other = first + tl.arange(0, SLOTS)
        theirs = load_keys(found, place, chosen, of_row, other, count, blocks, M, K, BLOCK)[None, :]
        equal = (theirs == key[:, None]) & (other[None, :] < slot[:, None])  # empty slots keep their order
        lower = ((theirs < key[:, None]) | equal) & (other < K)[None, :]
        before += tl.sum(lower.to(tl.int32), 1)
    tl.store(top + of_row * K + before, key, mask=slot < K)
    if lse is not None and tl.program_id(0) == 0:
        largest = tl.load(found + of_row * K)
        safe = tl.where(largest == -float("inf"), 0.0, largest)
        total = tl.zeros((SLOTS,), tl.float32)
        for first in range(0, K, SLOTS):
            other = first + tl.arange(0, SLOTS)
            total += tl.exp(tl.load(found + of_row * K + other, mask=other < K, other=-float("inf")) - safe)
        tl.store(lse + of_row, tl.log(tl.sum(total, 0)) + safe)
