"""Cells of keys, as the mean query of a cluster sees them, and attention to them by themselves."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from subquad.kernels.attention.pairs.op import attend_pairs
from subquad.kernels.selection.blocks.op import by_bucket
from subquad.kernels.selection.group_means import broadcast
from subquad.kernels.tensors import one_hot
from subquad.kernels.tokens.heads import repeat_heads
from subquad.kernels.tokens.slots import Buckets, members, vectors_at
from subquad.masks import Mask

KEYS = 64  # of a block of one cell
Partial = tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]]


@dataclass(frozen=True)
class Tail:
    """For every cell, and every cluster that it is seen from: k̄, v̄, and what is added to the logit scale·q·k̄.

    `bias` is −inf for a cell without keys outside of the cluster's exact ones.
    """

    key: Float[Tensor, "B H X C D"]
    value: Float[Tensor, "B H X C E"]
    bias: Float[Tensor, "B H X C"]


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
    """Attention of each mean query to each cell, less its cluster's exact keys: a partial, whose values are [k, v].

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


@dataclass(frozen=True)
class CellAttention:
    """Attention to the cells alone, and the weight that they give each key.

    e^{a_i·b_j} is the weight of key j for query i, unless the key is one of its exact ones:

        a_i·b_j = scale·q̄·k_j + scale·(q_i − q̄)·k̄_x,   x the cell of j, q̄ and k̄ those of the query's cluster
    """

    partial: Partial
    of_query: Float[Tensor, "B H N F"]  # a
    of_key: Float[Tensor, "B G M F"]  # b


def attend_to_cells(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B G M D"],
    means: Float[Tensor, "B H C D"],
    tail: Tail,
    labels: Int64[Tensor, "B H N"],
    cell: Int64[Tensor, "B G M"],
    *,
    scale: float,
    dropout_p: float = 0.0,
) -> CellAttention:
    """Each query's attention to the cells as its cluster sees them."""
    cells, clusters = tail.bias.shape[2:]
    queries, cluster = by_bucket(labels, clusters)
    end = cells * clusters
    numbers = torch.arange(end, device=query.device).view(cells, clusters)
    present = ~torch.isneginf(tail.bias)
    partial = attend_pairs(
        query,
        tail.key.flatten(2, 3),
        tail.value.flatten(2, 3),
        Buckets(queries, torch.where(present, numbers, end).transpose(2, 3), cluster),
        Mask(),
        scale=scale,
        key_bias=torch.where(present, tail.bias, 0.0).flatten(2),
        dropout_p=dropout_p,
    )
    mean = broadcast(means, labels)
    of_query = torch.cat([mean, _of_cells(query - mean, tail, queries, cluster)], dim=-1) * scale
    of_key = torch.cat([key, one_hot(cell, cells).to(key.dtype)], dim=-1)
    return CellAttention(partial, of_query, of_key)


def _of_cells(
    apart: Float[Tensor, "B H N D"], tail: Tail, queries: Int64[Tensor, "B H T S"], cluster: Int64[Tensor, "B H T"]
) -> Float[Tensor, "B H N X"]:
    """(q_i − q̄)·k̄_x for each cell, block by block of queries of one cluster."""
    (B, H, N, _), X = apart.shape, tail.key.shape[2]
    centroids = tail.key.transpose(2, 3).flatten(3)  # (B,H,C,X·D)
    of_block = centroids.gather(2, cluster[..., None].expand(-1, -1, -1, centroids.shape[3])).unflatten(3, (X, -1))
    products = (vectors_at(apart, queries) @ of_block.mT).flatten(2, 3)
    slot = queries.flatten(2)[..., None].expand_as(products)
    return apart.new_zeros(B, H, N + 1, X).scatter(2, slot, products)[:, :, :N]
