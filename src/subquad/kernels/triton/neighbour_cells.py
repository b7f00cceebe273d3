"""Neighbouring keys as cells: their lists, and one cluster's view of all of them together.

Attention to many keys is computed cell by cell, so that there are more programs than clusters and heads alone would
give. With λ_x and v̄_x of the cells and λ_T of the listed keys, which the cells leave out:

    λ = ln (e^{λ_T} + Σ_x e^{λ_x}),   rest = Σ_x e^{λ_x − λ} v̄_x,   mass = e^{λ_T − λ}
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.triton.groups import Members
from subquad.kernels.triton.launch import key_head, launch, padded
from subquad.kernels.triton.recording import LaunchCost

TOKENS = 1024  # that one program lists


@dataclass(frozen=True)
class Neighbours:
    """Keys by cell, as `Members.fill_order` lists them.

    Attributes:
        order: (B,G,M) int32.
        offsets: (B,G,X+1) int32.
        rank: (B,G,M) int32.
    """

    order: Tensor
    offsets: Tensor
    rank: Tensor


def neighbours(key: Tensor, valid: Tensor | None, size: int) -> Neighbours:
    """The real keys of each `size` positions as one cell; at least one cell."""
    B, G, M = key.shape[:3]
    cells = max(1, triton.cdiv(M, size))
    order, rank = key.new_empty(2, B, G, M, dtype=torch.int32)
    offsets = key.new_empty(B, G, cells + 1, dtype=torch.int32)
    if valid is None:
        launch(
            list_neighbours,
            (triton.cdiv(max(M, cells + 1), TOKENS), B * G),
            cost=LaunchCost(bytes=8 * order.numel()),
            **{"order": order, "rank": rank, "offsets": offsets, "M": M, "cells": cells, "size": size},
            TOKENS=TOKENS,
        )
    else:
        cell = (torch.arange(M, device=key.device) // size).expand(B, G, M)
        Members.from_labels(cell.masked_fill(~valid[:, None], cells), cells).fill_order(order, offsets, rank)
    return Neighbours(order, offsets, rank)


def merge_cells(
    values: Tensor, of_cells: Tensor, offsets: Tensor, of_top: Tensor | None, outputs: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Fill rest (B,H,C,E), λ and mass, (B,H,C) each, by v̄ (B,H,C,X,E), their λ (B,H,C,X) and that of lists (B,H,C).

    `offsets` are those of the cells, (B,G,X+1).
    """
    B, H, C, X, E = values.shape
    remaining, lse, mass = outputs
    launch(
        merge_cell_values,
        (C, B * H),
        num_warps=1,
        cost=LaunchCost(bytes=4 * (values.numel() + remaining.numel())),
        **{"values": values, "of_cells": of_cells, "offsets": offsets, "of_top": of_top},
        **{"remaining": remaining, "lse": lse, "mass": mass},
        **{"H": H, "G": offsets.shape[1], "C": C, "X": X, "E": E, "VALUES": padded(E)},
    )


@triton.jit
def list_neighbours(order, rank, offsets, M, cells, size, TOKENS: tl.constexpr):
    """All keys in their own order."""
    head = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    tl.store(order + head * M + at, at, mask=at < M)
    tl.store(rank + head * M + at, at, mask=at < M)
    tl.store(offsets + head * (cells + 1) + at, tl.minimum(at * size, M), mask=at <= cells)


@triton.jit
def merge_cell_values(values, of_cells, offsets, of_top, remaining, lse, mass, H, G, C, X, E, VALUES: tl.constexpr):
    """One cluster's rest, λ and mass. A cluster that sees no key has weights of 0 and a λ of −∞.

    One that sees keys, but with logits of −∞ alone, has a rest of NaN, as softmax has.
    """
    head = tl.program_id(1).to(tl.int64)
    of_cluster = head * C + tl.program_id(0)
    column = tl.arange(0, VALUES)
    listed = float("-inf") if of_top is None else tl.load(of_top + of_cluster)
    largest = listed
    for x in range(X):
        largest = tl.maximum(largest, tl.load(of_cells + of_cluster * X + x))
    safe = tl.where(largest == float("-inf"), 0.0, largest)
    of_list = tl.exp(listed - safe)
    total, result = of_list, tl.zeros((VALUES,), tl.float32)
    for x in range(X):
        total += tl.exp(tl.load(of_cells + of_cluster * X + x) - safe)
    divisor = tl.where(total == 0, 1.0, total)
    for x in range(X):
        share = tl.exp(tl.load(of_cells + of_cluster * X + x) - safe) / divisor
        result += share * tl.load(values + (of_cluster * X + x) * E + column, mask=column < E, other=0.0)
    lost = (total == 0) & (tl.load(offsets + key_head(head, H, G) * (X + 1) + X) > 0)
    tl.store(remaining + of_cluster * E + column, tl.where(lost, float("nan"), result), mask=column < E)
    tl.store(mass + of_cluster, of_list / divisor)
    tl.store(lse + of_cluster, tl.where(total == 0, float("-inf"), tl.log(divisor) + safe))
