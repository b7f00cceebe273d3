"""Keys near the borders of a rank's tokens, from the neighbouring ranks."""

from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch
from torch import Tensor

from subquad.distributed.shares import spans
from subquad.distributed.together import exchange_together
from subquad.distributed.token_split import TokenSplit
from subquad.distributed.with_rows import WholeAndRows


@dataclass(frozen=True)
class Halo:
    """The keys that each rank needs: its own, and `before` and `behind` them.

    Attributes:
        needed: the keys of each rank.
        local: the keys that each rank has.
        split: the split of the tokens over the ranks.
    """

    needed: list[slice]
    local: list[slice]
    split: TokenSplit

    @staticmethod
    def around(split: TokenSplit, before: int, behind: int) -> "Halo":
        """The keys of each rank, with up to `before` and `behind` others on each side."""
        local, end = spans(split.lengths), split.tokens
        needed = [slice(max(0, span.start - before), min(end, span.stop + behind)) for span in local]
        return Halo(needed, local, split)

    @property
    def before(self) -> int:
        """The number of other ranks' keys that precede this rank's own."""
        return self.local[self.split.rank].start - self.needed[self.split.rank].start

    def exchange(
        self, around: Many[tuple[Tensor, int]], for_all: Many[Tensor]
    ) -> tuple[list[Tensor], list[Many[Tensor]]]:
        """Tensors of this rank's keys, each with its axis of keys, with those around them; and what is for all ranks.

        All by one exchange. Of each tensor that is for all ranks, every rank's comes back, in their order.
        """
        sides, rows = self.sides(around, for_all)
        pairs = zip(around, sides, strict=True)
        return [torch.cat([before, x, behind], dim=dim) for (x, dim), (before, behind) in pairs], rows

    def sides(
        self, around: Many[tuple[Tensor | WholeAndRows, int]], for_all: Many[Tensor] = ()
    ) -> tuple[list[tuple[Tensor, Tensor]], list[Many[Tensor]]]:
        """Like `exchange`, with what is before and what is behind this rank's own by themselves."""
        rank, local = self.split.rank, self.local[self.split.rank]
        sent = [_common(local, needed) for needed in self.needed]
        received = [_common(other, self.needed[rank]) for other in self.local]
        sent[rank] = received[rank] = slice(local.start, local.start)  # its own stay where they are
        parts = [
            [*(_cut(x, dim, span.start - local.start, span.stop - local.start) for x, dim in around), *for_all]
            for span in sent
        ]
        shapes = [
            [
                *((*x.shape[:dim], span.stop - span.start, *x.shape[dim + 1 :]) for x, dim in around),
                *(x.shape for x in for_all),
            ]
            for span in received
        ]
        exchanged = list(zip(*exchange_together(parts, shapes, self.split.group), strict=True))
        sides = [
            (torch.cat(each[: rank + 1], dim=dim), torch.cat(each[rank:], dim=dim))
            for (_, dim), each in zip(around, exchanged[: len(around)], strict=True)
        ]
        return sides, list(exchanged[len(around) :])


def _cut(x: Tensor | WholeAndRows, dim: int, start: int, stop: int) -> Tensor:
    """A range of the keys."""
    return x.slice(start, stop) if isinstance(x, WholeAndRows) else x.narrow(dim, start, stop - start)


def _common(one: slice, other: slice) -> slice:
    """The intersection of two ranges; if it is empty, the empty start of the first."""
    start, stop = max(one.start, other.start), min(one.stop, other.stop)
    return slice(start, stop) if start < stop else slice(one.start, one.start)
