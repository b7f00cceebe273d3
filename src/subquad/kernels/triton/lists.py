"""Small things about lists of tokens: bits of those that a cluster lists, distances to the means of groups."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.triton.launch import kernel, launch, load_rows, padded, rows, strides
from subquad.kernels.triton.recording import LaunchCost

WORD = 32  # bits
WORDS = 64  # of a step


def inside_words(top: Tensor, order: Tensor, rank: Tensor | None = None) -> Tensor:
    """Bits of the keys that a cluster lists, by their place in `order`: (B,H,C,⌈M/32⌉) int32.

    `top` is (B,H,C,K), with M, or a number that no key has, where a slot is empty; `order` is (B,G,M), and so is
    `rank`, the place of each key in it, if known.
    """
    (B, H, C, K), (G, M) = top.shape, order.shape[1:]
    words = torch.empty(B, H, C, max(1, -(-M // WORD)), dtype=torch.int32, device=top.device)
    rank = _inverse(order) if rank is None else rank
    launch(
        set_bits,
        (C, B * H),
        cost=LaunchCost(bytes=4 * (top.numel() * 2 + words.numel())),
        top=top,
        rank=rank,
        words=words,
        **{"H": H, "G": G, "M": M, "C": C, "K": K, "count": words.shape[3]},
        SLOTS=16,
        WORDS=WORDS,
    )
    return words


def _inverse(order: Tensor) -> Tensor:
    B, G, M = order.shape
    rank = torch.empty_like(order)
    launch(
        invert,
        (triton.cdiv(M, 1024), B * G),
        cost=LaunchCost(bytes=8 * order.numel()),
        **{"order": order, "rank": rank, "M": M, "TOKENS": 1024},
    )
    return rank


def log_distances(x: Tensor, labels: Tensor, means: Tensor, least: float, most: float) -> tuple[Tensor, Tensor]:
    """ln ‖x_i − mean of its group‖ in fp32, of squares between `least` and `most`, and 1 for what is in a group.

    Both are (B,H,N). A distance is 0 where it is NaN; a label that no group has means a mean of 0.
    """
    x, (B, H, N, D), groups = rows(x), x.shape, means.shape[2]
    distances, grouped = x.new_empty(B, H, N, dtype=torch.float32), x.new_empty(B, H, N, dtype=torch.uint8)
    launch(
        distances_to_means,
        (triton.cdiv(N, 32), B * H),
        cost=LaunchCost(bytes=B * H * N * (D * x.element_size() + 12) + means.numel() * 4),
        x=x,
        **strides("x", x),
        labels=labels.contiguous(),
        means=means,
        distances=distances,
        inside=grouped,
        **{"least": least, "most": most, "H": H, "N": N, "groups": groups, "D": D, "WIDTH": padded(D)},
        TOKENS=32,
    )
    return distances, grouped


@kernel
def invert(order, rank, M, TOKENS: tl.constexpr):
    """place[order[i]] = i."""
    head = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    token = tl.load(order + head * M + at, mask=at < M, other=0)
    tl.store(rank + head * M + token, at, mask=at < M)


@kernel
def set_bits(top, rank, words, H, G, M, C, K, count, SLOTS: tl.constexpr, WORDS: tl.constexpr):
    """One cluster's words: each the sum of its keys' bits, which are all different."""
    head, cluster = tl.program_id(1).to(tl.int64), tl.program_id(0)
    of_key = head // H * G + head % H // (H // G)
    of_cluster = head * C + cluster
    for start in range(0, count, WORDS):
        word = start + tl.arange(0, WORDS)
        bits = tl.zeros((WORDS,), tl.int32)
        for first in range(0, K, SLOTS):
            slot = first + tl.arange(0, SLOTS)
            token = tl.load(top + of_cluster * K + slot, mask=slot < K, other=-1)
            listed = (token >= 0) & (token < M)
            at = tl.load(rank + of_key * M + tl.where(listed, token, 0))
            mine = listed[:, None] & ((at >> 5)[:, None] == word[None, :])
            bits += tl.sum(tl.where(mine, (tl.full((SLOTS,), 1, tl.int32) << (at & 31))[:, None], 0), 0)
        tl.store(words + of_cluster * count + word, bits, mask=word < count)


@kernel
def distances_to_means(
    x,
    x_b,
    x_h,
    x_n,
    labels,
    means,
    distances,
    inside,
    least,
    most,
    H,
    N,
    groups,
    D,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """The logarithm of the distance of each vector to the mean of its group, for a tile of tokens."""
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    present = token < N
    label = tl.load(labels + head * N + token, mask=present, other=-1).to(tl.int32)
    grouped = (label >= 0) & (label < groups)
    vectors = load_rows(x + head // H * x_b + head % H * x_h, x_n, token, present, D, WIDTH).to(tl.float32)
    centres = load_rows(means + head * groups * D, D, tl.where(grouped, label, 0), grouped, D, WIDTH)
    apart = vectors - centres
    square = tl.sum(apart * apart, 1)
    distance = tl.log(tl.minimum(tl.maximum(square, least), most)) * 0.5
    tl.store(distances + head * N + token, tl.where(square == square, distance, 0.0), mask=present)
    tl.store(inside + head * N + token, grouped.to(tl.uint8), mask=present)
