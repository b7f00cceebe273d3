"""Views of equal windows of tokens, each some tokens behind the one before."""

from typing import NamedTuple

from torch import Tensor


class Windows(NamedTuple):
    """`count` windows of `length` tokens, the first from token `first` on, each `step` tokens behind the one before.

    With a step of 0 they are all the same.
    """

    first: int
    length: int
    step: int = 1
    count: int = 1

    def of(self, x: Tensor) -> Tensor:
        """A view of (B,H,N,D), (B,H,N) or (B,N): (B,H,count,length,D), (B,H,count,length) or (B,count,length)."""
        axis = 1 if x.ndim == 2 else 2
        tokens = x.narrow(axis, self.first, (self.count - 1) * self.step + self.length)
        if self.step == 0:
            return tokens.unsqueeze(axis).expand(*tokens.shape[:axis], self.count, *tokens.shape[axis:])
        views = tokens.unfold(axis, self.length, self.step)
        return views.mT if x.ndim == 4 else views
