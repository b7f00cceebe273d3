"""The whole of planning, length by length, and the plan that comes of it."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from subquad import hf
from subquad.core.errors import InputError
from subquad.core.messages import expect
from subquad.hf.adapters import describe_model
from subquad.hf.plans import Plan, joined
from subquad.methods import BoundMethod, Full, Method
from subquad.methods.core.mixture import is_mixture
from subquad.methods.full import EXACT
from subquad.tools.measure.deadline import Deadline
from subquad.tools.measure.group import ALONE, MeasuringGroup
from subquad.tools.measure.timing import beside
from subquad.tools.models.compare_rows import longest
from subquad.tools.models.generation import request_seconds
from subquad.tools.models.split_methods import split_refusals
from subquad.tools.plan import choice
from subquad.tools.plan.effort import least_seconds
from subquad.tools.plan.grid import grid
from subquad.tools.plan.length import PLAN, Length, ShorterLengths
from subquad.tools.plan.loads import PlanInputs
from subquad.tools.plan.measure import Candidate
from subquad.tools.plan.planning_results import Planned
from subquad.tools.plan.schema import PlannedRequests, RequestTimes
from subquad.tools.plan.workers import UNAIDED, Workers
from subquad.tools.runs.cache import JobCache
from subquad.tools.runs.floor import Floor
from subquad.tools.runs.jobs import Progress
from subquad.tools.runs.records import to_plain

ROOM = 1.1  # of the minutes that are reported as needed
SHORT = 512  # tokens; shorter lengths are not recommended below this


@dataclass
class Planning:
    """A run of `subquad plan`."""

    loads: Sequence[PlanInputs]
    candidates: Callable[[int], list[Candidate]]  # for a length
    floor: Floor
    deadline: Deadline
    shift: float = 1.0  # the most by which losses of other text may exceed those of this one, as a factor
    workers: Workers = UNAIDED
    lengths: list[Planned] = field(default_factory=list)

    def run(self, cache: JobCache, progress: Progress) -> None:
        """Plan every length, the shortest first; finished jobs come from the cache.

        A length gets a share of the remaining time in proportion to its tokens. If the time does not suffice for all
        lengths, the longest are left out.

        Raises:
            InputError: the time does not suffice to decide anything at any length.
        """
        expect(progress, seconds=self.deadline.left)
        begun = self.deadline.left
        lengths = [
            Length(
                load,
                self.candidates(load.length),
                self.floor.least,
                self.shift,
                cache,
                progress,
                self.deadline.seconds / 60,
                self.workers,
            )
            for load in self.loads
        ]
        seconds: float | None = None  # of a pass of the length before, per token
        count = self._affordable(lengths)
        for number, length in enumerate(lengths):
            progress(f"planning at {length.length:,} tokens", number, len(lengths))
            if number >= count:
                assert seconds is not None
                self.lengths.append(length.without_time(seconds * length.length, self.deadline.left))
                continue
            if length.load.batches is not None and self.lengths:
                length.shorter = self._up_to_last()
            share = length.length / sum(each.length for each in lengths[number:count])
            planned = length.plan(self.deadline.part(share))
            assert planned.passes is not None
            seconds = planned.passes.seconds / length.length
            self.lengths.append(planned)
        progress("done", len(lengths), len(lengths))
        if all(planned.undecided for planned in self.lengths):
            raise self._too_short(begun)

    def _affordable(self, lengths: Sequence[Length]) -> int:
        """The number of lengths, in order, that there is time for: at least one.

        The time of a pass of the shortest is measured; longer ones take at least as much time per token.
        """
        if len(lengths) == 1:
            return 1
        per_token = lengths[0].passes(self.deadline).seconds / lengths[0].length
        for count in range(len(lengths), 1, -1):
            if sum(least_seconds(per_token * each.length) for each in lengths[:count]) <= self.deadline.left:
                return count
        return 1

    def _up_to_last(self) -> ShorterLengths:
        """The methods that the plan runs up to the longest length that was planned so far."""
        longest_planned = self.lengths[-1].length
        steps = {
            number: {start: method for start, method in by_start.items() if start <= longest_planned}
            for number, by_start in self.steps().items()
        }
        return ShorterLengths(longest_planned, steps)

    def _too_short(self, begun: float) -> InputError:
        """The error with the number of minutes that are needed; `begun` are the seconds that there were at first."""
        weights = {planned.length: planned.length for planned in self.lengths}
        first = self.lengths[0]
        assert first.passes is not None
        assert first.least_seconds is not None
        loading = self.deadline.seconds - begun
        needed = max(
            (planned.least_seconds or 0.0) * sum(weights.values()) / weights[planned.length] for planned in self.lengths
        )
        minutes = math.ceil(10 * ROOM * (loading + needed) / 60) / 10
        shorter = ", or shorter or fewer --lengths" if len(self.lengths) > 1 or first.length > SHORT else ""
        return InputError(
            f"--minutes {self.deadline.seconds / 60:g} is too little to decide anything: an exact pass at "
            f"{first.length:,} tokens takes {first.passes.seconds:.2g} s, and the least that gives a verified plan "
            f"takes about {first.least_seconds:.0f} s there; give --minutes {minutes:g} or more{shorter}"
        )

    def steps(self) -> dict[int, dict[int, Method | BoundMethod]]:
        """The steps of every layer: exact below the crossover, then the methods of the next longer length.

        They are those of the lengths that were planned so far, which are the shortest ones.
        """
        by_layer: dict[int, dict[int, Method | BoundMethod]] = {}
        for layer in hf.find_layers(self.loads[0].model):
            steps: dict[int, Method | BoundMethod] = {0: Full()}
            before = 0
            for planned, load in zip(self.lengths, self.loads, strict=False):
                name = planned.chosen.get(layer.number, EXACT)
                if name == EXACT:
                    steps[before + 1] = Full()
                else:
                    candidate = next(c for c in self.candidates(load.length) if c.name == name)
                    start = max(planned.starts.get(name, planned.length), before + 1)
                    if start > before + 1:
                        steps[before + 1] = Full()
                    steps[start] = candidate.by_layer[layer.number]
                before = planned.length
            last = steps[max(steps)]
            if isinstance(last, BoundMethod) and (most := longest({layer.number: last})) is not None:
                steps[most + 1] = Full()
            by_layer[layer.number] = steps
        return by_layer


def candidates_for(
    model: Any,
    methods: Sequence[Method] | None,
    fitted: Mapping[str, dict[int, BoundMethod]],
    group: MeasuringGroup = ALONE,
) -> Callable[[int], list[Candidate]]:
    """The candidates of a length, as `Planning` wants them: methods in the layers that can run them, and fitted ones.

    Fitted ones whose parameters are for shorter inputs are left out.
    """
    refused: dict[Method, dict[int, str]] = {}
    layers = hf.find_layers(model)
    numbers = [layer.number for layer in layers]

    def at_length(length: int) -> list[Candidate]:
        candidates = []
        for method in grid(length) if methods is None else methods:
            if method not in refused:
                refused[method] = split_refusals(layers, method, group) | hf.refusals(model, method)
                refused[method] |= _refused_from_a_length_on(layers, method)
            able = {n: method for n in numbers if n not in refused[method]}
            if able and method != Full():
                candidates.append(Candidate(str(method), dict(able)))
        return candidates + [
            Candidate(name, dict(bounds)) for name, bounds in fitted.items() if (longest(bounds) or length) >= length
        ]

    return at_length


def _refused_from_a_length_on(layers: Sequence[hf.Layer], method: Method) -> dict[int, str]:
    """The layers that cannot run a method for long inputs only, as plans have it: a decoder's windowed layers."""
    reasons = {
        layer.number: layer.window_refusal(joined(layer, {0: Full(), 1: method})[0])
        for layer in layers
        if layer.window is not None and not is_mixture(method)
    }
    return {number: reason for number, reason in reasons.items() if reason}


def plan_of(planning: Planning, made_on: dict[str, Any]) -> Plan:
    """The plan that was found."""
    model = planning.loads[0].model
    layers: dict[int, Method] = {}
    bounds: dict[int, BoundMethod] = {}
    for number, steps in planning.steps().items():
        layers[number], bound = joined(hf.find_layers(model)[number], steps)
        bounds |= {} if bound is None else {number: bound}
    lengths = tuple(planned.length for planned in planning.lengths)
    verified = {
        str(planned.length): _verified(planned, planning, load)
        for planned, load in zip(planning.lengths, planning.loads, strict=True)
    }
    return Plan(describe_model(model), lengths, layers, verified, made_on, bounds)


def requests_of(planned: Planned, load: PlanInputs) -> PlannedRequests | None:
    """Requests with exact attention and with the plan; None if their steps were not timed, or were refused."""
    steps = planned.steps
    if steps is None or planned.verified is None or any(row.reason is not None for row in steps.rows.values()):
        return None
    exact, mine = steps.rows[EXACT], steps.rows[PLAN]
    assert planned.passes is not None
    first = {EXACT: planned.passes.seconds, PLAN: planned.passes.seconds / planned.verified.speedup}
    per_token, faster = beside(mine.seconds, exact.seconds)
    step = {EXACT: statistics.median(exact.seconds), PLAN: per_token.median}
    whole = {name: request_seconds([first[name]], step[name], load.new_tokens)[0] for name in first}
    times = {name: RequestTimes(1e3 * first[name], 1e3 * step[name], 1e3 * whole[name]) for name in first}
    return PlannedRequests(
        new_tokens=load.new_tokens,
        exact=times[EXACT],
        plan=times[PLAN],
        step_speedup=faster.median,
        speedup=whole[EXACT] / whole[PLAN],
        exact_steps=planned.has_exact_steps,
        step_kl=mine.kl or 0.0,
    )


def _verified(planned: Planned, planning: Planning, load: PlanInputs) -> dict[str, Any]:
    verified, floor, pooling = planned.verified, planning.floor, load.pooling
    output: dict[str, Any] | None = None
    if floor.of_next_tokens:
        output = {floor.option: floor.bound}
    elif pooling is not None:
        output = {floor.option: floor.bound, "pooling": pooling}
    others: dict[str, Any] = {} if planned.unproven is None else {"unproven": planned.unproven}
    if output is not None:
        others["output"] = output
    if load.batches is not None:
        others["batches"] = to_plain(load.batches)
    if (requests := requests_of(planned, load)) is not None:
        others["requests"] = to_plain(requests)
    if verified is None:
        return {
            "floor": planning.floor.least,
            "shift": planning.shift,
            "fidelity": 1.0,
            "bound": 1.0,
            "confidence": 1.0,
            "passages": 0,
            "speedup": 1.0,
            "exact_because": planned.why_exact or "",
            **others,
        }
    return {
        "floor": planning.floor.least,
        "shift": planning.shift,
        "fidelity": 1 - verified.loss,
        "bound": 1 - verified.bound,
        "confidence": choice.CONFIDENCE,
        "passages": len(verified.losses),
        "speedup": verified.speedup,
        "predicted_loss": verified.predicted,
        "loss": verified.loss,
        "baseline": planned.baseline,
        **others,
    }
