"""The keys that a cluster meets exactly: those that their cell would misplace the most weight of."""

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from subquad.core.versions import sym_min
from subquad.kernels.attention.softmax import hide
from subquad.kernels.precision import upcast
from subquad.kernels.selection.group_means import broadcast, group_mean
from subquad.kernels.tokens.heads import repeat_heads

NEAREST, FARTHEST = 1e-37, 3e38  # of squared distances to the mean of a cell: their logarithms are finite in fp32
MOST = 8.0  # that the spread of the clusters' queries adds to the score of a key


@torch.no_grad()
def top_keys(
    means: Float[Tensor, "B H C D"],
    key: Float[Tensor, "B G M D"],
    cell: Int64[Tensor, "B G M"],
    topk: int,
    wanted: Int64[Tensor, "B"] | None,
    cells: int,
    scale: float,
    terms: Float[Tensor, "B H M"],
) -> Int64[Tensor, "B H C K"]:
    """The keys with the largest scale·q̄·k_j + t_j, with t the `terms`, ascending; M where a slot is empty."""
    H, M = means.shape[1], key.shape[2]
    valid = repeat_heads((cell < cells)[:, :, None], H)
    logits = hide(means @ repeat_heads(key, H).mT * scale + terms[:, :, None], valid)
    top = logits.topk(sym_min(topk, M), dim=-1).indices
    present = valid.expand_as(logits).gather(3, top)
    if wanted is not None:  # the largest come first
        present = present & (torch.arange(top.shape[3], device=top.device) < wanted[:, None, None, None])
    return torch.where(present, top, M).sort(dim=-1).values


def terms_of_keys(
    key: Float[Tensor, "B G M D"],
    cell: Int64[Tensor, "B G M"],
    around: Float[Tensor, "B H D D"],
    cells: int,
    scale: float,
) -> Float[Tensor, "B H M"]:
    """`terms_of_choice` of these keys, which are not differentiated."""
    key, around = key.detach(), around.detach()
    return terms_of_choice(key, cell, group_mean(key, cell, cells), mean_of_keys(key, cell, cells), around, scale)


def terms_of_choice(
    key: Float[Tensor, "B G M D"],
    cell: Int64[Tensor, "B G M"],
    cell_means: Float[Tensor, "B G X D"],
    mean: Float[Tensor, "B G 1 D"],
    around: Float[Tensor, "B H D D"],
    scale: float,
) -> Float[Tensor, "B H M"]:
    """The score of key j minus its logit: t_j = ln ‖k_j − m_j‖ + min(scale²·(k_j − k̄)ᵀ W (k_j − k̄) / 2, 8).

    The first term is the distance to the mean key m_j of its cell, which the cell misplaces it by. With the second one,
    e^{scale·q̄·k_j + …} is the mean of the weights e^{scale·q·k_j} over the queries of a cluster, if these are normally
    distributed around q̄ with the covariance W = `around`: the mean query alone does not see a key that few of them
    attend to. k̄ is the mean of all keys, which no softmax sees; the bound is for clusters that are far from normal.
    """
    distances = spread_of(key - broadcast(cell_means, cell))
    return repeat_heads(distances[:, :, None], around.shape[1])[:, :, 0] + weights_around(key - mean, around, scale)


def weights_around(
    key: Float[Tensor, "B G M D"], around: Float[Tensor, "B H D D"], scale: float
) -> Float[Tensor, "B H M"]:
    """The second of these terms for keys less their mean; 0 where it is not finite."""
    keys = repeat_heads(key, around.shape[1])
    squares = scale**2 / 2 * ((keys @ around) * keys).sum(-1)
    return torch.where(squares.isfinite(), squares.clamp(max=MOST), 0.0)


def mean_of_keys(key: Float[Tensor, "B G M D"], cell: Int64[Tensor, "B G M"], cells: int) -> Float[Tensor, "B G 1 D"]:
    """k̄, the mean of the keys that are in a cell."""
    inside = (cell < cells)[..., None]
    return key.masked_fill(~inside, 0.0).sum(2, keepdim=True) / inside.sum(2, keepdim=True).clamp(min=1)


def covariance_in_clusters(
    query: Float[Tensor, "B H N D"], labels: Int64[Tensor, "B H N"], means: Float[Tensor, "B H C D"]
) -> Float[Tensor, "B H D D"]:
    """W = Σ_i (q_i − q̄)(q_i − q̄)ᵀ / n over the queries of all clusters, each with the mean q̄ of its own."""
    inside = (labels < means.shape[2])[..., None]
    apart = (query - broadcast(means, labels)).masked_fill(~inside, 0.0)
    return apart.mT @ apart / inside.sum(2, keepdim=True).clamp(min=1)


def covariance_of_moments(
    query: Float[Tensor, "B H N D"],
    valid: Bool[Tensor, "B N"] | None,
    sums: Float[Tensor, "B H C D"],
    means: Float[Tensor, "B H C D"],
) -> Float[Tensor, "B H D D"]:
    """`covariance_in_clusters` from what clusters add up to: Σ_i q_i q_iᵀ − Σ_c n_c q̄_c q̄_cᵀ, over all n.

    Padded queries are 0, and are not counted.
    """
    (query,) = upcast(query)
    query = query if valid is None else query.masked_fill(~valid[:, None, :, None], 0.0)
    count = query.shape[2] if valid is None else valid.sum(1).clamp(min=1)[:, None, None, None]
    return (query.mT @ query - sums.mT @ means) / count


def spread_of(apart: Float[Tensor, "*any D"]) -> Float[Tensor, "*any"]:
    """The logarithms of the lengths of these vectors, finite; 0 where they are not."""
    return (apart.square().sum(-1).clamp(NEAREST, FARTHEST).log() / 2).nan_to_num(0.0)
