"""The stages of planning that all subjects have: losses by layer, whether they prove something, choices, verification.

A subclass plans one kind of subject: `length.Length` a text model at one length, and
`modules.module_planning.ModulePlanning` any module. It defines how a choice is verified and what the time allows, and
its `Messages` report what was found.
"""

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from subquad.methods import Method
from subquad.methods.full import EXACT
from subquad.tools.measure.tradeoff import closest_of_fast, tie_of
from subquad.tools.plan import choice
from subquad.tools.plan.effort import PASSAGES
from subquad.tools.plan.grid import pareto
from subquad.tools.plan.measure import Candidate, Screen
from subquad.tools.plan.planning_results import Planned, Verified

CLOSER = 0.9  # of the predicted loss of a choice that failed, at most: the same one would fail again


class OutOfTime(Exception):
    """The time ended before the least that a verification needs."""


@dataclass(frozen=True)
class SingleLoss:
    """One loss to measure: that of a candidate in neighbouring layers, the others exact, on a passage."""

    item: int
    layers: tuple[int, ...]
    candidate: str
    position: float  # the position of the first of these layers among all with candidates, in [0, 1)


@dataclass(frozen=True)
class Messages:
    """Sentences on why a plan is exact attention, and on why losses prove little, with the figures in braces."""

    nothing: str  # no choice but exact attention
    failed: str
    unclear: str
    tied: str
    small: str


class Planner(ABC):
    """Planning of one subject."""

    messages: ClassVar[Messages]
    verifies_any_gain: ClassVar[bool] = False  # also choices that are predicted to be hardly faster
    keeps_failure: ClassVar[bool] = False  # a failed verification stays the reason if nothing closer can be chosen
    candidates: Sequence[Candidate]

    @property
    @abstractmethod
    def noun(self) -> str:
        """The name of the inputs in sentences."""

    @property
    @abstractmethod
    def accepted(self) -> float:
        """The loss that is accepted if the inputs prove it."""

    @property
    @abstractmethod
    def may_be_binary(self) -> bool:
        """True if a loss may be that of a metric that is right or wrong."""

    @abstractmethod
    def verification(self, planned: Planned, mixes: Mapping[str, dict[int, str]], number: int) -> dict[str, Verified]:
        """Some choices on the held-out inputs, in the round of this number.

        Raises:
            OutOfTime: there is no time for the least.
        """

    @abstractmethod
    def share_of_next(self, last: Verified) -> float:
        """The part of the next round's budget that is used; 0 if there is no time for another round."""

    def is_clear(self, verified: Verified, accepted: float) -> bool:
        """True if a choice is clearly faster than exact attention."""
        return verified.speedup >= choice.FASTER

    def front(self, screened: Screen, most: int) -> list[str]:
        """At most `most` candidates of the Pareto front of error and time, from fast to close, of those that pay."""
        pays: dict[str, list[tuple[float, float]]] = {}
        for layer, errors in screened.errors.items():
            exact = screened.seconds[layer][EXACT]
            for name, error in errors.items():
                if math.isfinite(error) and screened.seconds[layer][name] < choice.GAIN * exact:
                    pays.setdefault(name, []).append((error, screened.seconds[layer][name] / exact))
        errors = {name: statistics.mean(error for error, _ in each) for name, each in pays.items()}
        seconds = {name: statistics.mean(share for _, share in each) for name, each in pays.items()}
        return pareto(errors, seconds, most)

    def sweep(
        self,
        kept: Mapping[int, Sequence[Candidate]],
        together: int,
        names: Sequence[str],
        items: Sequence[int] = range(PASSAGES),
    ) -> Iterator[SingleLoss]:
        """The losses of these candidates in all layers, some neighbours at a time, input by input."""
        numbers = sorted(number for number, tried in kept.items() if tried)
        able = {number: {candidate.name for candidate in tried} for number, tried in kept.items()}
        for item in items:
            for name in names:
                for begin in range(0, len(numbers), together):
                    group = tuple(number for number in numbers[begin : begin + together] if name in able[number])
                    if group:
                        yield SingleLoss(item, group, name, begin / len(numbers))

    @staticmethod
    def by_layer(
        numbers: Iterable[int], measured: Iterable[tuple[SingleLoss, float]]
    ) -> dict[int, dict[str, list[float]]]:
        """Losses by layer and candidate, input by input: an equal share for each layer that was measured together.

        A candidate with a loss that is not finite is left out.
        """
        losses: dict[int, dict[str, list[float]]] = {number: {} for number in numbers}
        for each, loss in measured:
            for number in each.layers:
                losses[number].setdefault(each.candidate, []).append(loss / len(each.layers))
        return {
            number: {name: each for name, each in by_name.items() if all(map(math.isfinite, each))}
            for number, by_name in losses.items()
        }

    def tell_apart(self, planned: Planned) -> None:
        """Leave exact kernels alone as candidates if the inputs show no loss of any other one, and note why."""
        planned.kernels = tuple(
            c.name for c in self.candidates if all(isinstance(m, Method) and m.is_exact for m in c.by_layer.values())
        )
        without, accepted = planned.without, self.accepted_of(planned)
        if count := choice.tied(planned.mean_losses, planned.kernels):
            scale = "" if without is None else f" (without attention: {1 - without:.4f})"
            planned.unproven = self.messages.tied.format(tie=tie_of(count), scale=scale)
            planned.losses = {
                n: {name: each for name, each in by_name.items() if name in planned.kernels}
                for n, by_name in planned.losses.items()
            }
        elif accepted < self.accepted:
            assert without is not None
            planned.unproven = self.messages.small.format(without=without, fidelity=1 - without, accepted=accepted)

    def accepted_of(self, planned: Planned) -> float:
        """The loss that is accepted: at most a tenth of that without attention."""
        return choice.provable(self.accepted, planned.without)

    def choose(self, planned: Planned, held_out: int, with_uniform: bool = True) -> Verified | None:
        """Choose and verify until a verification holds; of all choices that were verified the fastest is taken.

        The best uniform choice is verified together with the first one, if `with_uniform`. Exact attention is taken
        where nothing was verified, or is no slower.

        Returns:
            The verification of what is taken, or the one that speaks against it; None if there was none.

        Raises:
            OutOfTime: the time ended before the first choice was verified.
        """
        accepted, confidence = self.accepted_of(planned), choice.of_round()
        assert planned.passes is not None
        budget = choice.with_room(
            planned.seconds, planned.losses, accepted, confidence, held_out, binary=self.may_be_binary
        )
        planned.uniform = choice.best_uniform(planned.seconds, planned.mean_losses, accepted)
        for number in range(choice.ROUNDS):
            chosen = choice.closest(planned.seconds, planned.mean_losses, budget, planned.passes.seconds)
            if all(name == EXACT for name in chosen.values()):
                if number == 0 or not self.keeps_failure:
                    planned.why_exact = self.messages.nothing
                break
            if planned.predicted_speedup(chosen) < choice.FASTER and not self.verifies_any_gain:
                planned.why_exact = "what the floor allows is no faster than exact attention"
                break
            mixes = {"plan": chosen}
            if number == 0 and with_uniform and planned.uniform is not None:
                mixes["uniform"] = choice.uniform(planned.mean_losses, planned.uniform)
            try:
                verified = self.verification(planned, mixes, number)
            except OutOfTime:
                if not planned.rounds:
                    raise
                planned.why_exact = f"{planned.why_exact}; there was no time for another choice"
                break
            last = verified["plan"]
            planned.rounds.append(last)
            planned.uniform_verified = verified.get("uniform", planned.uniform_verified)
            counted = {"count": len(last.losses), "noun": self.noun, "confidence": confidence}
            planned.why_exact = self.messages.failed.format(
                loss=last.loss, bound=last.bound, accepted=accepted, **counted
            )
            if last.bound <= accepted or not (share := self.share_of_next(last)):
                break
            if not (failed := choice.total(planned.mean_losses, chosen)):
                break  # nothing is closer
            budget = min(choice.next_budget(budget, accepted, last.bound) * share, CLOSER * failed)
        return self._take_best(planned)

    def _take_best(self, planned: Planned) -> Verified | None:
        tried = [*planned.rounds, *([planned.uniform_verified] if planned.uniform_verified else [])]
        accepted = self.accepted_of(planned)
        held = [verification for verification in tried if verification.bound <= accepted]
        if not held:
            return planned.rounds[-1] if planned.rounds else None
        exact = Verified(dict.fromkeys(planned.chosen, EXACT), 0.0, [0.0], 0.0, [1.0])
        fastest = max(held, key=lambda verification: verification.speedup)
        best = closest_of_fast(
            [exact, *held], lambda each: each.speedup, lambda each: max(each.loss, 0.0), accepted, fastest.noise
        )
        if best is None or best is exact or not self.is_clear(best, accepted):
            planned.why_exact = self.messages.unclear.format(speedup=fastest.speedup, loss=fastest.loss)
            return fastest
        planned.chosen, planned.verified, planned.why_exact = best.chosen, best, None
        return best
