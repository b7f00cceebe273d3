"""Rotary positions (RoPE): by which angles a position turns queries and keys."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from subquad.core.readable import can_be_read


@dataclass(frozen=True, eq=False)
class Rotary:
    """Rotary positions (Su et al. 2021, arXiv 2104.09864): position p rotates the pair r of components by p·θ_r.

        (x, y) → (x cos pθ_r − y sin pθ_r,  x sin pθ_r + y cos pθ_r)

    Args:
        frequencies: θ, (R,), the angle of each pair in radians a position; (B,R) where the items of a batch have their
            own. With 2R < D, the other components stay.
        interleaved: pair r is the components (2r, 2r+1), as in GPT-J; else (r, R+r), as in GPT-NeoX and Llama.

    Raises:
        TypeError: the frequencies are not a tensor.
        ValueError: they have another shape, are whole numbers, or are not finite.
    """

    frequencies: Float[Tensor, "*B R"]
    interleaved: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.frequencies, Tensor):
            raise TypeError(f"the frequencies are a {type(self.frequencies).__name__}, but they must be a tensor (R,)")
        if self.frequencies.ndim not in (1, 2) or not self.frequencies.is_floating_point():
            raise ValueError(
                f"the frequencies are {self.frequencies.dtype} {tuple(self.frequencies.shape)}, but they must be "
                "floating numbers, one for each pair of components"
            )
        if can_be_read(self.frequencies) and not self.frequencies.isfinite().all():
            raise ValueError("the frequencies contain NaN or infinity")

    @property
    def pairs(self) -> int:
        """R, the number of pairs."""
        return self.frequencies.shape[-1]

    def of_item(self, number: int) -> Rotary:
        """Those of one item of the batch."""
        return self if self.frequencies.ndim == 1 else replace(self, frequencies=self.frequencies[number])

    def to(self, device: torch.device) -> Rotary:
        """Move the frequencies to a device."""
        return self if self.frequencies.device == device else replace(self, frequencies=self.frequencies.to(device))

    def turned(self, x: Float[Tensor, "*any D"], positions: int) -> Float[Tensor, "*any D"]:
        """Rotate vectors as if they were this many positions later.

        If items have frequencies of their own, there are equally many vectors of each item, one item after the other.

        Raises:
            ValueError: there are more pairs than components, or vectors of other items.
        """
        turning, width = 2 * self.pairs, x.shape[-1]
        if turning > width:
            raise ValueError(f"{turning // 2} frequencies turn {turning} components, but the vectors have {width}")
        if positions == 0 or turning == 0:
            return x
        angles = positions * self.frequencies.double()  # in fp32 an angle of 10⁵ would have an error of 10⁻²
        if angles.ndim == 2:
            if len(x) % len(angles):
                raise ValueError(f"there are frequencies of {len(angles)} items, but vectors of shape {tuple(x.shape)}")
            angles = angles.repeat_interleave(len(x) // len(angles), 0).view(len(x), *(1,) * (x.ndim - 2), self.pairs)
        cos, sin = (f(angles).to(torch.promote_types(x.dtype, torch.float32)) for f in (torch.cos, torch.sin))
        pairs = x[..., :turning]
        if self.interleaved:
            first, second = pairs[..., 0::2], pairs[..., 1::2]
            turned = torch.stack([first * cos - second * sin, first * sin + second * cos], -1).flatten(-2)
        else:
            first, second = pairs.tensor_split(2, -1)
            turned = torch.cat([first * cos - second * sin, first * sin + second * cos], -1)
        return torch.cat([turned.to(x.dtype), x[..., turning:]], -1) if turning < width else turned.to(x.dtype)
