"""K-means of hash codes on GPUs: Hamming distances and votes are products of ±1, on the tensor cores.

Bits become signs, s = 2·bit − 1, in fp16; fp32 sums of their products are exact integers, so that the labels are those
of the reference, whatever the tiles:

    nearest     signs·centroid = 64 − 2·(Hamming distance)          argmax over the centroids, tile by tile
    votes       votes[c] = Σ_{label = c} signs = (one-hot labels)ᵀ·signs           no atomics, no N×C matrix
    majority    the sign of the votes; where they are tied, the bit stays

Bits that the codes do not use are 0 in all of them, which adds the same to every product.

If one tile holds all centroids, a round is one launch: each program adds up the votes of all runs of tokens, which
gives it the centroids, labels its own run and counts the votes of that. More centroids take three launches a round.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.selection.kmeans.op import hamming_kmeans, kmeans_labels
from subquad.kernels.selection.kmeans.reference import ranks_and_counts
from subquad.kernels.triton import refusal_of_any_dtype
from subquad.kernels.triton.launch import dot, launch, padded, runs_of, tile
from subquad.kernels.triton.recording import LaunchCost

EDGE = 64  # tokens of a tile, and centroids of one
WORD = 64  # bits
TOGETHER = 128  # centroids of a tile that holds all; with 256 registers are spilled
MOST_CLUSTERS = 2**17  # score and number of a centroid are one integer below 2²⁴, which fp32 holds exactly
MOST_TOKENS = 2**24  # votes are such integers, too


@hamming_kmeans.refusal("triton")
def refusal(x: Any) -> str | None:
    """The reason why the kernels cannot take these codes; None if they can."""
    return refusal_of_any_dtype(x.codes) or refusal_of_sizes(x.codes.shape[2], x.clusters)


def refusal_of_sizes(tokens: int, clusters: int) -> str | None:
    """The reason why the kernels cannot count this far; None if they can."""
    if clusters > MOST_CLUSTERS:
        return f"there are {clusters:,} clusters, and the kernels tell at most {MOST_CLUSTERS:,} apart"
    if tokens > MOST_TOKENS:
        return f"there are {tokens:,} tokens, and the kernels count at most {MOST_TOKENS:,}"
    return None


@kmeans_labels.on("triton")
def compute(labels: Tensor, x: Any) -> None:
    """The Triton backend of `hamming_kmeans`."""
    fill_labels(labels, x.codes.contiguous(), KMeansItems.make(x.valid, None, x.clusters, labels), x.iterations)


@dataclass(frozen=True)
class KMeansItems:
    """The differences between the items of a batch; None for those that do not exist.

    Attributes:
        clusters: C, the most that an item has.
        valid: the tokens that are not padding, (B,N).
        rank: the number of each token among the real ones, (B,N).
        count: the number of real tokens, (B,).
        wanted: the number of clusters of the item, (B,).
    """

    clusters: int
    valid: Tensor | None
    rank: Tensor | None = None
    count: Tensor | None = None
    wanted: Tensor | None = None

    @staticmethod
    def make(valid: Tensor | None, counts: Tensor | None, clusters: int, labels: Tensor) -> "KMeansItems":
        """The items of these labels, (B,H,N), with `counts` clusters each, or all with the same number."""
        if valid is None and counts is None:
            return KMeansItems(clusters, None)
        rank, count = ranks_and_counts(valid, labels.shape[0], labels.shape[2], labels.device)
        valid = None if valid is None else valid.contiguous()
        return KMeansItems(clusters, valid, rank.contiguous(), count, None if counts is None else counts.contiguous())

    def starts(self, tokens: int, device: torch.device) -> Tensor:
        """The positions of the first centroids: the real tokens with ranks ⌊c·count/C⌋, (B|1,C)."""
        c = torch.arange(self.clusters, device=device)[None]
        if self.rank is None or self.count is None:
            return c * tokens // self.clusters
        wanted = self.clusters if self.wanted is None else self.wanted[:, None].clamp(min=1)
        # The first position that reaches a rank is a real one: a pad has the rank of the last real token before it.
        return torch.searchsorted(self.rank, c * self.count[:, None] // wanted).clamp(max=tokens - 1)

    def arguments(self) -> dict[str, Tensor | None]:
        """The arguments of `settled`, by name."""
        return {"valid": self.valid, "rank": self.rank, "count": self.count, "wanted": self.wanted}


def fill_labels(labels: Tensor, codes: Tensor, items: KMeansItems, iterations: int) -> None:
    """Fill labels (B,H,N) by k-means of the codes (B,H,N)."""
    (B, H, N), C = codes.shape, items.clusters
    if N == 0:
        return
    if N <= C and items.wanted is None:  # each token is its own cluster
        rank = torch.arange(N, device=codes.device)[None] if items.rank is None else items.rank
        rank = rank if items.valid is None else rank.where(items.valid, C)
        labels.copy_(rank[:, None].expand_as(labels))
        return
    if C <= TOGETHER:
        return rounds(labels, codes, items, iterations)
    centroids = codes.gather(2, items.starts(N, codes.device)[:, None].expand(B, H, C))
    for _ in range(iterations):
        assign(labels, codes, centroids, items)
        vote(labels, codes, centroids)
    assign(labels, codes, centroids, items)


def rounds(labels: Tensor, codes: Tensor, items: KMeansItems, iterations: int) -> None:
    """All rounds for few clusters. A program keeps its own copy of the centroids; no other one reads it."""
    (B, H, N), C = codes.shape, items.clusters
    tokens = tile(N, EDGE)
    length, splits = runs_of(N, tokens, 2 * B * H)  # fewer runs than elsewhere: each program reads the votes of all
    votes = (2, B, H, splits, C, WORD)  # of the last round, and of this one
    before, after = codes.new_empty(votes, dtype=torch.int16 if length < 2**15 else torch.int32)
    centroids = codes.new_empty(B, H, splits, C)
    for i in range(iterations + 1):
        launch(
            round_of_codes,
            (splits, B * H),
            cost=LaunchCost(2 * B * H * N * C * WORD, B * H * (16 * N + splits * C * WORD * 2)),
            **{"codes": codes, "centroids": centroids, "labels": labels, **items.arguments()},
            starts=items.starts(N, codes.device) if i == 0 and items.rank is not None else None,
            before=before if i > 0 else None,
            after=after if i < iterations else None,
            **{"H": H, "N": N, "C": C, "length": length, "splits": splits},
            **{"SCALE": triton.next_power_of_2(C), "TOKENS": tokens, "CENTROIDS": padded(C)},
        )
        before, after = after, before


def assign(labels: Tensor, codes: Tensor, centroids: Tensor, items: KMeansItems) -> None:
    """Each token gets the label of its nearest centroid."""
    (B, H, N), C = codes.shape, items.clusters
    tokens = tile(N, EDGE)
    launch(
        nearest_codes,
        (triton.cdiv(N, tokens), B * H),
        cost=LaunchCost(B * H * N * C * WORD, B * H * (16 * N + 8 * C)),
        **{"codes": codes, "centroids": centroids, "labels": labels, **items.arguments()},
        **{"H": H, "N": N, "C": C, "SCALE": triton.next_power_of_2(C), "TOKENS": tokens, "CENTROIDS": tile(C, EDGE)},
    )


def vote(labels: Tensor, codes: Tensor, centroids: Tensor) -> None:
    """Each bit of a centroid becomes that of the most members, in place."""
    (B, H, N), C = codes.shape, centroids.shape[2]
    tokens, edge = tile(N, EDGE), tile(C, EDGE)
    tiles = triton.cdiv(C, edge)
    length, splits = runs_of(N, tokens, tiles * B * H)
    votes = codes.new_empty(B, H, splits, C, WORD, dtype=torch.float32)
    launch(
        votes_of_members,
        (tiles, B * H, splits),
        cost=LaunchCost(B * H * N * C * WORD, B * H * 16 * N + 4 * votes.numel()),
        **{"codes": codes, "labels": labels, "votes": votes, "N": N, "C": C, "length": length},
        **{"splits": splits, "TOKENS": tokens, "CENTROIDS": edge},
    )
    launch(
        majority,
        (triton.cdiv(C, 16), B * H),
        num_warps=1,
        cost=LaunchCost(bytes=4 * votes.numel() + 16 * centroids.numel()),
        **{"votes": votes, "centroids": centroids, "C": C, "splits": splits, "CENTROIDS": 16},
    )


@triton.jit
def signs(words):
    """The bits of (n,) words as −1 and 1, (n, 64) in fp16."""
    return (((words[:, None] >> tl.arange(0, 64).to(tl.int64)[None, :]) & 1) * 2 - 1).to(tl.float16)


@triton.jit
def settled(label, item, token, N, C, present, valid, rank, count, wanted):
    """Labels of tokens, less what padding and items with no more tokens than clusters do not have to find."""
    if rank is not None:
        alone = tl.load(count + item) <= (C if wanted is None else tl.load(wanted + item))
        label = tl.where(alone, tl.load(rank + item * N + token, mask=present, other=0), label)
    if valid is not None:
        label = tl.where(tl.load(valid + item * N + token, mask=present, other=0) != 0, label, C)
    return label


@triton.jit
def scores_of(code, words, c, C, number, SCALE: tl.constexpr):
    """SCALE·(signs·centroid_c) − c for c < number, (tokens, centroids), with SCALE the power of two from C on.

    It holds both numbers, and is greatest for the lowest of the nearest centroids.
    """
    score = dot(code, tl.trans(signs(words))) * SCALE - c[None, :]
    return tl.where((c < C) & (c < number), 0.0, -float("inf"))[None, :] + score


@triton.jit
def voted(votes, old):
    """The words of these votes' signs, (n, 64); a bit that is tied keeps its value."""
    power = (tl.full((64,), 1, tl.int64) << tl.arange(0, 64).to(tl.int64))[None, :]
    return tl.sum(tl.where(votes > 0, power, 0), 1) | (old & tl.sum(tl.where(votes == 0, power, 0), 1))


@triton.jit
def load_votes(votes, of_split, c, C):
    """The votes for these centroids in one run of tokens, (n, 64)."""
    pointers = votes + (of_split * C + c)[:, None] * 64 + tl.arange(0, 64)[None, :]
    return tl.load(pointers, mask=(c < C)[:, None], other=0).to(tl.float32)


@triton.jit
def round_of_codes(
    codes,
    centroids,
    before,
    after,
    labels,
    starts,
    valid,
    rank,
    count,
    wanted,
    H,
    N,
    C,
    length,
    splits,
    SCALE: tl.constexpr,
    TOKENS: tl.constexpr,
    CENTROIDS: tl.constexpr,
):
    """The centroids by the votes of the last round, then the labels of one run of tokens, and then their votes."""
    head, split = tl.program_id(1).to(tl.int64), tl.program_id(0)
    c = tl.arange(0, CENTROIDS)
    mine = centroids + (head * splits + split) * C + c
    if before is None:  # the codes of evenly spaced tokens
        start = c.to(tl.int64) * N // C
        if starts is not None:
            start = tl.load(starts + head // H * C + c, mask=c < C, other=0)
        words = tl.load(codes + head * N + start, mask=c < C, other=0)
    else:
        total = tl.zeros((CENTROIDS, 64), tl.float32)
        for other in range(splits):
            total += load_votes(before, head * splits + other, c, C)
        words = voted(total, tl.load(mine, mask=c < C, other=0))
    tl.store(mine, words, mask=c < C)
    number = C if wanted is None else tl.load(wanted + head // H)
    votes = tl.zeros((CENTROIDS, 64), tl.float32)
    for first in range(split * length, min(N, (split + 1) * length), TOKENS):
        token = first + tl.arange(0, TOKENS)
        present = token < N
        code = signs(tl.load(codes + head * N + token, mask=present, other=0))
        best = tl.max(scores_of(code, words, c, C, number, SCALE), 1)
        label = (-tl.maximum(best, -128.0 * SCALE).to(tl.int32)) & (SCALE - 1)
        label = settled(label.to(tl.int64), head // H, token, N, C, present, valid, rank, count, wanted)
        tl.store(labels + head * N + token, label, mask=present)
        if after is not None:
            member = (label[None, :] == c[:, None]) & present[None, :]
            votes += dot(member.to(tl.float16), code)
    if after is not None:
        pointers = after + ((head * splits + split) * C + c)[:, None] * 64 + tl.arange(0, 64)[None, :]
        tl.store(pointers, votes.to(after.dtype.element_ty), mask=(c < C)[:, None])


@triton.jit
def nearest_codes(
    codes,
    centroids,
    labels,
    valid,
    rank,
    count,
    wanted,
    H,
    N,
    C,
    SCALE: tl.constexpr,
    TOKENS: tl.constexpr,
    CENTROIDS: tl.constexpr,
):
    """labels[token] = argmax_c signs·centroid_c, the lowest c of equal ones. One program takes a tile of tokens."""
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    present = token < N
    number = C if wanted is None else tl.load(wanted + head // H)
    code = signs(tl.load(codes + head * N + token, mask=present, other=0))
    best = tl.full((TOKENS, CENTROIDS), -128.0 * SCALE, tl.float32)  # below all scores, and of label 0
    for first in range(0, C, CENTROIDS):
        c = first + tl.arange(0, CENTROIDS)
        words = tl.load(centroids + head * C + c, mask=c < C, other=0)
        best = tl.maximum(best, scores_of(code, words, c, C, number, SCALE))
    label = (-tl.max(best, 1).to(tl.int32)) & (SCALE - 1)
    label = settled(label.to(tl.int64), head // H, token, N, C, present, valid, rank, count, wanted)
    tl.store(labels + head * N + token, label, mask=present)


@triton.jit
def votes_of_members(codes, labels, votes, N, C, length, splits, TOKENS: tl.constexpr, CENTROIDS: tl.constexpr):
    """votes[c] = Σ signs over the members of c. One program takes a tile of centroids, and `length` of the tokens."""
    head, split = tl.program_id(1).to(tl.int64), tl.program_id(2)
    c = tl.program_id(0) * CENTROIDS + tl.arange(0, CENTROIDS)
    total = tl.zeros((CENTROIDS, 64), tl.float32)
    for first in range(split * length, min(N, (split + 1) * length), TOKENS):
        token = first + tl.arange(0, TOKENS)
        label = tl.load(labels + head * N + token, mask=token < N, other=-1)
        member = (label[None, :] == c[:, None]).to(tl.float16)
        total += dot(member, signs(tl.load(codes + head * N + token, mask=token < N, other=0)))
    pointers = votes + ((head * splits + split) * C + c)[:, None] * 64 + tl.arange(0, 64)[None, :]
    tl.store(pointers, total, mask=(c < C)[:, None])


@triton.jit
def majority(votes, centroids, C, splits, CENTROIDS: tl.constexpr):
    """The bits of the votes' signs; a bit that is tied keeps its value. One program takes a tile of centroids."""
    head = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * CENTROIDS + tl.arange(0, CENTROIDS)
    total = tl.zeros((CENTROIDS, 64), tl.float32)
    for split in range(splits):
        total += load_votes(votes, head * splits + split, c, C)
    old = tl.load(centroids + head * C + c, mask=c < C, other=0)
    tl.store(centroids + head * C + c, voted(total, old), mask=c < C)
