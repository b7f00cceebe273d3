"""The top keys of each centroid, without a matrix of all centroids and all keys.

Of blocks of 16 keys only the largest score is kept. The K largest scores of a centroid lie in the K blocks whose
largest scores are the largest, so that only the keys of these are scored once more:

    keys        [· · · · ∙ ∙][· · 7 · · ·][3 · · · · ·][· · 9 · 8 ·]      blocks
    maxima            2            7            3            9            C×M/16, and their top K by torch
    candidates                [· · 7 · · ·]             [· · 9 · 8 ·]      C×16K, and their top K by torch
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.ops.triton.launch import dot, launch, load_rows, padded, rows, strides, tile
from subquad.ops.triton.recording import Work

BLOCK = 16  # keys


def top_scores(
    centroids: Tensor, key: Tensor, bias: Tensor | None, there: Tensor | None, topk: int, scale: float
) -> tuple[Tensor, Tensor]:
    """The `topk` keys with the largest scale·centroid·key + bias, the largest first, and these: (B,H,C,topk) each.

    `bias` is (B,G,M), and keys that are not `there`, (B,G,M), are not taken; both may be None. Where no key is left
    stand M and −∞. topk ≤ M.
    """
    (B, H, C, _), M = centroids.shape, key.shape[2]
    key, blocks = rows(key), triton.cdiv(M, BLOCK)
    given = centroids, key, bias, there, scale
    if blocks <= topk:
        chosen = torch.arange(blocks, dtype=torch.int32, device=key.device).expand(B, H, C, blocks).contiguous()
    else:
        chosen = _maxima(*given, blocks).topk(topk, dim=-1, sorted=False).indices.int()
    scores = _candidates(*given, chosen)
    found, place = scores.topk(topk, dim=-1)
    keys = chosen.gather(3, place // BLOCK).long() * BLOCK + place % BLOCK
    return keys.masked_fill(torch.isneginf(found), M), found


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
    centroids: Tensor, key: Tensor, bias: Tensor | None, there: Tensor | None, scale: float, chosen: Tensor
):
    (B, H, C, D), (G, M), K = centroids.shape, key.shape[1:3], chosen.shape[3]
    scores = centroids.new_empty(B, H, C, K * BLOCK, dtype=torch.float32)
    launch(
        candidate_scores,
        (C, B * H),
        work=Work(B * H * C * K * BLOCK * D, B * H * C * K * BLOCK * (D * key.element_size() + 4)),
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
        block = tl.load(chosen + (head * C + row) * K + start + slot // BLOCK, mask=listed, other=0)
        column = tl.where(listed, block * BLOCK + slot % BLOCK, M)
        vectors = load_rows(key, key_n, column, column < M, D, WIDTH).to(tl.float32)
        logits = tl.sum(vectors * mean[None, :], 1) * scale
        found = ranked(logits[None, :], bias, there, of_key * M, column, M)
        place = scores + (head * C + row) * K * BLOCK + start * BLOCK + slot
        tl.store(place[None, :], found, mask=listed[None, :])
