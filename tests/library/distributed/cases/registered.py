"""A method of another package, which registers how its ranks sum up their keys."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

import subquad as sq
from subquad.distributed.collectives import add
from subquad.distributed.token_split import TokenSplit
from subquad.kernels.tokens.heads import repeat_heads
from subquad.methods.core.call import Call, Partial
from tests.library.distributed.ranks import Case


@dataclass(frozen=True)
class MeanOfValues(sq.Method):
    """The same output for every query: the mean of the values, to a power."""

    power: int = 1

    name: ClassVar[str] = "mean-of-values"
    traits: ClassVar[sq.Traits] = sq.Traits(
        family="summary", lse=False, exact_limit="every key weighs the same", complexity="O(M·E)", source="this test"
    )

    def sums(self, value: Tensor, call: Call) -> Tensor:
        """The sum of the real values, and in one more column how many there are."""
        value = torch.cat([value, torch.ones_like(value[..., :1])], dim=-1)
        valid = call.mask.key_padding(value.shape[2])
        return (value if valid is None else value.masked_fill(~valid[:, None, :, None], 0.0)).sum(2, keepdim=True)

    def read(self, query: Tensor, sums: Tensor) -> Tensor:
        """The mean, for each query."""
        mean = repeat_heads(sums[..., :-1] / sums[..., -1:], query.shape[1])
        return mean.pow(self.power).expand(-1, -1, query.shape[2], -1)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        """Sum, and divide."""
        return self.read(query, self.sums(value, call)), None


def attend(method: MeanOfValues, query: Tensor, key: Tensor, value: Tensor, call: Call, split: TokenSplit) -> Partial:
    """Sum over this rank's values, then over ranks."""
    return method.read(query, add(method.sums(value, call), split.group)), None


strategy = sq.distributed.Strategy(
    kind="partials", attend=attend, fits=lambda method: method.power < 3, needs="a power of 1 or 2"
)
sq.distributed.register(MeanOfValues, strategy)


@dataclass(frozen=True)
class Registered(Case):
    """A call of the method with a power."""

    method: str = "mean-of-values"
    power: int = 1

    def made(self) -> sq.Method:
        """The method."""
        return MeanOfValues(self.power)


CASES = [
    *(Registered(mode=mode, mask=mask) for mode in ("summary", "heads") for mask in ("none", "lengths", "left")),
    Registered(mode="summary", keys=31, kv_heads=2, power=2),
    Registered(mode="auto", power=3),
]
REFUSED = [Registered(mode="summary", power=3), Registered(mode="ring")]
SENT: list = []
