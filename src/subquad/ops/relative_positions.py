"""Learned terms of the distance between query and key (Dai et al. 2019), for "local"."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from subquad.randomness import normal

START = 0.02  # deviation of the parameters as they start, Transformer-XL's own


def sinusoids(distances: Int64[Tensor, "P"], width: int, dtype: torch.dtype) -> Float[Tensor, "P {width}"]:
    """r: sines of the distances at geometric frequencies from 1 to 1/10000, then as many cosines, or one fewer."""
    sines = -(-width // 2)
    frequency = 10000.0 ** (-torch.arange(sines, device=distances.device, dtype=dtype) * 2 / width)
    angles = distances[:, None].to(dtype) * frequency
    return torch.cat([angles.sin(), angles[:, : width - sines].cos()], dim=-1)


class RelativePositions(nn.Module):
    """u, v and W_R of one layer, whose initial values are always the same."""

    def __init__(self, heads: int, head_dim: int):
        super().__init__()
        width = heads * head_dim
        shapes = (heads, 1, head_dim), (heads, 1, head_dim), (heads, width, head_dim)
        drawn = [START * normal(n, h * rows, d, like=torch.zeros(1)) for n, (h, rows, d) in enumerate(shapes)]
        u, v, w = (nn.Parameter(x.view(shape)) for x, shape in zip(drawn, shapes, strict=True))
        self.content, self.position, self.weight = u, v, w

    def forward(
        self, query: Float[Tensor, "B H N D"], scale: float, span: int, is_causal: bool
    ) -> tuple[Float[Tensor, "B H N D"], Float[Tensor, "B H N P"]]:
        """(q + u, scale · (q + v)·W_R r): what meets the keys, and the terms of the distances, nearest to the past
        first: of keys that stand −span, …, span (or 0) tokens ahead.
        """
        ahead = torch.arange(-span, 1 if is_causal else span + 1, device=query.device)
        of_distance = sinusoids(-ahead, self.weight.shape[1], query.dtype) @ self.weight.to(query.dtype)
        terms = (query + self.position.to(query.dtype)) @ of_distance.transpose(-1, -2) * scale
        return query + self.content.to(query.dtype), terms
