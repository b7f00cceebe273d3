"""Learned terms of the distance between query and key (Dai et al. 2019), for "local" and "full"."""

from typing import ClassVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from subquad.core.randomness import normal
from subquad.masks import Mask

START = 0.02  # deviation of the parameters as they start, Transformer-XL's own
NOT_EXACT = "its logits hold learned terms of the distance, which exact attention does not have"


def sinusoids(distances: Int64[Tensor, "*P"], width: int, dtype: torch.dtype) -> Float[Tensor, "*P {width}"]:
    """r: sines of the distances at geometric frequencies from 1 to 1/10000, then as many cosines, or one fewer."""
    sines = -(-width // 2)
    frequency = 10000.0 ** (-torch.arange(sines, device=distances.device, dtype=dtype) * 2 / width)
    angles = distances[..., None].to(dtype) * frequency
    return torch.cat([angles.sin(), angles[..., : width - sines].cos()], dim=-1)


class RelativePositions(nn.Module):
    """u, v and W_R of one layer, whose initial values are always the same."""

    by_query_head: ClassVar[tuple[str, ...]] = ("content", "position", "weight")

    def __init__(self, heads: int, head_dim: int):
        super().__init__()
        width = heads * head_dim
        shapes = (heads, 1, head_dim), (heads, 1, head_dim), (heads, width, head_dim)
        drawn = [START * normal(n, h * rows, d, like=torch.zeros(1)) for n, (h, rows, d) in enumerate(shapes)]
        u, v, w = (nn.Parameter(x.view(shape)) for x, shape in zip(drawn, shapes, strict=True))
        self.content, self.position, self.weight = u, v, w

    def forward(
        self, query: Float[Tensor, "B H N D"], scale: float, ahead: Int64[Tensor, "#B P"]
    ) -> tuple[Float[Tensor, "B H N D"], Float[Tensor, "B H N P"]]:
        """(q + u, scale · (q + v)·W_R r): what meets the keys, and the terms of keys `ahead` of the query."""
        r = sinusoids(-ahead, self.weight.shape[1], query.dtype)[:, None]
        of_distance = r @ self.weight.to(query.dtype)
        terms = (query + self.position.to(query.dtype)) @ of_distance.transpose(-1, -2) * scale
        return query + self.content.to(query.dtype), terms


def window_ahead(span: int, is_causal: bool, device: torch.device) -> Int64[Tensor, "1 P"]:
    """−span, …, span, or up to 0: how far ahead the keys of a window are, the nearest to the past first."""
    return torch.arange(-span, 1 if is_causal else span + 1, device=device)[None]


def every_ahead(
    mask: Mask, N: int, M: int, device: torch.device
) -> tuple[Int64[Tensor, "#B P"], Int64[Tensor, "#B N M"]]:
    """The distances that a key may be ahead of a query, in order, and the index of each pair's distance.

    In a packed segment its own tokens are counted. Under a causal mask, keys of the future have the last distance.
    """
    offset = mask.offset
    most = M if not mask.is_causal or isinstance(offset, Tensor) else min(M, (offset or 0) + 1)
    start = mask.positions(torch.zeros(1, 1, dtype=torch.int64, device=device))
    ahead = torch.arange(1 - N, most, device=device) - start
    if mask.ids:
        together = torch.stack([ids[:, :, None] == ids[:, None] for ids in mask.ids]).all(0)
        queries = keys = together.tril(-1).sum(-1)
    else:
        queries, keys = (torch.arange(n, device=device)[None] for n in (N, M))
    pairs = keys[:, None, :] - queries[:, :, None] + N - 1
    return ahead, pairs.clamp(max=ahead.shape[1] - 1)
