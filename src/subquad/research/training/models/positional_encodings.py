"""Positional encodings of tokens, for embeddings and for the queries and keys of a layer."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

BASE = 10_000.0  # of the wavelengths


def counted(x: Tensor) -> Int[Tensor, "B N"]:
    """0, 1, 2, … for each item of x, (B, N) or (B, N, width)."""
    return torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])


def sinusoid(positions: Int[Tensor, "*tokens"], width: int) -> Float[Tensor, "*tokens {width}"]:
    """[sin(p·ω_0), …, cos(p·ω_0), …], ω_i = 10000^(−2i/width): Vaswani et al. 2017, section 3.5, in halves."""
    angles = _angles(positions, width)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)[..., :width]


def rotate(x: Float[Tensor, "B H N D"], positions: Int[Tensor, "B N"]) -> Float[Tensor, "B H N D"]:
    """Each pair (x_i, x_{i+D/2}) turned by p·ω_i, so that products depend on distances: Su et al. 2021, equation 34."""
    angles = _angles(positions, x.shape[-1])[:, None]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def frequencies(width: int, device: torch.device | str = "cpu") -> Float[Tensor, " R"]:
    """ω of each pair of components, in radians a position."""
    half = (width + 1) // 2
    omega: Tensor = BASE ** (-torch.arange(half, device=device, dtype=torch.float32) / half)
    return omega


def _angles(positions: Tensor, width: int) -> Tensor:
    return positions[..., None].float() * frequencies(width, positions.device)
