"""The cells of a tail by themselves, and the weight that they give each key."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from subquad.kernels.attention.pairs.op import attend_pairs
from subquad.kernels.attention.tail.reference import (
    Tail,
    covariance_in_clusters,
    tail_of,
    terms_of_keys,
    top_keys,
)
from subquad.kernels.precision import upcast
from subquad.kernels.selection.blocks.op import by_bucket
from subquad.kernels.selection.groups import broadcast, group_mean
from subquad.kernels.tokens.slots import Buckets, vectors_at
from subquad.masks import Mask

Partial = tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]]


def attend_to_cells(
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
    dropout_p: float = 0.0,
) -> tuple[Partial, Buckets, Float[Tensor, "B H N F"], Float[Tensor, "B G M F"]]:
    """The two parts of `attend_with_tail`, with its arguments: attention to the cells, and who meets which exact keys.

    The last two results are a_i and b_j with e^{a_i·b_j} the weight that the cells give key j of query i, unless the
    key is one of its exact ones:

        a_i·b_j = scale·q̄·k_j + scale·(q_i − q̄)·k̄_x,   x the cell of j, q̄ and k̄ those of the query's cluster
    """
    query, key, value = upcast(query, key, value)
    means = group_mean(query, labels, clusters)
    if keys is None:
        terms = terms_of_keys(key, cell, covariance_in_clusters(query, labels, means), cells, scale)
        keys = top_keys(means, key, cell, topk, wanted, cells, scale, terms)
    tail = tail_of(means, key, value, keys, cell, cells, scale)
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
    of_key = torch.cat([key, F.one_hot(cell, cells + 1)[..., :cells].to(key.dtype)], dim=-1)
    return partial, Buckets(queries, keys, cluster), of_query, of_key


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
