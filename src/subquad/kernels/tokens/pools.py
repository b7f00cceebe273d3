"""Pools: runs of equal size of the real tokens of each item, in their order, and their means."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from subquad.core.rounding import ceil_div
from subquad.core.versions import sym_max
from subquad.kernels.selection.group_means import group_mean, group_sizes


def pool_of(rank: Int64[Tensor, "..."], tokens: Int64[Tensor, "..."] | int, pools: int) -> Int64[Tensor, "..."]:
    """The pool that holds the token of a rank, of `pools` pools of `tokens` tokens whose sizes differ by at most 1.

    If there are no more tokens than pools, each has its own.

    >>> pool_of(torch.arange(7), 7, 3)
    tensor([0, 0, 0, 1, 1, 2, 2])
    >>> pool_of(torch.arange(2), 2, 3)
    tensor([0, 1])
    """
    # Not a tensor of a whole number, which would fix the length where it is traced.
    least = tokens.clamp(min=pools) if isinstance(tokens, Tensor) else sym_max(tokens, pools)
    return rank * pools // least


def pool_sizes(tokens: Int64[Tensor, "B"], pools: int) -> Int64[Tensor, "B C"]:
    """The number of tokens in each pool of `pool_of`.

    >>> pool_sizes(torch.tensor([7, 2]), 3)
    tensor([[3, 2, 2],
            [1, 1, 0]])
    """
    least = tokens.clamp(min=pools)[:, None]
    begin = -(-torch.arange(pools + 1, device=tokens.device) * least // pools)
    return begin.minimum(tokens[:, None]).diff(dim=1)


def pool_means(
    x: Float[Tensor, "B H M D"], labels: Int64[Tensor, "_ M"], pools: int
) -> tuple[Float[Tensor, "B H C D"], Int64[Tensor, "_ C"]]:
    """The mean of each pool's tokens, 0 for one without any, and how many they are. Label `pools`: in none.

    Labels are one row for all items, or one each, and pools are those of `pool_of`.
    """
    B, H, M, _ = x.shape
    sizes = group_sizes(labels[:, None], pools)[:, 0]
    if len(labels) < B or B == 1:  # rows that are moved whole, which costs a fraction of a sum by numbers
        number = torch.arange(ceil_div(M, pools), device=x.device)
        begin = (sizes.cumsum(1) - sizes)[0, :, None]
        present = number < sizes[0, :, None]
        tokens = labels[0].argsort(stable=True)[(begin + number).clamp(max=M - 1)]
        parts = x.index_select(2, tokens.flatten()).unflatten(2, tokens.shape).masked_fill(~present[..., None], 0.0)
        return parts.sum(3) / sizes[0].clamp(min=1)[:, None], sizes
    return group_mean(x, labels[:, None].expand(B, H, M), pools), sizes
