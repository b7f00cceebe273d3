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
    key: Float[Tensor, "B H C P D"],
    value: Float[Tensor, "B H C P E"],
    bias: Float[Tensor, "B H C P"],
    place: Int64[Tensor, "B H C K"],
    there: Bool[Tensor, "B H C K"],
    scale: float,
) -> tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]]:
    """The partial of each query over those of its cluster's P keys that `place` names, with logits scale·q·k + bias.

    What is not `there` is an empty slot. The bias is read where a key is named.
    """
    C, P = key.shape[2:4]
    queries, cluster = by_bucket(labels, C)
    numbers = torch.arange(C, device=key.device)[:, None] * P + place
    return attend_pairs(
        query,
        key.flatten(2, 3),
        value.flatten(2, 3),
        Buckets(queries, torch.where(there, numbers, C * P), cluster),
        Mask(),
        scale=scale,
        key_bias=bias.masked_fill(torch.isneginf(bias), 0.0).flatten(2),
    )
