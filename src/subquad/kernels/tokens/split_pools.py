"""Pools of which each rank has some tokens: softmax-weighted means by label, and their merge over ranks.

A *half* is the mean and the log-sum-exp of one weighting, (out, lse). Keys and values have one each; they travel as one
tensor, k̄ | lse | v̄ | lse′.
"""

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from subquad.kernels.attention.softmax import hide, merge_partials

Half = tuple[Tensor, Tensor]  # (B,G,P,D) and (B,G,P)


def pooled_by(
    logits: Float[Tensor, "B G N"],
    x: Float[Tensor, "B G N D"],
    label: Int64[Tensor, "B N"],
    shown: Bool[Tensor, "B N"],
    pools: int,
) -> Half:
    """Σ_j softmax_j(logits) x_j over the shown tokens of each label, and the log-sum-exps; 0 and −inf without any."""
    B, G, _, D = x.shape
    label = torch.where(shown, label.clamp(0, pools - 1), pools)[:, None].expand(-1, G, -1)
    largest = logits.new_full((B, G, pools + 1), -torch.inf).scatter_reduce(2, label, logits.detach(), "amax")
    largest = torch.where(torch.isneginf(largest), 0.0, largest)
    weights = (logits - largest.gather(2, label)).exp()
    total = torch.zeros_like(largest).scatter_add(2, label, weights)[:, :, :pools]
    sums = x.new_zeros(B, G, pools + 1, D).scatter_add(
        2, label.unsqueeze(-1).expand(-1, -1, -1, D), weights.unsqueeze(-1) * x
    )
    present = total > 0
    total = torch.where(present, total, 1.0)
    lse = torch.where(present, total.log() + largest[:, :, :pools], -torch.inf)
    return sums[:, :, :pools] / total.unsqueeze(-1), lse


def joined(of_keys: Half, of_values: Half) -> Float[Tensor, "*pools X"]:
    """Both halves as one tensor."""
    return torch.cat([x for mean, lse in (of_keys, of_values) for x in (mean, lse.unsqueeze(-1))], dim=-1)


def halves(pools: Float[Tensor, "*pools X"], D: int) -> tuple[Half, Half]:
    """The halves of `joined`, of which the first has the width D."""
    key, lse, value, other = pools.split([D, 1, pools.shape[-1] - D - 2, 1], dim=-1)
    return (key, lse.squeeze(-1)), (value, other.squeeze(-1))


def merged(parts: list[Float[Tensor, "*pools X"]], D: int) -> Float[Tensor, "*pools X"]:
    """The pools of the tokens of all parts."""
    of_keys, of_values = zip(*(halves(part, D) for part in parts), strict=True)
    return joined(merge_partials(list(of_keys)), merge_partials(list(of_values)))


def empty(like: Tensor, pools: int, D: int, E: int) -> Float[Tensor, "B G P X"]:
    """Pools of no tokens."""
    none = like.new_zeros(*like.shape[:2], pools, D + E + 2)
    none[..., D] = none[..., -1] = -torch.inf
    return none


def running(part: Half, pool: Int64[Tensor, "B P"], longest: int) -> Half:
    """For each cell what its pool has up to it: in steps of 1, 2, 4, … cells, each merging two runs."""
    step = 1
    while step < longest:
        same = (pool[:, step:] == pool[:, :-step])[:, None]
        out, lse = part
        earlier = out[:, :, :-step], hide(lse[:, :, :-step], same)
        later = merge_partials([(out[:, :, step:], lse[:, :, step:]), earlier])
        part = one_after_the_other([(out[:, :, :step], lse[:, :, :step]), later])
        step *= 2
    return part


def one_after_the_other(parts: list[Half]) -> Half:
    """Halves along the axis of their pools."""
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def sizes_of_items(pool: Int64[Tensor, "B 1"], window: int) -> tuple[Tensor, Tensor, Tensor]:
    """`sizes_of` for the pools of each item: computed on their device, because a table would be copied there."""
    one, few = torch.ones_like(pool), pool <= window
    cells = (pool // window).clamp(min=1) if window else one
    return (
        torch.where(few, pool, -(-pool // cells)),
        torch.where(few, -(-window // pool), 1),
        torch.where(few, 1, cells),
    )
