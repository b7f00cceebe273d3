"""Attention to exact keys and a tail of cells, in plain PyTorch."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from subquad.kernels.attention.pairs.op import attend_pairs
from subquad.kernels.attention.softmax import hide
from subquad.kernels.precision import upcast
from subquad.kernels.selection.blocks.op import by_bucket
from subquad.kernels.selection.groups import broadcast, group_mean
from subquad.kernels.tokens.heads import repeat_heads
from subquad.kernels.tokens.slots import Buckets, members
from subquad.masks import Mask

KEYS = 64  # of a block of one cell
NEAREST, FARTHEST = 1e-37, 3e38  # of squared distances to the mean of a cell: their logarithms are finite in fp32
MOST = 8.0  # that the spread of the clusters' queries adds to the score of a key


@dataclass(frozen=True)
class Tail:
    """For every cell, and every cluster that it is seen from: k̄, v̄, and what is added to the logit scale·q·k̄.

    `bias` is −inf for a cell without keys outside of the cluster's exact ones.
    """

    key: Float[Tensor, "B H X C D"]
    value: Float[Tensor, "B H X C E"]
    bias: Float[Tensor, "B H X C"]


def attend_with_tail(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M E"],
    labels: Int64[Tensor, "B H N"],
    cell: Int64[Tensor, "B G M"],
    keys: Int64[Tensor, "B H C K"] | None,
    *,
    clusters: int,
    topk: int,
    cells: int,
    scale: float,
    wanted: Int64[Tensor, "B"] | None = None,
    means: Float[Tensor, "B H C D"] | None = None,
    around: Float[Tensor, "B H D D"] | None = None,
    dropout_p: float = 0.0,
) -> tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]]:
    """Each query's attention in one softmax over the exact keys of its cluster and a tail of cells: (out, lse).

    With q̄ the mean of a cluster's queries, T its exact keys, and w the softmax of scale·q̄·k_j over those keys of a cell
    that are not in T:

        k̄ = Σ_j w_j k_j,   v̄ = Σ_j w_j v_j,   ln Σ_j e^{scale·q·k_j} ≈ scale·(q − q̄)·k̄ + ln Σ_j e^{scale·q̄·k_j}

    This is the first-order expansion at q = q̄, and exact there: a query that is alone in its cluster has exact
    attention. At q̄ = 0 it would be a plain mean and + ln n.

    Args:
        labels: the cluster of each query; `clusters` for none: out 0, lse −inf.
        cell: the cell of each key; `cells` for none: no query meets such a key, whatever it holds.
        keys: T of each cluster; M where a slot is empty. None: the `topk` keys with the largest scale·q̄·k_j + t_j, the
            terms t_j being those of `terms_of_choice`: those which their cell would misplace the most weight of.
        wanted: how many of those each item takes, at most `topk`; None: all.
        means: q̄ of each cluster, of other queries than these; None: of the cluster's queries. The expansion holds
            around any vector; it is the closer, the nearer its queries are.
        around: W of `terms_of_choice`, which goes with `means`; None: that of these queries.

    The gradient flows through the means q̄, the cells and the exact keys; labels, cells and T are constants.
    """
    query, key, value = upcast(query, key, value)
    means = group_mean(query, labels, clusters) if means is None else means.to(query.dtype)
    if keys is None:
        around = covariance_in_clusters(query, labels, means) if around is None else around.to(query.dtype)
        terms = terms_of_keys(key, cell, around, cells, scale)
        keys = top_keys(means, key, cell, topk, wanted, cells, scale, terms)
    tail = tail_of(means, key, value, keys, cell, cells, scale)
    return attend_to_keys_and_cells(query, key, value, keys, tail, labels, scale=scale, dropout_p=dropout_p)


def attend_to_keys_and_cells(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M E"],
    keys: Int64[Tensor, "B H C K"],
    tail: Tail,
    labels: Int64[Tensor, "B H N"],
    *,
    scale: float,
    dropout_p: float = 0.0,
) -> tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]]:
    """Attention of each query to the exact keys of its cluster and the cells, in one softmax."""
    H, M = query.shape[1], key.shape[2]
    cells, clusters = tail.bias.shape[2:]
    # The cells join the keys: cell x of cluster c is key number M + x·C + c, which this cluster alone meets.
    end = M + cells * clusters
    present = ~torch.isneginf(tail.bias)
    numbers = torch.arange(M, end, device=query.device).view(cells, clusters)
    slots = torch.where(keys < M, keys, end)
    queries, cluster = by_bucket(labels, clusters)
    bias = torch.where(present, tail.bias, 0.0).flatten(2)
    return attend_pairs(
        query,
        torch.cat([repeat_heads(key, H), tail.key.flatten(2, 3)], dim=2),
        torch.cat([repeat_heads(value, H), tail.value.flatten(2, 3)], dim=2),
        Buckets(queries, torch.cat([slots, torch.where(present, numbers, end).transpose(2, 3)], dim=3), cluster),
        Mask(),
        scale=scale,
        key_bias=torch.cat([bias.new_zeros(*bias.shape[:2], M), bias], dim=2),
        dropout_p=dropout_p,
    )


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
    top = logits.topk(torch.sym_min(topk, M), dim=-1).indices
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
    """What the score of key j has beside its logit: t_j = ln ‖k_j − m_j‖ + min(scale²·(k_j − k̄)ᵀ W (k_j − k̄) / 2, 8).

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


def tail_of(
    means: Float[Tensor, "B H C D"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M E"],
    keys: Int64[Tensor, "B H C K"],
    cell: Int64[Tensor, "B G M"],
    cells: int,
    scale: float,
) -> Tail:
    """k̄, v̄ and bias of every cluster and cell. The gradient flows through all of them."""
    return as_tail(means, *visible_cells(means, key, value, keys, cell, cells, scale), scale)


def visible_cells(
    means: Float[Tensor, "B H C D"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M E"],
    keys: Int64[Tensor, "B H C K"],
    cell: Int64[Tensor, "B G M"],
    cells: int,
    scale: float,
) -> tuple[Float[Tensor, "B H X C F"], Float[Tensor, "B H X C"]]:
    """What each mean query sees of each cell, less its cluster's exact keys: a partial, whose values are [k, v].

    Computed as attention of the mean queries, once for each cell, to the keys of the cell.
    """
    C, M = means.shape[2], key.shape[2]
    inside = (members(keys, M) > 0).transpose(-1, -2)
    tokens, cell_of = by_bucket(repeat_heads(cell[..., None], means.shape[1])[..., 0], cells, KEYS)
    queries = cell_of[..., None] * C + torch.arange(C, device=means.device)
    both, lse = attend_pairs(
        means.repeat(1, 1, cells, 1),
        key,
        torch.cat([key, value], dim=-1),
        Buckets(queries, torch.where(tokens < M, tokens, M)),
        Mask(),
        scale=scale,
        hidden=inside,
    )
    return both.unflatten(2, (cells, C)), lse.unflatten(2, (cells, C))


def as_tail(
    means: Float[Tensor, "B H C D"], both: Float[Tensor, "B H X C F"], lse: Float[Tensor, "B H X C"], scale: float
) -> Tail:
    """The tail of which each mean query sees this."""
    centroid, value = both.tensor_split([means.shape[3]], dim=-1)
    return Tail(centroid, value, lse - (centroid * means[:, :, None]).sum(-1) * scale)
