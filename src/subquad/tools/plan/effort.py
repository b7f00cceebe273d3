"""Choose how much of a plan is measured in the time that there is: candidates, layers at a time, and passages.

The loss of one candidate in one layer takes a pass from that layer on. If the losses of all candidates in all layers
take too long, fewer candidates are measured, and then several neighbouring layers at a time: each of them gets an equal
share of what they lose together. Verification corrects what such a choice misses.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

KEPT = 6  # candidates of a length, or of a layer of a module, whose losses are measured
LEAST_KEPT = 3
MOST = 16  # inputs on which losses are measured
PASSAGES = 2  # on which losses are measured, at least
VERIFIED = 3  # passages on which a plan is verified, at least
SCREENING = 0.15  # share of a length's time after which no further layer is screened
SCREENING_PASSES = 5  # exact passes whose time the least screening takes
MEASURING = 0.5  # share of the remaining time for losses; the rest is for verifying
VERIFYING = 0.5  # share of what remains then for the first verification
AFTERWARDS = 5  # passes for crossovers and the baseline of audits
JOB_SECONDS = 60.0  # about the most that an interruption loses: no longer job is begun where a shorter one would do


@dataclass(frozen=True)
class PassCost:
    """The cost of measuring losses.

    Attributes:
        seconds: duration of an exact pass.
        loss_seconds: duration of computing the loss of an output, and of putting methods in and out.
        single_loss_seconds: the same for losses of single layers, which may use fewer positions.
        layers: number of attention layers that have a candidate.
        chained: whether the blocks in front of a layer are computed once.
    """

    seconds: float
    loss_seconds: float
    single_loss_seconds: float
    layers: int
    chained: bool

    def slower(self, pace: float) -> "PassCost":
        """The cost on a machine on which everything takes this many times as long."""
        times = {name: pace * getattr(self, name) for name in ("seconds", "loss_seconds", "single_loss_seconds")}
        return replace(self, **times)

    def of_single(self, position: float) -> float:
        """Seconds of a loss with a candidate in layers that begin at this position, 0 (first) to 1 (end)."""
        return (1 - position if self.chained else 1.0) * self.seconds + self.single_loss_seconds

    def of_losses(self, candidates: int, together: int) -> float:
        """Seconds of the losses of a passage."""
        groups = max(math.ceil(self.layers / together), 1)
        each = [self.of_single(group / groups) for group in range(groups)]
        return self.seconds + self.single_loss_seconds + candidates * sum(each)

    def of_verification(self, passages: int, choices: int) -> float:
        """Seconds of a verification of several choices, exact attention among them."""
        return passages * choices * (self.seconds + self.loss_seconds)

    @property
    def afterwards(self) -> float:
        """Seconds of what follows a verification."""
        return AFTERWARDS * self.seconds

    @property
    def reserve(self) -> float:
        """Seconds of the least verification, of exact attention and one choice, and of what follows it."""
        return self.of_verification(VERIFIED, 2) + self.afterwards

    @property
    def of_least_losses(self) -> float:
        """Seconds of the losses of one candidate in all layers together."""
        return PASSAGES * self.of_losses(1, self.layers)

    @property
    def of_minimum(self) -> float:
        """Seconds of the least that gives a plan, from losses to a verification."""
        return self.of_least_losses + self.reserve

    def for_losses(self, seconds: float) -> float:
        """The part of these seconds that losses may take: half of them, or more where the least takes more."""
        return min(max(MEASURING * seconds, self.of_least_losses), seconds - self.reserve)


@dataclass(frozen=True)
class PlanEffort:
    """The losses that a plan has the time to measure.

    Attributes:
        candidates: number of candidates whose losses are measured.
        together: number of neighbouring layers whose losses are measured at a time.
        seconds: predicted duration of the losses of a passage.
    """

    candidates: int
    together: int
    seconds: float


@dataclass(frozen=True)
class VerifiedPassages:
    """On what a plan is verified.

    Attributes:
        passages: number of held-out passages.
        with_uniform: whether the best single method is verified as well.
    """

    passages: int
    with_uniform: bool


def affordable(cost: PassCost, seconds: float) -> PlanEffort | None:
    """The most that can be measured on two passages in these seconds, of which half is left for verifying.

    None if even the least takes longer.
    """
    if seconds < cost.of_minimum:
        return None
    for candidates, together in _from_most_to_least(cost.layers):
        predicted = cost.of_losses(candidates, together)
        if PASSAGES * predicted <= cost.for_losses(seconds) + 1e-9:
            return PlanEffort(candidates, together, predicted)
    return None


def _from_most_to_least(layers: int) -> Iterator[tuple[int, int]]:
    together = 1
    while together < layers:
        yield from ((candidates, together) for candidates in range(KEPT, LEAST_KEPT - 1, -1))
        together *= 2
    yield from ((candidates, layers) for candidates in range(KEPT, 0, -1))


def affordable_verification(cost: PassCost, seconds: float, held_out: int) -> VerifiedPassages:
    """On what a plan is verified if these seconds are left; at least on three passages, without a single method."""
    with_uniform = seconds >= cost.of_verification(VERIFIED, 3) + cost.afterwards
    each = cost.of_verification(1, 3 if with_uniform else 2)
    passages = int(VERIFYING * (seconds - cost.afterwards) / max(each, 1e-9))
    return VerifiedPassages(min(max(passages, VERIFIED), held_out), with_uniform)


def least_seconds(pass_seconds: float, loss_seconds: float = 0.0) -> float:
    """Seconds of the least that gives a plan, screening included."""
    together = PassCost(pass_seconds, loss_seconds, loss_seconds, layers=1, chained=False)
    return SCREENING_PASSES * pass_seconds + together.of_minimum / (1 - SCREENING)


def spread_out(count: int) -> Sequence[int]:
    """The numbers 0 to `count` − 1, ordered so that the first few are spread over all.

    >>> list(spread_out(6))
    [0, 5, 2, 4, 1, 3]
    """
    return sorted(range(count), key=lambda number: number * 0.6180339887 % 1.0)  # the golden ratio's fractional part


def divided(inputs: Sequence[Any], most: int) -> tuple[list[Any], list[Any]]:
    """The inputs for losses, and those held out.

    For losses: two to `most` of four or more inputs, evenly spread, and a third of them or fewer.
    """
    few = max(min(most, len(inputs) // 3), 2)
    chosen = [i * len(inputs) // few for i in range(few)]
    return [inputs[i] for i in chosen], [each for i, each in enumerate(inputs) if i not in chosen]
