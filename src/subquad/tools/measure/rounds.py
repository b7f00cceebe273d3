"""The rounds of a comparison at one length: seconds and memory of each row in each round, next to exact attention.

Every round runs all rows on one input. If the first round counts memory and warms up, exact attention runs once in it,
and its times count only if there is no other round; in all others exact attention is timed twice.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from subquad.methods.full import EXACT
from subquad.tools.measure.group import ALONE, MeasuringGroup
from subquad.tools.measure.noise import AGAIN, ASSUMED_NOISE, against_itself, between_rounds
from subquad.tools.measure.peak_memory import peak_extra_mib
from subquad.tools.measure.timing import Cost, cost, exact_cost, ratios, stopwatch


class MeasuredPass(NamedTuple):
    """The seconds of one pass, and the MiB that it took in addition; None if they were not counted."""

    seconds: float
    extra_mib: float | None


def measured_pass(
    forward: Callable[[], Any], counts_memory: bool, device: torch.device | None = None, group: MeasuringGroup = ALONE
) -> tuple[MeasuredPass, Any]:
    """Seconds of a pass, its memory if that is counted, and its output."""
    peak = partial(peak_extra_mib, forward, device, group) if counts_memory else lambda: (None, forward())
    seconds, (mib, output) = stopwatch(peak, device, group)
    return MeasuredPass(seconds, mib), output


@dataclass(frozen=True)
class RoundTimes:
    """The times of the rows at one length.

    Attributes:
        seconds: the times of each row, round by round.
        memory: MiB of each row whose memory was counted.
        exact: the row of exact attention that is timed in every round.
    """

    seconds: Mapping[str, list[float]]
    memory: Mapping[str, float | None] = field(default_factory=dict)
    exact: str = EXACT

    @classmethod
    def of_rounds(cls, rounds: Sequence[Mapping[str, Any]], exact: str = EXACT, *, warms_up: bool) -> "RoundTimes":
        """Times from each row's pass in each round; a first one that warms up counts if it is the only one.

        A row that runs in the first of these rounds alone has one entry.
        """
        timed = rounds[1:] or rounds if warms_up else rounds
        seconds = {name: [each[name].seconds for each in timed if name in each] for name in timed[0]}
        return cls(seconds, {name: each.extra_mib for name, each in rounds[0].items()}, exact)

    @property
    def medians(self) -> dict[str, float]:
        """The median of the seconds of each row."""
        return {name: statistics.median(each) for name, each in self.seconds.items()}

    @property
    def is_assumed(self) -> bool:
        """True if exact attention was timed once only, so that its noise is not known."""
        return AGAIN not in self.seconds and len(self.seconds[self.exact]) == 1

    @property
    def noise(self) -> float:
        """The factor by which exact attention differs from itself; assumed if it was timed once only.

        If it was not timed twice in each round, the factor is that of the speed-ups of different rounds.
        """
        exact = self.seconds[self.exact]
        if AGAIN in self.seconds:
            return against_itself(ratios(self.seconds[AGAIN], exact))
        others = [each for name, each in self.seconds.items() if name != self.exact and len(each) == len(exact) > 1]
        return between_rounds([ratios(row, exact) for row in others]) if others else ASSUMED_NOISE

    def cost(self, name: str, noise: float, exact: str = EXACT) -> Cost:
        """The cost of a row next to exact attention in its dtype, the row `exact`, and next to that in fp32.

        The one in fp32 may have run once, or not at all.
        """
        taken, mib, in_fp32 = self.seconds[name], self.memory.get(name), self.seconds.get(EXACT)
        in_dtype = exact_cost(taken, mib) if name == exact else cost(taken, self.seconds[exact], mib, noise)
        if exact == EXACT or in_fp32 is None:
            return in_dtype
        over_fp32 = cost(taken, in_fp32 if len(in_fp32) == len(taken) else in_fp32[:1] * len(taken), mib, noise)
        return replace(in_dtype, speedup_fp32=over_fp32.speedup, verdict_fp32=over_fp32.verdict)
