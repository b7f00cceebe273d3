"""The op `attend_listed`: attention of each query to vectors that its cluster alone has."""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from subquad.kernels.attention.pairs.op import attend_pairs
from subquad.kernels.dispatch import Op
from subquad.kernels.operators import Gradient
from subquad.kernels.selection.blocks.op import by_bucket
from subquad.kernels.tensors import token_major
from subquad.kernels.tokens.slots import Buckets
from subquad.masks import Mask


def attend_in_clusters(
    query: Float[Tensor, "B H N D"],
    labels: Int64[Tensor, "B H N"],
    key: Float[Tensor, "B H C K D"],
    value: Float[Tensor, "B H C K E"],
    bias: Float[Tensor, "B H C K"],
    present: Bool[Tensor, "B H C K"],
    scale: float,
) -> tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]]:
    """The partial of each query over those of its cluster's K keys that are `present`, with logits scale·q·k + bias."""
    C, K = key.shape[2:4]
    lists = torch.where(present, torch.arange(C * K, device=key.device).view(C, K), C * K)
    bias = bias.masked_fill(torch.isneginf(bias), 0.0)
    return attend_listed(query, key.flatten(2, 3), value.flatten(2, 3), bias.flatten(2), labels, lists, scale=scale)


@Op
def attend_listed(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B H R D"],
    value: Float[Tensor, "B H R E"],
    bias: Float[Tensor, "B H R"],
    labels: Int64[Tensor, "B H N"],
    lists: Int64[Tensor, "B H C K"],
    *,
    scale: float,
) -> tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]]:
    """The partial of each query over the rows that its cluster lists, with logits scale·q·k + bias: (out, lse).

    A label of C is in no cluster, and a row of R is an empty slot; no row is in two lists. A query without rows
    has out = 0 and lse = −inf. The gradient flows to query, key, value and bias.
    """
    queries, cluster = by_bucket(labels, lists.shape[2])
    return attend_pairs(query, key, value, Buckets(queries, lists, cluster), Mask(), scale=scale, key_bias=bias)


@attend_listed.compiled
def run(backend: str, x: Any) -> tuple[Tensor, Tensor]:
    """Run on a compiled backend."""
    out, lse = listed_forward.run(backend, *x)
    return out, lse


@attend_listed.operator("query", "key", "value", "bias", "labels", "lists", "scale")
def listed_forward(x: Any) -> tuple[Tensor, Tensor]:
    """Allocate (out, lse)."""
    return token_major(x.query, x.value.shape[3]), x.query.new_empty(x.query.shape[:3])


listed_backward = Gradient(listed_forward, "query", "key", "value", "bias", title="attention to lists of clusters")


@listed_forward.flops
def forward_flops(x: Any) -> int:
    """Operations of the products: logits, weighted values."""
    B, H, N, D = x.query
    return 2 * B * H * N * x.lists[3] * (D + x.value[3])


@listed_backward.flops
def backward_flops(x: Any) -> int:
    """The logits again and the gradients of both their sides; the gradients of weights and values."""
    B, H, N, D = x.query
    return 2 * B * H * N * x.lists[3] * (3 * D + 2 * x.value[3])
