"""Means, spreads and covariances of tokens that are split over ranks."""

from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from subquad.ops.choose.ranks.op import moments_of
from subquad.parallel import Sequence
from subquad.parallel.together import gather_together

BLOCK = 2048  # tokens at a time, which stay in the cache


class Tokens(NamedTuple):
    """Vectors of this rank, which of them are real, and whether their covariance is wanted."""

    x: Float[Tensor, "B H N D"]
    real: Bool[Tensor, "B N"] | None
    covariance: bool = False


@dataclass(frozen=True)
class Whole:
    """What is known of the tokens of all ranks, in fp64.

    Attributes:
        count: the real ones of each item.
        before: those on lower ranks.
        mean: of each head.
        squares: the mean of the squared components less their mean, over all components; 0 where there are no tokens.
        covariance: or None where nobody wants it.
    """

    count: Int64[Tensor, "B"]
    before: Int64[Tensor, "B"]
    mean: Float[Tensor, "B H D"]
    squares: Float[Tensor, "B H"]
    covariance: Float[Tensor, "B H D D"] | None


def moments_of_ranks(of: Sequence, *given: Tokens) -> list[Whole]:
    """The moments of each over all ranks, by one exchange."""
    sent: list[Tensor] = []
    for x, real, covariance in given:
        B, _, N, _ = x.shape
        count = torch.full((B,), N, device=x.device) if real is None else real.sum(1)
        mean, squares = moments_of(x, real)
        sent += [count.double(), mean, squares]
        sent.append(_scatter(x, real, mean, squares) if covariance else squares.new_zeros(0))
    every = gather_together(sent, of.group)
    return [_combined(of.rank, [parts[4 * i : 4 * i + 4] for parts in every]) for i in range(len(given))]


def _scatter(x: Tensor, real: Tensor | None, mean: Tensor, squares: Tensor) -> Float[Tensor, "B H D D"]:
    """Σ (x − mean)(x − mean)ᵀ, of vectors that are first divided by a number so that nothing overflows."""
    largest = torch.where(squares > 0, squares, 1.0).sqrt()[..., None, None]
    total = mean.new_zeros(*mean.shape, mean.shape[-1])
    fine = torch.promote_types(x.dtype, torch.float32)
    shift, factor = mean.unsqueeze(2).to(fine), (1 / largest).to(fine)
    for start in range(0, x.shape[2], BLOCK):
        block = (x[:, :, start : start + BLOCK] - shift) * factor
        block = block if real is None else block.masked_fill(~real[:, None, start : start + BLOCK, None], 0.0)
        total += (block.mT @ block).double()
    return total * largest.square()


def _combined(rank: int, parts: Several[Several[Tensor]]) -> Whole:
    """The moments of the union of what the ranks have."""
    count, mean, squares, scatter = (torch.stack([part[i] for part in parts]) for i in range(4))
    share = count / count.sum(0).clamp(min=1)
    whole = (share[..., None, None] * mean).sum(0)
    apart = mean - whole
    total = count.sum(0).clamp(min=1)
    variance = (squares + count.unsqueeze(-1) * apart.square().sum(-1)).sum(0) / (total.unsqueeze(-1) * mean.shape[-1])
    covariance = None
    if scatter.numel() > 0:
        between = count[..., None, None, None] * (apart.unsqueeze(-1) * apart.unsqueeze(-2))
        covariance = (scatter + between).sum(0) / total[:, None, None, None]
    return Whole(count.sum(0).long(), count[:rank].sum(0).long(), whole, variance, covariance)
