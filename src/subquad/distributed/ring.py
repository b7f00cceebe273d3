"""Blocks of tokens that go from rank to rank, each as far as some rank needs it.

    rank      0     1     2     3
    step 0    b0    b1    b2    b3      its own
    step 1    b3    b0    b1    b2      what the rank before it had
    …

Block b is on rank b + t at step t, and stops at the last rank that needs it: under a causal mask block 0 goes to the
last rank, and the last block nowhere.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from subquad.distributed.collectives import start
from subquad.distributed.token_split import TokenSplit


class Ring:
    """A ring of ranks that passes each block of keys as far as it is needed.

    Args:
        split: the split of the tokens over the ranks; block b holds the keys of rank b.
        needs: whether the queries of a rank, the first argument, need a block, the second.
    """

    def __init__(self, split: TokenSplit, needs: Callable[[int, int], bool]) -> None:
        self.split, self.rank, self.ranks = split, split.rank, split.ranks
        self.hops = [
            max((t for t in range(self.ranks) if needs((block + t) % self.ranks, block)), default=0)
            for block in range(self.ranks)
        ]
        self.steps = max(self.hops) + 1

    def block(self, step: int) -> int | None:
        """The block that this rank has at a step; None where none comes."""
        block = (self.rank - step) % self.ranks
        return block if step <= self.hops[block] else None

    def travel(self, local: Tensor) -> Iterator[tuple[int, int | None, Tensor]]:
        """For each step the block that is here, (B,G,M,…), and its number, while it is already on its way."""
        held = local
        for step in range(self.steps):
            block, coming = self.block(step), self.block(step + 1)
            sends = [] if block is None or step == self.hops[block] else [(held, self._next)]
            receives = [] if coming is None else [(self._shape(local, coming), self._before)]
            wait = start(sends, receives, local, self.split.group)
            yield step, block, held
            held = next(iter(wait()), held)

    @property
    def _next(self) -> int:
        return (self.rank + 1) % self.ranks

    @property
    def _before(self) -> int:
        return (self.rank - 1) % self.ranks

    def _shape(self, local: Tensor, block: int) -> tuple[int, ...]:
        return (*local.shape[:2], self.split.key_lengths[block], *local.shape[3:])


class Homeward:
    """Sums over ranks, one for each block: they grow on the block's way, and come home from its last rank.

    Args:
        ring: the way of the blocks.
        local: a tensor of the shape and dtype of the sums of this rank's block.
    """

    def __init__(self, ring: Ring, local: Tensor) -> None:
        self.ring, self.local = ring, torch.zeros_like(local)
        self._wait: Callable[[], list[Tensor]] = list
        self._comes_home = False

    def add(self, step: int, more: Tensor | None) -> None:
        """Add what this rank has for the block of this step, None where it has no block, and send the sums on."""
        ring, block, coming = self.ring, self.ring.block(step), self.ring.block(step + 1)
        sums = self._arrived()
        if more is not None:
            sums = more if sums is None else sums + more
        local_hops = ring.hops[ring.rank]
        sends, receives = [], []
        if block is not None and sums is not None:
            if ring.hops[block] == 0:
                self.local = sums
            else:
                sends.append((sums, block if step == ring.hops[block] else ring._next))
        if coming is not None:
            receives.append((ring._shape(self.local, coming), ring._before))
        self._comes_home = step == local_hops > 0
        if self._comes_home:
            receives.append((tuple(self.local.shape), (ring.rank + local_hops) % ring.ranks))
        self._wait = start(sends, receives, self.local, ring.split.group)

    def _arrived(self) -> Tensor | None:
        """The sums so far of the block that is here now; this rank's own, if they have come home, are put away."""
        came = self._wait()
        if self._comes_home:
            self.local = came.pop()
        return came[0] if came else None

    def home(self) -> Tensor:
        """The sums of this rank's own block, after the last step."""
        self._arrived()
        return self.local
