"""Means, spreads and covariances of tokens that are split over ranks."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from subquad.distributed.rows import Rows, combine_together
from subquad.distributed.token_split import TokenSplit
from subquad.kernels.selection.shards.op import moments_of

BLOCK = 2048  # tokens at a time, which stay in the cache


class Tokens(NamedTuple):
    """Vectors of this rank, which of them are real, and whether their covariance is wanted."""

    x: Float[Tensor, "B H N D"]
    valid: Bool[Tensor, "B N"] | None
    covariance: bool = False


@dataclass(frozen=True)
class Whole:
    """Moments of the tokens of all ranks, in fp64.

    Attributes:
        count: the number of real tokens of each item.
        before: the number of those on lower ranks.
        mean: the mean of each head.
        squares: the mean of the squared components less their mean, over all components; 0 where there are no tokens.
        covariance: the covariance; None if it is not needed.
    """

    count: Int64[Tensor, "B"]
    before: Int64[Tensor, "B"]
    mean: Float[Tensor, "B H D"]
    squares: Float[Tensor, "B H"]
    covariance: Float[Tensor, "B H D D"] | None


def moments_of_ranks(split: TokenSplit, *tokens: Tokens) -> list[Whole]:
    """The moments of each over all ranks, by one exchange, or two of many bytes."""
    combined = combine_together([moments_as_rows(x) for x in tokens], split.group)
    return [whole_of(rows, x, split) for rows, x in zip(combined, tokens, strict=True)]


@torch.no_grad()
def moments_as_rows(tokens: Tokens) -> Rows:
    """This rank's moments of each item and head, in fp64: count | squares | mean | covariance."""
    x, valid, covariance = tokens
    B, H, N, D = x.shape
    count = torch.full((B,), N, device=x.device) if valid is None else valid.sum(1)
    mean, squares = moments_of(x, valid)
    parts = [count.double()[:, None, None].expand(B, H, 1), squares.unsqueeze(-1), mean]
    parts += [_scatter(x, valid, mean, squares).flatten(2)] if covariance else []
    return Rows(torch.cat(parts, dim=-1), partial(_combined, D))


def whole_of(rows: Float[Tensor, "B H F"], tokens: Tokens, split: TokenSplit) -> Whole:
    """The moments of the tokens of all ranks, from the combined result of `moments_as_rows`."""
    D = tokens.x.shape[3]
    count, squares, mean, covariance = rows.split([split.ranks, 1, D, D * D * tokens.covariance], dim=-1)
    counts = count[:, 0].long()
    squared = covariance.unflatten(2, (D, D)) if tokens.covariance else None
    return Whole(counts.sum(1), counts[:, : split.rank].sum(1), mean, squares.squeeze(-1), squared)


def _scatter(x: Tensor, valid: Tensor | None, mean: Tensor, squares: Tensor) -> Float[Tensor, "B H D D"]:
    """Σ (x − mean)(x − mean)ᵀ, of vectors that are first divided by a number so that nothing overflows."""
    largest = torch.where(squares > 0, squares, 1.0).sqrt()[..., None, None]
    total = mean.new_zeros(*mean.shape, mean.shape[-1])
    fine = torch.promote_types(x.dtype, torch.float32)
    shift, factor = mean.unsqueeze(2).to(fine), (1 / largest).to(fine)
    for start in range(0, x.shape[2], BLOCK):
        block = (x[:, :, start : start + BLOCK] - shift) * factor
        block = block if valid is None else block.masked_fill(~valid[:, None, start : start + BLOCK, None], 0.0)
        total += (block.mT @ block).double()
    return total * largest.square()


def _combined(D: int, parts: Float[Tensor, "_R n F"]) -> list[Float[Tensor, "n G"]]:
    """The moments of the union of what the ranks have, with each rank's count in place of one."""
    count, squares, mean, scatter = parts.split([1, 1, D, parts.shape[2] - D - 2], dim=-1)
    total = count.sum(0).clamp(min=1)
    whole = (count / total * mean).sum(0)
    apart = mean - whole
    variance = (squares + count * apart.square().sum(-1, keepdim=True)).sum(0) / (total * D)
    moments = [count.squeeze(-1).T, variance, whole]
    if scatter.shape[2] > 0:
        between = count * (apart.unsqueeze(-1) * apart.unsqueeze(-2)).flatten(2)
        moments.append((scatter + between).sum(0) / total)
    return [torch.cat(moments, dim=-1)] * len(parts)
