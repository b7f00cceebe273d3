"""A tensor that one op takes whole, and rows of it for others, with one gradient.

Indexing alone makes a gradient of zeros as large as the tensor, writes those of the rows into it, and adds it to the
other: three passes over all tokens for the sake of a few. Here the rows' gradients are added in place to that of the
whole. A graph of two nodes and a token between them sees to the order:

    x ──► _Whole ──► whole ──► the op
            └─────► token ──► _Rows ──► rows         backward: _Rows leaves its gradient in `link`, then _Whole runs
"""

from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable


class WholeAndRows:
    """x, as `whole`, and its `rows`.

    `whole` is to be used once, by an op whose backward pass makes a new tensor.
    """

    whole: Float[Tensor, "B G M D"]

    def __init__(self, x: Float[Tensor, "B G M D"]) -> None:
        self._x, self._link = x.detach(), list[tuple[Tensor, Tensor]]()
        self.whole, self._token = _WholeView.apply(x, self._link)

    @property
    def shape(self) -> torch.Size:
        """(B,G,M,D)."""
        return self._x.shape

    def slice(self, start: int, stop: int) -> Float[Tensor, "B G S D"]:
        """The rows of these places in all heads."""
        B, G = self.shape[:2]
        return self.rows(torch.arange(start, stop, device=self._x.device).expand(B, G, -1))

    def rows(self, at: Int64[Tensor, "B G *S"]) -> Float[Tensor, "B G *S D"]:
        """The rows at these places of each head."""
        return _RowsView.apply(self._token, self._x, at.flatten(2), self._link).view(*at.shape, self.shape[3])


class _WholeView(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, link: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        ctx.shape, ctx.link = x.shape, link
        ctx.set_materialize_grads(False)
        return x.view_as(x), x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None, token: Tensor | None) -> tuple[Tensor | None, None]:
        while ctx.link:
            at, of_rows = ctx.link.pop()
            if gradient is None:
                gradient = of_rows.new_zeros(ctx.shape)
            if 0 in gradient.stride() or not _rows_follow(gradient):  # 0: what is expanded shares memory
                gradient = gradient.contiguous()
            flat, positions = _in_memory(gradient, at)
            flat.index_add_(0, positions, of_rows.reshape(-1, ctx.shape[3]))
        return gradient, None


class _RowsView(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, x: Tensor, at: Tensor, link: list[tuple[Tensor, Tensor]]) -> Tensor:
        ctx.save_for_backward(at)
        ctx.link = link
        return rows_at_positions(x, at)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.link.append((*ctx.saved_tensors, gradient))
        return gradient.new_empty(0), None, None, None


def rows_at_positions(x: Float[Tensor, "B G M D"], at: Int64[Tensor, "B G S"]) -> Float[Tensor, "B G S D"]:
    """The rows at these places of each head."""
    flat, positions = _in_memory(x if _rows_follow(x) else x.contiguous(), at)
    return flat.index_select(0, positions).view(*at.shape, x.shape[3])  # whole rows: faster than `gather`


def _rows_follow(x: Float[Tensor, "B G M D"]) -> bool:
    """True if the memory is a list of rows, of which some are x's."""
    return x.stride(3) == 1 and all(stride % x.shape[3] == 0 for stride in x.stride()[:3])


def _in_memory(
    x: Float[Tensor, "B G M D"], at: Int64[Tensor, "B G S"]
) -> tuple[Float[Tensor, "R D"], Int64[Tensor, "P"]]:
    """The rows in x's memory, of which some may not be x's, and where among them those at these places of each head."""
    B, G, M, D = x.shape
    of_item, of_head, of_token = (stride // D for stride in x.stride()[:3])
    last = (B - 1) * of_item + (G - 1) * of_head + (M - 1) * of_token
    item, head = (torch.arange(n, device=at.device) for n in (B, G))
    positions = item[:, None, None] * of_item + head[:, None] * of_head + at * of_token
    return x.as_strided((last + 1, D), (D, 1)), positions.view(-1)
