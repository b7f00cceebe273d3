"""Attention of each query to vectors that its cluster alone has."""

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from subquad.masks import Mask
from subquad.ops.choose.blocks.op import by_bucket
from subquad.ops.parts.pairs.op import attend_pairs
from subquad.ops.slots import Buckets


def attend_in_clusters(
    query: Float[Tensor, "B H N D"],
    labels: Int64[Tensor, "B H N"],
    key: Float[Tensor, "B H C K D"],
    value: Float[Tensor, "B H C K E"],
    bias: Float[Tensor, "B H C K"],
    there: Bool[Tensor, "B H C K"],
    scale: float,
) -> tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]]:
    """The partial of each query over the K keys of its cluster that are there, with logits scale·q·k + bias."""
    B, H, C, K, _ = key.shape
    queries, cluster = by_bucket(labels, C)
    numbers = torch.arange(C * K, device=key.device).view(C, K)
    return attend_pairs(
        query,
        key.flatten(2, 3),
        value.flatten(2, 3),
        Buckets(queries, torch.where(there, numbers, C * K), cluster),
        Mask(),
        scale=scale,
        key_bias=bias.masked_fill(~there, 0.0).flatten(2),
    )
