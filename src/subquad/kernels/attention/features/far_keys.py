"""Attention by features to all keys but near ones, which are in a query's own block or the adjacent ones."""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from subquad.kernels.attention.features.op import feature_attention
from subquad.kernels.tokens.positions import ValidIndex


def far(
    of_query: Float[Tensor, "B H N R"],
    of_key: Float[Tensor, "B G N R"],
    value: Float[Tensor, "B G N E"],
    hidden: Bool[Tensor, "B N"],
    window: int,
    is_causal: bool,
) -> list[tuple[Tensor, Tensor]]:
    """Attention by features to the blocks at least two before a query's own, and to those at least two behind it."""
    bias = torch.zeros_like(hidden, dtype=of_key.dtype).masked_fill(hidden, -torch.inf)[:, None]
    parts = [feature_attention(of_query, of_key, value, key_bias=bias, lagged=(window, 2))]
    if not is_causal:
        turned = (x.flip(2) for x in (of_query, of_key, value))
        out, lse = feature_attention(*turned, key_bias=bias.flip(2), lagged=(window, 2))
        parts.append((out.flip(2), lse.flip(2)))
    return parts


def near_keys(ranks: ValidIndex, blocks: int, window: int, sinks: int, is_causal: bool) -> Int64[Tensor, "B T K"]:
    """For each block, the keys near it and the sinks that are not near it."""
    block = torch.arange(blocks, device=ranks.order.device).expand(len(ranks.lengths), blocks)
    first, end = (block - 1) * window, (block + (1 if is_causal else 2)) * window
    near = ranks.between(first, end, (2 if is_causal else 3) * window)
    return (ranks.ends(sinks, 0 if is_causal else sinks, blocks) | near).tokens


def in_blocks(x: Float[Tensor, "B H N D"], size: int) -> Float[Tensor, "B H M D"]:
    """Filled up with 0 to whole blocks."""
    return F.pad(x, (0, 0, 0, -x.shape[2] % size))
