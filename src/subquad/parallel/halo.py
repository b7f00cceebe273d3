"""Keys near the borders of a rank's tokens, from the ranks beside it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from subquad.parallel.collectives import exchange
from subquad.parallel.sequence import Sequence, spans


@dataclass(frozen=True)
class Halo:
    """Which keys of all tokens each rank needs: its own, and `before` and `behind` them.

    Attributes:
        needed: the keys of each rank.
        own: the keys that each rank has.
        of: the sequence.
    """

    needed: list[slice]
    own: list[slice]
    of: Sequence

    @staticmethod
    def around(of: Sequence, before: int, behind: int) -> "Halo":
        """The keys of each rank, with up to `before` and `behind` others on each side."""
        own, end = spans(of.lengths), of.tokens
        needed = [slice(max(0, span.start - before), min(end, span.stop + behind)) for span in own]
        return Halo(needed, own, of)

    @property
    def before(self) -> int:
        """How many keys of other ranks stand before this rank's own."""
        return self.own[self.of.rank].start - self.needed[self.of.rank].start

    def keys(self, x: Tensor, dim: int = 2) -> Tensor:
        """This rank's keys with those around them, by one exchange."""
        rank, own = self.of.rank, self.own[self.of.rank]
        sent = [_common(own, needed) for needed in self.needed]
        received = [_common(other, self.needed[rank]) for other in self.own]
        parts = [x.narrow(dim, span.start - own.start, span.stop - span.start) for span in sent]
        parts[rank] = x.narrow(dim, 0, 0)  # its own stay where they are
        lengths = [span.stop - span.start for span in received]
        lengths[rank] = 0
        shapes = [(*x.shape[:dim], length, *x.shape[dim + 1 :]) for length in lengths]
        found = exchange(parts, shapes, self.of.group)
        found[rank] = x
        return torch.cat(found, dim=dim)


def _common(one: slice, other: slice) -> slice:
    """What two ranges have in common; if that is nothing, the empty start of the first."""
    start, stop = max(one.start, other.start), min(one.stop, other.stop)
    return slice(start, stop) if start < stop else slice(one.start, one.start)
