"""The results of planning, length by length."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from subquad.methods.full import EXACT
from subquad.tools.measure.noise import interval
from subquad.tools.plan.measure import PassTimes, Screen
from subquad.tools.plan.schema import OtherFloor


@dataclass
class Verified:
    """The result of verifying one choice."""

    chosen: dict[int, str]
    predicted: float  # the sum of single losses
    losses: list[float]  # the loss of each held-out passage
    bound: float  # on the mean loss
    speedups: list[float]  # exact attention's seconds / the choice's, passage by passage
    of_exact: float | None = None  # the factor between two timings of exact attention; None: timed once

    @property
    def loss(self) -> float:
        """The mean loss."""
        return statistics.mean(self.losses)

    @property
    def speedup(self) -> float:
        """The median speed-up of the whole model."""
        return statistics.median(self.speedups)

    @property
    def noise(self) -> float:
        """By what factor the speed-up may be too high."""
        return self.speedup / interval(self.speedups).low if self.of_exact is None else self.of_exact


@dataclass
class Planned:
    """Everything that was found for one length."""

    length: int
    passes: PassTimes | None = None  # None where not even an exact pass was run
    screen: Screen = field(default_factory=lambda: Screen({}, {}))
    losses: dict[int, dict[str, list[float]]] = field(default_factory=dict)  # by layer and candidate and passage
    chosen: dict[int, str] = field(default_factory=dict)
    uniform: str | None = None  # the best single candidate in all layers that have it
    rounds: list[Verified] = field(default_factory=list)  # the verifications of the plan
    verified: Verified | None = None  # the result for the final choice; None if that is exact attention
    uniform_verified: Verified | None = None
    without: float | None = None  # the mean loss without attention; None where there was no time to measure it
    kernels: tuple[str, ...] = ()  # candidates that are exact attention by another kernel
    unproven: str | None = None  # the reason why losses on this text prove nothing, in a clause
    why_exact: str | None = None
    least_seconds: float | None = None  # the time that a decision needs, if there was less
    starts: dict[str, int] = field(default_factory=dict)  # by candidate: the length from which on it runs
    floors: list[OtherFloor] = field(default_factory=list)
    baseline: dict[str, Any] | None = None
    steps: Any = None  # `StepTimes`, of generated tokens with exact attention and with the plan; None if not timed
    has_exact_steps: bool = False  # whether they are exact attention by construction
    left_out: list[str] = field(default_factory=list)  # the parts that there was no time for

    @property
    def undecided(self) -> bool:
        """True if exact attention runs because the time did not suffice to decide anything."""
        return self.least_seconds is not None

    @property
    def seconds(self) -> dict[int, dict[str, float]]:
        """Seconds of a call of each measured candidate in each layer, exact attention among them."""
        known = {int(n): s for n, s in self.screen.seconds.items()}
        return {n: {name: known[n][name] for name in names} for n, names in self.mean_losses.items()}

    @property
    def mean_losses(self) -> dict[int, dict[str, float]]:
        """Mean losses by layer and candidate; exact attention's is 0."""
        return {
            layer: {EXACT: 0.0} | {name: statistics.mean(each) for name, each in candidates.items()}
            for layer, candidates in self.losses.items()
        }

    @property
    def lossless_speedup(self) -> float:
        """The predicted speed-up of exact attention by other kernels alone."""
        allowed = (EXACT, *self.kernels)
        seconds = {
            n: {name: s for name, s in by_name.items() if name in allowed} for n, by_name in self.seconds.items()
        }
        return self.predicted_speedup({n: min(by_name, key=by_name.__getitem__) for n, by_name in seconds.items()})

    def predicted_speedup(self, chosen: Mapping[int, str]) -> float:
        """The speed-up of the whole model, from the layers' times."""
        saved = sum(self.seconds[layer][EXACT] - self.seconds[layer][name] for layer, name in chosen.items())
        assert self.passes is not None
        return self.passes.seconds / max(self.passes.seconds - saved, 1e-9)
