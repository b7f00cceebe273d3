"""Views of some of the keys by some of the queries, piece by piece."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from subquad.masks import Mask

LOGITS = 2**22  # of a head that are masked, or in memory, at a time


class Piece(NamedTuple):
    """Some queries and some keys; the bias is −inf where they do not meet. `causal`: the kernel masks by itself."""

    rows: slice
    keys: slice
    bias: Float[Tensor, "#B 1 #N M"] | None = None
    causal: bool = False


def needs(mask: Mask, queries: slice, keys: slice) -> bool:
    """True if causality and the window let one of these queries see one of these keys."""
    first, last = keys.start - (queries.stop - 1), keys.stop - 1 - queries.start
    if mask.is_causal and first > 0:
        return False
    return mask.span is None or (first <= mask.span and last >= -mask.span)


@dataclass(frozen=True)
class View:
    """Attributes: how many queries and keys there are, and their masks.

    ahead: the position of the first key, less that of the first query.
    ids: the segments of the queries and of the keys.
    """

    N: int
    M: int
    ahead: int
    is_causal: bool
    span: int | None
    valid: Bool[Tensor, "B M"] | None
    ids: tuple[tuple[Int64[Tensor, "B N"], Int64[Tensor, "B M"]], ...]

    @staticmethod
    def cut(mask: Mask, queries: slice, keys: slice, M: int) -> "View":
        """The view of these keys by these queries, by the mask of all tokens, of which M are keys."""
        valid = mask.key_padding(M)
        return View(
            queries.stop - queries.start,
            keys.stop - keys.start,
            keys.start - queries.start,
            mask.is_causal,
            mask.span,
            None if valid is None else valid[:, keys],
            tuple((ids[:, queries], ids[:, keys]) for ids in mask.ids),
        )

    def pieces(self, device: torch.device, whole: bool = True) -> Iterator[Piece]:
        """Pieces that together hold every pair that meets; `whole`: one where nothing but padding is masked."""
        N, M, ahead = self.N, self.M, self.ahead
        causal = self.is_causal and ahead + M - 1 > 0
        narrow = self.span is not None and max(abs(ahead - N + 1), abs(ahead + M - 1)) > self.span
        if whole and not (causal or narrow or self.ids):
            bias = None if self.valid is None else _bias(self.valid[:, None, None, :])
            yield Piece(slice(0, N), slice(0, M), bias)
            return
        if whole and causal and ahead == 0 and N == M and not (narrow or self.ids) and self.valid is None:
            yield Piece(slice(0, N), slice(0, M), causal=True)
            return
        for first in range(0, N, step := max(1, LOGITS // M)):
            rows = slice(first, min(N, first + step))
            low = 0 if self.span is None else max(0, first - self.span - ahead)
            high = M if self.span is None else min(M, rows.stop + self.span - ahead)
            high = min(high, rows.stop - ahead) if self.is_causal else high
            if low < high:
                yield Piece(rows, slice(low, high), self._bias(rows, slice(low, high), device))

    def _bias(self, rows: slice, keys: slice, device: torch.device) -> Tensor:
        mask = Mask(is_causal=self.is_causal, span=self.span, offset=-self.ahead)
        position = [torch.arange(at.start, at.stop, device=device) for at in (rows, keys)]
        allowed = mask.sees(position[0][None, None, :, None], position[1])
        for of_queries, of_keys in self.ids:
            allowed = allowed & (of_queries[:, None, rows, None] == of_keys[:, None, None, keys])
        return _bias(allowed if self.valid is None else allowed & self.valid[:, None, None, keys])


def _bias(allowed: Bool[Tensor, "#B 1 #N M"]) -> Float[Tensor, "#B 1 #N M"]:
    return torch.zeros(allowed.shape, device=allowed.device).masked_fill(~allowed, -torch.inf)
