"""Views of equal windows of tokens, each some tokens behind the one before."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class TokenWindows:
    """`count` windows of `length` tokens, the first from token `first` on, each `step` tokens behind the one before.

    With a step of 0 they are all the same.
    """

    first: int
    length: int
    step: int = 1
    count: int = 1

    def view(self, x: Tensor) -> Tensor:
        """A view of (B,H,N,D), (B,H,N) or (B,N): (B,H,count,length,D), (B,H,count,length) or (B,count,length)."""
        axis = 1 if x.ndim == 2 else 2
        tokens = x.narrow(axis, self.first, (self.count - 1) * self.step + self.length)
        if self.step == 0:
            return tokens.unsqueeze(axis).expand(*tokens.shape[:axis], self.count, *tokens.shape[axis:])
        views = tokens.unfold(axis, self.length, self.step)
        return views.mT if x.ndim == 4 else views

    def numbers(self) -> tuple[int, int, int, int]:
        """The fields, for what takes numbers alone."""
        return self.first, self.length, self.step, self.count
