"""The processes that measure together: this one alone, or the ranks over which the tokens of an input are split.

All ranks make the same calls in the same order, so what depends on a clock or a file is decided by the first of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from subquad.distributed import Ranks
from subquad.distributed.collectives import add
from subquad.distributed.failures import answered

R = TypeVar("R")


@dataclass(frozen=True)
class MeasuringGroup:
    """The processes of a measurement.

    Attributes:
        ranks: over which the tokens of an input are split; None: this process is alone, and has all tokens.
    """

    ranks: Ranks | None = None

    @property
    def count(self) -> int:
        """The number of processes."""
        return 1 if self.ranks is None else self.ranks.ranks

    @property
    def is_main(self) -> bool:
        """True if this is the process that reads and writes files."""
        return self.ranks is None or self.ranks.rank == 0

    def broadcast_from_main(self, make: Callable[[], R]) -> R:
        """Call `make` in the first process, and return its result in all of them."""
        if self.ranks is None:
            return make()
        made = [make() if self.is_main else None]
        with answered(self.ranks.group):
            dist.broadcast_object_list(made, group=self.ranks.group, group_src=0)
        return made[0]  # type: ignore[return-value]

    def sums(self, *numbers: float) -> list[float]:
        """The sum of each number over all processes, with the same bits in each of them."""
        return list(numbers) if self.ranks is None else self._every(numbers).sum(0).tolist()

    def maximum(self, number: float) -> float:
        """The largest of a number of each process."""
        return number if self.ranks is None else float(self._every([number]).max())

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of a tensor over all processes."""
        return x if self.ranks is None else add(x, self.ranks.group)

    def barrier(self) -> None:
        """Wait until all processes are here."""
        if self.ranks is not None:
            with answered(self.ranks.group):
                dist.barrier(self.ranks.group)

    def cut(self, x: Tensor) -> Tensor:
        """The tokens of this process of a tensor (batch, tokens, …), which are split evenly."""
        return x if self.ranks is None else self.ranks.even(x.shape[1]).shard(x)

    def local_tokens(self, tokens: int) -> int:
        """The number of tokens that this process has of an input of `tokens`."""
        return tokens if self.ranks is None else self.ranks.even(tokens).lengths[self.ranks.rank]

    def _every(self, numbers: Sequence[float]) -> Tensor:
        assert self.ranks is not None
        return self.ranks.gathered(torch.tensor(numbers, dtype=torch.float64))


ALONE = MeasuringGroup()
