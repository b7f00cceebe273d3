"""How much of a plan is measured in the time that there is: candidates, layers at a time, and passages.

The loss of one candidate in one layer takes a pass from that layer on. If the losses of all candidates in all layers
take too long, fewer candidates are measured, and then several neighbouring layers at a time: each of them gets an equal
share of what they lose together. Verification corrects what such a choice misses.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

KEPT = 6  # candidates of a length whose losses are measured
LEAST_KEPT = 3
PASSAGES = 2  # on which losses are measured, at least
VERIFIED = 3  # passages on which a plan is verified, at least
SCREENING = 0.15  # share of a length's time after which no further layer is screened
MEASURING = 0.5  # share of the remaining time for losses; the rest is for verifying
VERIFYING = 0.5  # share of what remains then for the first verification
AFTERWARDS = 5  # passes for crossovers and the baseline of audits


@dataclass(frozen=True)
class PassCost:
    """What measuring takes.

    Attributes:
        seconds: of an exact pass.
        loss_seconds: of the loss of an output, and of putting methods in and out.
        layers: number of attention layers that have a candidate.
        chained: whether the blocks in front of a layer are computed once.
    """

    seconds: float
    loss_seconds: float
    layers: int
    chained: bool

    @property
    def judged(self) -> float:
        """Seconds of a pass with its loss."""
        return self.seconds + self.loss_seconds

    def of_losses(self, candidates: int, together: int) -> float:
        """Seconds of the losses of a passage."""
        groups = max(math.ceil(self.layers / together), 1)
        part = (groups + 1) / (2 * groups) if self.chained else 1.0  # of the blocks, on average
        return 2 * self.seconds + candidates * groups * (part * self.seconds + self.loss_seconds)

    def of_verification(self, passages: int, choices: int) -> float:
        """Seconds of a verification of several choices, exact attention among them."""
        return passages * choices * self.judged

    @property
    def of_minimum(self) -> float:
        """Seconds of the least that gives a plan, from losses to a verification."""
        losses = PASSAGES * self.of_losses(1, self.layers)
        return max(losses / MEASURING, (self.of_verification(VERIFIED, 3) + AFTERWARDS * self.seconds) / MEASURING)


@dataclass(frozen=True)
class PlanEffort:
    """What is measured.

    Attributes:
        candidates: number of candidates whose losses are measured.
        together: number of neighbouring layers whose losses are measured at a time.
        seconds: of the losses of a passage, as predicted.
    """

    candidates: int
    together: int
    seconds: float


def affordable(cost: PassCost, seconds: float) -> PlanEffort | None:
    """The most that can be measured on two passages in these seconds, of which half is left for verifying.

    None if even the least takes longer.
    """
    if seconds < cost.of_minimum:
        return None
    for candidates, together in _from_most_to_least(cost.layers):
        predicted = cost.of_losses(candidates, together)
        if PASSAGES * predicted <= MEASURING * seconds:
            return PlanEffort(candidates, together, predicted)
    return None


def _from_most_to_least(layers: int) -> Iterator[tuple[int, int]]:
    together = 1
    while together < layers:
        yield from ((candidates, together) for candidates in range(KEPT, LEAST_KEPT - 1, -1))
        together *= 2
    yield from ((candidates, layers) for candidates in range(KEPT, 0, -1))


def verified_passages(cost: PassCost, seconds: float, held_out: int) -> int:
    """On how many held-out passages a plan is verified if these seconds are left."""
    affordable_now = int(VERIFYING * seconds / max(cost.of_verification(1, 3), 1e-9))
    return min(max(affordable_now, VERIFIED), held_out)
