"""Projections along a sequence: k × n matrices that are learned, with what is known of each row (see "linformer")."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from subquad.core.randomness import normal
from subquad.core.rounding import ceil_div
from subquad.kernels.tensors import one_hot
from subquad.kernels.tokens.heads import repeat_heads
from subquad.kernels.tokens.pools import pool_of


@dataclass(frozen=True)
class Shares:
    """The shares of each κ for a whole item (N = 1), or for the past of each query."""

    visible: Bool[Tensor, "#B #N k"]
    factor: Float[Tensor, "#B #N k"] | None  # n_κ/c_κ
    bias: Float[Tensor, "#B #H #N k"] | None

    def of_heads(self, heads: int, like: Tensor) -> Float[Tensor, "#B {heads} #N k"]:
        """The bias of the logits of `heads` query heads."""
        if self.bias is None:
            return like.new_zeros(1, heads, 1, 1)
        return repeat_heads(self.bias.expand(-1, self.bias.shape[1], -1, -1), heads)


class Projections(nn.Module):
    """E and F of one layer, or of all layers."""

    segment: Int64[Tensor, "n"]  # the segment of each token at the start
    first: Int64[Tensor, "k"]  # rank of each segment's first token
    last: Int64[Tensor, "k"]  # and behind its last
    full: Int64[Tensor, "k"]  # n_κ
    by_key_head: ClassVar[tuple[str, ...]] = ("key", "value", "bias")

    def __init__(self, heads: int, k: int, max_length: int, *, start: str, kernel: bool, tied: bool, seed: int):
        super().__init__()
        self.k, self.max_length, self.kernel = k, max_length, kernel
        self.derive()
        segment, size = self.segment, self.last - self.first
        width = ceil_div(max_length, k)  # the largest size, which cannot be read on the meta device
        shape = (heads, 1, width) if kernel else (heads, k, max_length)
        if start == "pool":
            mean = torch.full(shape, 1 / width) if kernel else one_hot(segment, k).T / size.clamp(min=1)[:, None]
            drawn = mean.expand(2, *shape)
        else:
            rows = normal(seed, 2 * shape[0] * shape[1], shape[2], like=torch.zeros(1))
            drawn = rows.view(2, *shape) * (width if kernel else max_length + k) ** -0.5
        self.key = nn.Parameter(drawn[0].clone(memory_format=torch.contiguous_format))
        self.value = None if tied else nn.Parameter(drawn[1].clone(memory_format=torch.contiguous_format))
        self.bias = nn.Parameter(torch.zeros(heads, k)) if start == "pool" else None
        self.register_load_state_dict_post_hook(_derive_after_loading)  # parameters may have come from the meta device

    def derive(self, device: torch.device | None = None) -> None:
        """Make the buffers that files do not hold, from `k` and `max_length`."""
        segment = pool_of(torch.arange(self.max_length, device=device), self.max_length, self.k)
        size = one_hot(segment, self.k).sum(0)
        for name, buffer in {
            "segment": segment,
            "first": size.cumsum(0) - size,
            "last": size.cumsum(0),
            "full": size.max().expand_as(size).clone() if self.kernel else size,
        }.items():
            self.register_buffer(name, buffer, persistent=False)

    def matrices(self, dtype: torch.dtype) -> tuple[Float[Tensor, "_h k n"], Float[Tensor, "_h k n"]]:
        """Return E and F."""
        key = self._matrix(self.key.to(dtype))
        return key, key if self.value is None else self._matrix(self.value.to(dtype))

    def _matrix(self, weights: Tensor) -> Tensor:
        if not self.kernel:
            return weights
        index = torch.arange(self.max_length, device=weights.device) - self.first[self.segment]
        return weights[..., index] * one_hot(self.segment, self.k).T

    def columns(
        self, rank: Int64[Tensor, "_ N"], inside: Bool[Tensor, "_ N"], like: Float[Tensor, "B G N D"]
    ) -> list[Float[Tensor, "B G N k"]]:
        """The columns of E and F for the tokens of these ranks; 0 for those not inside."""
        column, inside = rank.clamp(max=self.max_length - 1), inside[:, None, :, None]
        picked = (m.transpose(1, 2)[:, column].transpose(0, 1) for m in self.matrices(like.dtype))
        return [m.masked_fill(~inside, 0.0).expand(*like.shape[:2], -1, -1) for m in picked]

    def shares(self, begin: int, end: Int64[Tensor, "#B N"], dtype: torch.dtype) -> Shares:
        """The shares of the tokens with ranks from `begin` up to, but not including, `end`."""
        counts = (self.last.minimum(end[..., None]) - self.first.clamp(min=begin)).clamp(min=0)
        if self.bias is None:
            return Shares(counts > 0 if self.kernel else (end > begin)[..., None].expand_as(counts), None, None)
        c = counts.clamp(min=1).to(dtype)
        return Shares(counts > 0, self.full / c, c.log()[:, None] + self.bias.to(dtype)[:, None])


def _derive_after_loading(projections: Projections, _keys: object) -> None:
    projections.derive(projections.key.device)
