"""Tokens by group on GPUs: their order by label, and the sums and means of groups, without atomics.

Each program looks at one run of a head's tokens and one tile of groups, by products with one-hot labels:

    members_of_run        counts[run, c] = Σ_i [label_i = c],   sums[run, c] = Σ_i [label_i = c]·x_i
    order_members         a counting sort: a token of group c comes after all tokens of lower groups, after those of
                          c in earlier runs, and behind those of c before it in its run
    means_of_groups       Σ over the runs, first to last, divided by the number of members

Tokens with labels outside of [0, C) are in a group of their own, number C, which has no sum.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int, Int32
from torch import Tensor

from subquad.kernels.triton.launch import (
    dot,
    kernel,
    launch,
    load_rows,
    padded,
    rows,
    runs_of,
    store_rows,
    strides,
    tile,
)
from subquad.kernels.triton.recording import LaunchCost
from subquad.kernels.triton.tiles import tiles_of

TOKENS, GROUPS = 32, 64  # of a tile that has no vectors
MOST_COUNTED = 1024  # groups of a counting sort, which compares each token with each group
ROWS = 16  # groups whose sums one program adds up


@dataclass(frozen=True)
class Members:
    """The members of each group in each run of tokens: what orders, sums and means are made from.

    Attributes:
        labels: (B,H,N), any kind of integer.
        groups: C.
        length: tokens of a run.
        counts: (B,H,R,C+1) int32.
        sums: (B,H,R,C,D) fp32, or None.
    """

    labels: Tensor
    groups: int
    length: int
    counts: Tensor
    sums: Tensor | None

    @staticmethod
    def from_labels(labels: Int[Tensor, "B H N"], groups: int, x: Float[Tensor, "B H N D"] | None = None) -> "Members":
        """Count the members of `groups` groups, and add up the vectors of each if there are any."""
        labels, (B, H, N), C = labels.contiguous(), labels.shape, groups
        x = None if x is None else rows(x)
        D, kind = (0, torch.float16) if x is None else (x.shape[3], x.dtype)
        tiles = tiles_of("members_of_run", kind, D)
        tokens, edge = tile(N, tiles.keys), tile(C + 1, tiles.rows)
        of_groups = triton.cdiv(C + 1, edge)
        # Not more runs than tokens of a group: `order_members` reads all counts of lower groups.
        length, runs = runs_of(N, tokens, B * H * of_groups, most=max(1, N // max(1, C)))
        counts = torch.empty(B, H, runs, C + 1, dtype=torch.int32, device=labels.device)
        sums = None if x is None else x.new_empty(B, H, runs, C, D, dtype=torch.float32)
        launch(
            members_of_run,
            (of_groups, runs, B * H),
            cost=LaunchCost(B * H * N * C * D, B * H * N * (8 + (0 if x is None else D * x.element_size()))),
            **{"labels": labels, "x": x, **({"x_b": 0, "x_h": 0, "x_n": 0} if x is None else strides("x", x))},
            **{"counts": counts, "sums": sums, "H": H, "N": N, "C": C, "D": D, "length": length, "runs": runs},
            **{"WIDTH": padded(D), "TOKENS": tokens, "GROUPS": edge},
            **tiles.options(),
        )
        return Members(labels, C, length, counts, sums)

    def arguments(self) -> dict[str, object]:
        """The arguments of `load_sums`, by name."""
        return {"sums": self.sums, "counts": self.counts, "C": self.groups, "runs": self.counts.shape[2]}

    def fill_order(self, order: Tensor, offsets: Tensor, rank: Tensor | None = None) -> None:
        """Fill the tokens sorted by label, where each group begins, and the place of each token, all int32.

        Args:
            order: (B,H,N).
            offsets: (B,H,C+1); the tokens in no group are from the last offset on.
            rank: (B,H,N), or None.
        """
        (B, H, N), C, runs = self.labels.shape, self.groups, self.counts.shape[2]
        tokens, edge = tile(N, TOKENS), tile(C + 1, GROUPS)
        launch(
            order_members,
            (triton.cdiv(C + 1, edge), runs, B * H),
            cost=LaunchCost(bytes=B * H * (N * 12 + 4 * C * runs)),
            **{"labels": self.labels, "counts": self.counts, "order": order, "offsets": offsets, "rank": rank},
            **{"N": N, "C": C, "length": self.length, "runs": runs, "TOKENS": tokens, "GROUPS": edge},
        )

    def fill_means(self, means: Float[Tensor, "B H C D"], like: Tensor | None = None, divided: bool = True) -> None:
        """Fill the means of the groups in fp32, rounded to the kind of `like`; or their sums. 0 for an empty group."""
        B, H, C, D = means.shape
        assert self.sums is not None
        launch(
            means_of_groups,
            (triton.cdiv(C, ROWS), B * H),
            num_warps=2,
            cost=LaunchCost(bytes=4 * (self.sums.numel() + means.numel())),
            **self.arguments(),
            **{"means": means, "like": like, "D": D, "WIDTH": padded(D), "GROUPS": ROWS, "DIVIDED": divided},
        )


def group_order(labels: Int[Tensor, "B H N"], groups: int) -> tuple[Int32[Tensor, "B H N"], Int32[Tensor, "B H C1"]]:
    """The tokens sorted by label, equal ones in their order, and where each of the groups begins there.

    The members of group c are `order[offsets[c] : offsets[c + 1]]`. Tokens with labels outside of [0, groups), such as
    padding, are in none.
    """
    B, H, N = labels.shape
    if groups > MOST_COUNTED:
        return _order_by_sorting(labels, groups)
    order, offsets = (torch.empty(B, H, size, dtype=torch.int32, device=labels.device) for size in (N, groups + 1))
    Members.from_labels(labels, groups).fill_order(order, offsets)
    return order, offsets


def _order_by_sorting(labels: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """`group_order` by torch's radix sort, which takes as long whatever the number of groups is."""
    known = torch.where((labels >= 0) & (labels < groups), labels, groups).to(torch.int32)
    ranked, order = known.sort(dim=-1, stable=True)
    every = torch.arange(groups + 1, dtype=torch.int32, device=labels.device).expand(*labels.shape[:2], -1)
    return order.to(torch.int32), torch.searchsorted(ranked, every.contiguous(), out_int32=True)


def group_sums(
    x: Float[Tensor, "B H N D"], order: Int32[Tensor, "B H N"], offsets: Int32[Tensor, "B H C1"]
) -> Float[Tensor, "B H C D"]:
    """The sum of each group's vectors in fp32; 0 for an empty group."""
    (B, H, N, D), C = x.shape, offsets.shape[2] - 1
    sums, labels = x.new_empty(B, H, C, D, dtype=torch.float32), torch.empty_like(order)
    launch(
        labels_of_positions,
        (triton.cdiv(N, TOKENS), B * H),
        cost=LaunchCost(bytes=B * H * (8 * N + 4 * C)),
        **{"order": order, "offsets": offsets, "labels": labels, "N": N, "C": C, "TOKENS": TOKENS, "GROUPS": GROUPS},
    )
    Members.from_labels(labels, C, x).fill_means(sums, divided=False)
    return sums


@triton.jit
def load_labels(labels, token, present, C):
    """The group of each token; C for those in none."""
    label = tl.load(labels + token, mask=present, other=-1)
    return tl.where((label >= 0) & (label < C), label, C).to(tl.int32)


@triton.jit
def sums_by_group(member, vectors):
    """member·vectors, (groups, width): what is not finite makes the sum of its own group NaN, and no other one."""
    wrong = (vectors != vectors) | (tl.abs(vectors) == float("inf"))
    member = member.to(vectors.dtype)
    total = dot(member, tl.where(wrong, 0.0, vectors).to(vectors.dtype))
    if tl.max(tl.max(wrong.to(tl.int32), 1), 0) > 0:
        total = tl.where(dot(member, wrong.to(vectors.dtype)) > 0, float("nan"), total)
    return total


@kernel
def members_of_run(
    labels,
    x,
    x_b,
    x_h,
    x_n,
    counts,
    sums,
    H,
    N,
    C,
    D,
    length,
    runs,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """The number of members of each group in a run of a head's tokens, and their sum if there are vectors."""
    head, run = tl.program_id(2).to(tl.int64), tl.program_id(1)
    c = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    count = tl.zeros((GROUPS,), tl.int32)
    total = tl.zeros((GROUPS, WIDTH), tl.float32)
    for first in range(run * length, min(N, (run + 1) * length), TOKENS):
        token = first + tl.arange(0, TOKENS)
        label = load_labels(labels + head * N, token, token < N, C)
        member = (label[None, :] == c[:, None]) & (token < N)[None, :]
        count += tl.sum(member.to(tl.int32), 1)
        if x is not None:
            of_head = x + head // H * x_b + head % H * x_h
            total += sums_by_group(member, load_rows(of_head, x_n, token, (token < N) & (label < C), D, WIDTH))
    of_run = head * runs + run
    tl.store(counts + of_run * (C + 1) + c, count, mask=c <= C)
    if x is not None:
        store_rows(sums + of_run * C * D, D, c, c < C, total, D, WIDTH)


@kernel
def order_members(labels, counts, order, offsets, rank, N, C, length, runs, TOKENS: tl.constexpr, GROUPS: tl.constexpr):
    """The places of the members of a tile of groups, for those in one run of a head's tokens."""
    head, run = tl.program_id(2).to(tl.int64), tl.program_id(1)
    counts += head * runs * (C + 1)
    before = tl.zeros((GROUPS,), tl.int32)
    for first in range(0, tl.program_id(0) * GROUPS, GROUPS):  # all tokens of lower tiles
        for r in range(runs):
            before += tl.load(counts + r * (C + 1) + first + tl.arange(0, GROUPS))
    c = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    total, earlier = tl.zeros((GROUPS,), tl.int32), tl.zeros((GROUPS,), tl.int32)
    for r in range(runs):
        count = tl.load(counts + r * (C + 1) + c, mask=c <= C, other=0)
        total += count
        earlier += tl.where(r < run, count, 0)
    begin = tl.sum(before, 0) + tl.cumsum(total, 0) - total
    if run == 0:
        tl.store(offsets + head * (C + 1) + c, begin, mask=c <= C)
    begin += earlier
    for first in range(run * length, min(N, (run + 1) * length), TOKENS):
        token = first + tl.arange(0, TOKENS)
        label = load_labels(labels + head * N, token, token < N, C)
        member = ((label[:, None] == c[None, :]) & (token < N)[:, None]).to(tl.int32)
        at = tl.sum(tl.where(member != 0, begin[None, :] + tl.cumsum(member, 0) - 1, 0), 1)
        mine = tl.sum(member, 1) != 0
        tl.store(order + head * N + at, token, mask=mine)
        if rank is not None:
            tl.store(rank + head * N + token, at, mask=mine)
        begin += tl.sum(member, 0)


@triton.jit
def load_sums(sums, counts, head, c, C, D, runs, start, WIDTH: tl.constexpr):
    """The components from `start` on of groups' sums over all runs, first to last, and how many members they have."""
    total = tl.zeros((c.shape[0], WIDTH), tl.float32)
    count = tl.zeros((c.shape[0],), tl.int32)
    for run in range(runs):
        total += load_rows(sums + (head * runs + run) * C * D + start, D, c, c < C, D - start, WIDTH)
        count += tl.load(counts + (head * runs + run) * (C + 1) + c, mask=c < C, other=0)
    return total, count


@kernel
def means_of_groups(
    sums, counts, means, like, C, D, runs, WIDTH: tl.constexpr, GROUPS: tl.constexpr, DIVIDED: tl.constexpr
):
    """The means of a tile of groups, rounded as `like` is, or their sums."""
    head = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    total, count = load_sums(sums, counts, head, c, C, D, runs, 0, WIDTH)
    if DIVIDED:
        total *= (1.0 / tl.maximum(count, 1))[:, None]
    if like is not None:
        total = total.to(like.dtype.element_ty)
    store_rows(means + head * C * D, D, c, c < C, total, D, WIDTH)


@kernel
def labels_of_positions(order, offsets, labels, N, C, TOKENS: tl.constexpr, GROUPS: tl.constexpr):
    """The group of each token, by its place in the order: how many groups end at or before it."""
    head = tl.program_id(1).to(tl.int64)
    rank = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    group = tl.zeros((TOKENS,), tl.int32)
    for first in range(0, C, GROUPS):
        c = first + tl.arange(0, GROUPS)
        end = tl.load(offsets + head * (C + 1) + 1 + c, mask=c < C, other=2147483647)
        group += tl.sum((end[None, :] <= rank[:, None]).to(tl.int32), 1)
    token = tl.load(order + head * N + rank, mask=rank < N, other=0)
    tl.store(labels + head * N + token, group, mask=rank < N)
