"""The top keys of each centroid, without a matrix of all centroids and all keys.

Of blocks of 16 keys only the largest score is kept. The K largest scores of a centroid lie in the K blocks whose
largest scores are the largest, so that only the keys of these are scored once more:

    keys        [· · · · ∙ ∙][· · 7 · · ·][3 · · · · ·][· · 9 · 8 ·]      blocks
    maxima            2            7            3            9            C×M/16, and their top K by torch
    candidates                [· · 7 · · ·]             [· · 9 · 8 ·]      C×16K, and their top K by torch
    top                       7 · 9 · 8 as numbers of keys, ascending: a key stands behind those with lower numbers
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.ops.triton.launch import dot, launch, load_rows, padded, rows, strides, tile
from subquad.ops.triton.recording import Work

BLOCK = 16  # keys
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
    chosen = None if blocks <= K else _maxima(*given, blocks).topk(K, dim=-1, sorted=False).indices
    scores = _candidates(*given, chosen, min(blocks, K))
    found, place = scores.topk(K, dim=-1)  # the largest first
    launch(
        list_keys,
        (triton.cdiv(K, SLOTS), C, B * H),
        work=Work(bytes=B * H * C * K * 24),
        **{"found": found, "place": place, "chosen": chosen, "wanted": wanted, "top": top, "lse": lse},
        **{"H": H, "M": M, "C": C, "K": K, "blocks": 0 if chosen is None else K, "BLOCK": BLOCK, "SLOTS": SLOTS},
    )


def _maxima(centroids: Tensor, key: Tensor, bias: Tensor | None, there: Tensor | None, scale: float, blocks: int):
    (B, H, C, D), (G, M) = centroids.shape, key.shape[1:3]
    maxima = centroids.new_empty(B, H, C, blocks, dtype=torch.float32)
    of_16_bits = key.element_size() == 2
    rows_of_tile, keys_of_tile = tile(C, 64 if of_16_bits else 32), tile(M, 64)
    launch(
        block_maxima,
        (triton.cdiv(M, keys_of_tile), triton.cdiv(C, rows_of_tile), B * H),
        work=Work(B * H * C * M * D, B * G * M * D * key.element_size() + 4 * maxima.numel()),
        centroids=centroids,
        key=key,
        **strides("key", key),
        bias=bias,
        there=there,
        maxima=maxima,
        scale=scale,
        H=H,
        G=G,
        M=M,
        C=C,
        blocks=blocks,
        D=D,
        SLICE=min(padded(D), 64 if of_16_bits else 32),
        ROWS=rows_of_tile,
        KEYS=keys_of_tile,
        BLOCK=BLOCK,
    )
    return maxima


def _candidates(
    centroids: Tensor,
    key: Tensor,
    bias: Tensor | None,
    there: Tensor | None,
    scale: float,
    chosen: Tensor | None,
    K: int,
):
    (B, H, C, D), (G, M) = centroids.shape, key.shape[1:3]
    scores = centroids.new_empty(B, H, C, K * BLOCK, dtype=torch.float32)
    launch(
        candidate_scores,
        (C, B * H),
        work=Work(bytes=B * H * C * K * BLOCK * (D * key.element_size() + 4)),
        num_stages=3,
        centroids=centroids,
        key=key,
        **strides("key", key),
        bias=bias,
        there=there,
        chosen=chosen,
        scores=scores,
        scale=scale,
        H=H,
        G=G,
        M=M,
        C=C,
        K=K,
        D=D,
        WIDTH=padded(D),
        BLOCK=BLOCK,
        BLOCKS=2,
    )
    return scores


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
    of_key = head // H * G + head % H // (H // G)
    key += of_key // G * key_b + of_key % G * key_h
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    logits = tl.zeros((ROWS, KEYS), tl.float32)
    for start in range(0, D, SLICE):
        means = load_rows(centroids + head * C * D + start, D, row, row < C, D - start, SLICE)
        vectors = load_rows(key + start, key_n, column, column < M, D - start, SLICE)
        logits += dot(means.to(vectors.dtype), tl.trans(vectors))
    scores = ranked(logits * scale, bias, there, of_key * M, column, M)
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
    chosen,
    scores,
    scale,
    H,
    G,
    M,
    C,
    K,
    D,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The scores of one centroid's chosen blocks of keys. Each centroid has its own: no product of tiles."""
    head, row = tl.program_id(1).to(tl.int64), tl.program_id(0)
    of_key = head // H * G + head % H // (H // G)
    key += of_key // G * key_b + of_key % G * key_h
    width = tl.arange(0, WIDTH)
    mean = tl.load(centroids + (head * C + row) * D + width, mask=width < D, other=0.0)
    mean = mean.to(key.dtype.element_ty).to(tl.float32)
    slot = tl.arange(0, BLOCKS * BLOCK)
    for start in range(0, K, BLOCKS):
        listed = start + slot // BLOCK < K
        block = start + slot // BLOCK
        if chosen is not None:
            block = tl.load(chosen + (head * C + row) * K + block, mask=listed, other=0).to(tl.int32)
        column = tl.where(listed, block * BLOCK + slot % BLOCK, M)
        vectors = load_rows(key, key_n, column, column < M, D, WIDTH).to(tl.float32)
        logits = tl.sum(vectors * mean[None, :], 1) * scale
        found = ranked(logits[None, :], bias, there, of_key * M, column, M)
        place = scores + (head * C + row) * K * BLOCK + start * BLOCK + slot
        tl.store(place[None, :], found, mask=listed[None, :])


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
