"""Rows of all ranks combined into one: sums, merged partials, and what is chosen among them.

Each rank has a tensor of rows, and a function combines the rows of all ranks at one index. Either each rank
sends all its rows to each other, or it combines a share of the rows for all:

                  exchanges   what a rank sends, of S bytes
    at once       1           S · (ranks − 1)
    by shares     2           2 · S · (ranks − 1)/ranks

The second is at most twice S whatever the number of ranks. It is taken on three ranks and more, from `MANY` bytes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from subquad.distributed import collectives
from subquad.distributed.shares import even_shares
from subquad.distributed.together import exchange_together


class Rows(NamedTuple):
    """The rows of this rank, (…, width), and how those of all ranks are combined.

    Attributes:
        local: the rows, of the same shape and dtype on all ranks.
        combine: makes of (ranks, rows, width) the result of each rank, (rows, other width), in their order.
    """

    local: Tensor
    combine: Callable[[Tensor], Sequence[Tensor]]


def combine_together(several: Sequence[Rows], group: Any) -> list[Tensor]:
    """This rank's result of each, (…, other width). Differentiable where rows and what is combined of them are floats.

    If all ranks get the same result, they get the same bits.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    rows = [x.local.flatten(0, -2) for x in several]
    if ranks == 2 or sum(x.numel() * x.element_size() for x in rows) < collectives.MANY:
        every = exchange_together([rows] * ranks, [[x.shape for x in rows]] * ranks, group)
        results = [
            x.combine(torch.stack(parts))[rank] for x, parts in zip(several, zip(*every, strict=True), strict=True)
        ]
    else:
        results = _by_shares(rows, [x.combine for x in several], group)
    return [x.view(*like.local.shape[:-1], x.shape[1]) for x, like in zip(results, several, strict=True)]


def summed(x: Tensor) -> Rows:
    """The sum over all ranks, in their order."""
    return Rows(x, lambda parts: [_sum(parts)] * len(parts))


def of_earlier(
    x: Tensor,
    step: Callable[[Tensor, Tensor], Tensor] = torch.add,
    first: Callable[[Tensor], Tensor] = torch.zeros_like,
) -> Rows:
    """Combine the rows of the ranks before each rank by `step`, in their order: by default their sum.

    It begins with what `first` makes of rows of their shape, which is what the first rank gets. That depends on the
    exchange all the same, so that its backward pass runs on all ranks.
    """

    def combine(parts: Tensor) -> list[Tensor]:
        taken = [collectives.takes_part(first(parts[0]), [parts])]
        for part in parts[:-1]:
            taken.append(step(taken[-1], part))
        return taken

    return Rows(x, combine)


def _sum(parts: Tensor) -> Tensor:
    total, *others = parts.unbind()
    for other in others:
        total = total + other
    return total


def _by_shares(rows: list[Tensor], combine: list[Callable[[Tensor], Sequence[Tensor]]], group: Any) -> list[Tensor]:
    """Each rank combines a share of the rows for all."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    shares = [even_shares(len(x), ranks) for x in rows]
    parts = [x.split(share) for x, share in zip(rows, shares, strict=True)]
    local = [(share[rank], x.shape[1]) for x, share in zip(rows, shares, strict=True)]
    every = exchange_together(list(zip(*parts, strict=True)), [local] * ranks, group)
    results = [of_all(torch.stack(each)) for of_all, each in zip(combine, zip(*every, strict=True), strict=True)]
    widths = [of_ranks[0].shape[1] for of_ranks in results]
    shapes = [[(share[other], width) for share, width in zip(shares, widths, strict=True)] for other in range(ranks)]
    received = exchange_together(list(zip(*results, strict=True)), shapes, group)
    return [torch.cat(each) for each in zip(*received, strict=True)]
