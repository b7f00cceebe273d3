"""The whole of planning: length by length, measure, choose, verify, and choose again until the verification holds.

    screen/<length>              times and errors of all candidates in all layers, on the first passage
    losses/<length>/<i>          the final loss with one candidate in one layer, on the i-th passage
    verify/<length>/<round>/<i>  the plan of a round on the i-th held-out passage, beside exact attention
    crossover/<length>           from which length on the chosen methods are faster than exact attention
    baseline/<length>            usual errors of the plan's layers on the held-out passages, for audits to compare with

Losses of single layers are added up; the plan is the cheapest choice whose sum is under the budget. The first budget is
the accepted loss less room for the spread over passages. A verification on held-out passages gives a bound on the mean
loss of the plan; where it is above the accepted loss the budget shrinks, and at last exact attention is what is left.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from subquad import hf
from subquad.audits import audit
from subquad.hf.adapters import describe_model
from subquad.hf.plans import Plan, joined
from subquad.measure.capture import recorded
from subquad.methods import Bound, Full, Method
from subquad.workflows.planning import choice
from subquad.workflows.planning.grid import grid, pareto
from subquad.workflows.planning.loads import Load
from subquad.workflows.planning.measure import (
    EXACT,
    Candidate,
    Screen,
    Turn,
    clock,
    faster_at,
    screen,
    single_losses,
    turn,
)
from subquad.workflows.pretrained import running
from subquad.workflows.store import Kind, Progress, Store

SCREEN: Kind[Screen] = Kind("screen", Screen)
LOSSES: Kind[dict[str, dict[str, float]]] = Kind("losses", dict[str, dict[str, float]])
VERIFY: Kind[Turn] = Kind("verify", Turn)
BASELINE: Kind[dict[str, Any]] = Kind("baseline", dict[str, Any])
CROSSOVER: Kind[dict[str, list[bool]]] = Kind("crossover", dict[str, list[bool]])

KEPT = 6  # candidates of a length whose losses are measured
GAIN = 0.97  # a candidate that takes more of exact attention's time in a layer is not one
FASTER = 1.02  # a plan whose whole model is not so much faster is exact attention
FLOORS = (0.9, 0.95, 0.98, 0.99, 0.995, 0.999)  # of the table of what other floors would give
FRACTIONS = (0.25, 0.4, 0.55, 0.7, 0.85)  # of a length, where the crossover is looked for
MEASURING = 0.6  # share of a length's time for losses; the rest is for verifying


@dataclass
class Verified:
    """What a verification of one choice found."""

    chosen: dict[int, str]
    predicted: float  # the sum of single losses
    losses: list[float]  # of each held-out passage
    bound: float  # on the mean loss
    speedups: list[float]  # exact attention's seconds / the choice's, passage by passage

    @property
    def loss(self) -> float:
        """The mean loss."""
        return statistics.mean(self.losses)

    @property
    def speedup(self) -> float:
        """The median speed-up of the whole model."""
        return statistics.median(self.speedups)


@dataclass
class Planned:
    """Everything that was found for one length."""

    length: int
    screen: Screen
    losses: dict[int, dict[str, list[float]]]  # by layer and candidate, passage by passage
    chosen: dict[int, str]
    uniform: str | None  # the best single candidate in all layers that have it
    rounds: list[Verified]  # of the plan
    verified: Verified | None  # of what was taken; None where it is exact attention
    uniform_verified: Verified | None = None
    why_exact: str | None = None
    starts: dict[str, int] = field(default_factory=dict)  # by candidate: the length from which on it runs
    floors: list[dict[str, Any]] = field(default_factory=list)
    baseline: dict[str, Any] | None = None

    @property
    def seconds(self) -> dict[int, dict[str, float]]:
        """Of a call of each candidate in each layer whose losses were measured, exact attention among them."""
        known = {int(n): s for n, s in self.screen.seconds.items()}
        return {n: {name: known[n][name] for name in names} for n, names in self.mean_losses.items()}

    @property
    def mean_losses(self) -> dict[int, dict[str, float]]:
        """By layer and candidate, exact attention's being 0."""
        return {
            layer: {EXACT: 0.0} | {name: statistics.mean(each) for name, each in found.items()}
            for layer, found in self.losses.items()
        }

    def predicted_speedup(self, chosen: Mapping[int, str]) -> float:
        """Of the whole model, from the layers' times."""
        saved = sum(self.seconds[layer][EXACT] - self.seconds[layer][name] for layer, name in chosen.items())
        return self.screen.model_seconds / max(self.screen.model_seconds - saved, 1e-9)


@dataclass
class Planning:
    """A run of `subquad plan`."""

    loads: Sequence[Load]
    candidates: Callable[[int], list[Candidate]]  # for a length
    floor: float
    minutes: float
    shift: float = 1.0  # how many times the losses of other text may be those of this one
    lengths: list[Planned] = field(default_factory=list)

    @property
    def accepted(self) -> float:
        """The loss that is accepted on the text that is planned on."""
        return (1.0 - self.floor) / self.shift

    def run(self, store: Store, progress: Progress) -> None:
        """Plan every length, the shortest first; finished units come from the store."""
        begun = clock()
        weights = [load.length for load in self.loads]
        for number, load in enumerate(self.loads):
            left = 60 * self.minutes - (clock() - begun)
            share = left * weights[number] / sum(weights[number:])
            progress(f"{load.length:,} tokens", number, len(self.loads))
            self.lengths.append(_Length(self, load, store, progress, clock() + max(share, 1.0)).plan())
        progress("done", len(self.loads), len(self.loads))

    def steps(self) -> dict[int, dict[int, Method | Bound]]:
        """Of every layer, what runs from which length on: exact below the crossover, then as the next longer length."""
        found: dict[int, dict[int, Method | Bound]] = {}
        for layer in hf.find_layers(self.loads[0].model):
            steps: dict[int, Method | Bound] = {0: Full()}
            before = 0
            for planned, load in zip(self.lengths, self.loads, strict=True):
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
            found[layer.number] = steps
        return found


@dataclass
class _Length:
    """Planning one length."""

    of: Planning
    load: Load
    store: Store
    progress: Progress
    until: float  # on the clock

    def __post_init__(self) -> None:
        self.begun = clock()

    @property
    def length(self) -> int:
        return self.load.length

    def plan(self) -> Planned:
        candidates = self.of.candidates(self.length)
        self.progress(f"{self.length:,} tokens: layers", 0, 1)
        found = self.store.get(SCREEN(self.length), lambda: screen(self.load, candidates))
        kept = self.kept(found, candidates)
        losses = self.losses(kept)
        planned = Planned(self.length, found, losses, dict.fromkeys(losses, EXACT), None, [], None)
        if not any(kept.values()):
            planned.why_exact = "no candidate is faster than exact attention in any layer"
            return planned
        self.verify(planned, {c.name: c for c in candidates})
        if planned.verified is not None:
            planned.starts = self.starts(planned, {c.name: c for c in candidates})
            chosen = swap_of(planned.chosen, {c.name: c for c in candidates})
            planned.baseline = self.store.get(BASELINE(self.length), partial(self.usual_errors, chosen))
        planned.floors = self.floors(planned)
        return planned

    def kept(self, found: Screen, candidates: Sequence[Candidate]) -> dict[int, list[Candidate]]:
        """The candidates of each layer whose losses are measured: those that pay, and no other beats in both."""
        pays: dict[str, list[tuple[float, float]]] = {}
        for layer, errors in found.errors.items():
            exact = found.seconds[layer][EXACT]
            for name, error in errors.items():
                if found.seconds[layer][name] < GAIN * exact:
                    pays.setdefault(name, []).append((error, found.seconds[layer][name] / exact))
        errors = {name: statistics.mean(error for error, _ in each) for name, each in pays.items()}
        seconds = {name: statistics.mean(share for _, share in each) for name, each in pays.items()}
        names = pareto(errors, seconds, KEPT)
        return {
            int(layer): [
                c
                for c in candidates
                if c.name in names
                and c.name in of
                and found.seconds[layer][c.name] < GAIN * found.seconds[layer][EXACT]
            ]
            for layer, of in found.errors.items()
        }

    def losses(self, kept: Mapping[int, list[Candidate]]) -> dict[int, dict[str, list[float]]]:
        """Of single layers on one passage after the other, on two at least and as many as there is time for."""
        found: dict[int, dict[str, list[float]]] = {n: {c.name: [] for c in tried} for n, tried in kept.items()}
        if not any(kept.values()):
            return found
        end = self.begun + MEASURING * (self.until - self.begun)
        items = self.load.items
        for i, item in enumerate(items):
            unit = LOSSES(self.length, i)
            if i >= 2 and clock() > end and not self.store.has(unit):
                break
            self.progress(f"{self.length:,} tokens: single layers", i, len(items))
            record = self.store.get(unit, partial(single_losses, self.load, item, kept))
            for layer, of in record.items():
                for name, loss in of.items():
                    found[int(layer)][name].append(loss)
        return found

    def verify(self, planned: Planned, by_name: Mapping[str, Candidate]) -> None:
        """Choose and verify until a verification holds; of all choices that were verified the fastest is taken.

        The best uniform choice is verified beside the first one. When the time is out, one last and far more exact
        choice is tried. Exact attention is taken where nothing was verified, or is no slower.
        """
        accepted, confidence = self.of.accepted, choice.of_round()
        held_out = len(self.load.held_out)
        budget = choice.with_room(planned.seconds, planned.losses, accepted, confidence, held_out)
        planned.uniform = choice.best_uniform(planned.seconds, planned.mean_losses, accepted)
        last = False
        for number in range(choice.ROUNDS):
            chosen = choice.cheapest(planned.seconds, planned.mean_losses, budget)
            if all(name == EXACT for name in chosen.values()):
                planned.why_exact = "no method in any layer keeps the floor"
                break
            if planned.predicted_speedup(chosen) < FASTER:
                planned.why_exact = "what the floor allows is no faster than exact attention"
                break
            found = self.verification(planned, chosen, by_name, number, confidence)
            planned.rounds.append(found)
            planned.why_exact = (
                f"the last choice has a loss of {found.loss:.4f} (at most {found.bound:.4f} at confidence "
                f"{confidence:.4f}) on held-out passages, and {accepted:.4f} is accepted"
            )
            if found.bound <= accepted or last:
                break
            last = clock() > self.until and not self.store.has(VERIFY(self.length, number + 1, 0))
            budget = choice.next_budget(budget, accepted, found.bound) * (0.5 if last else 1.0)
        tried = [*planned.rounds, *([planned.uniform_verified] if planned.uniform_verified else [])]
        held = [found for found in tried if found.bound <= accepted]
        if not held:
            return
        best = max(held, key=lambda found: found.speedup)
        if best.speedup < FASTER:
            planned.why_exact = f"the verified plan has {best.speedup:.2f}× the speed of exact attention"
            return
        planned.chosen, planned.verified, planned.why_exact = best.chosen, best, None

    def verification(
        self, planned: Planned, chosen: dict[int, str], by_name: Mapping[str, Candidate], number: int, confidence: float
    ) -> Verified:
        """The plan of a round on the held-out passages, and in the first round the best uniform choice beside it."""
        mixes = {"plan": chosen}
        if number == 0 and planned.uniform is not None:
            mixes["uniform"] = choice.uniform(planned.mean_losses, planned.uniform)
        choices: dict[str, Any] = {EXACT: None} | {name: swap_of(mix, by_name) for name, mix in mixes.items()}
        turns = []
        for i, item in enumerate(self.load.held_out):
            self.progress(f"{self.length:,} tokens: verifying", i, len(self.load.held_out))
            unit = VERIFY(self.length, number, i)
            turns.append(self.store.get(unit, partial(turn, self.load, item, choices, seed=i)))
        found = {
            name: Verified(
                chosen=mix,
                predicted=choice.total(planned.mean_losses, mix),
                losses=[each.losses[name] for each in turns],
                bound=choice.upper_bound([each.losses[name] for each in turns], confidence),
                speedups=[each.seconds[EXACT] / each.seconds[name] for each in turns],
            )
            for name, mix in mixes.items()
        }
        planned.uniform_verified = found.get("uniform", planned.uniform_verified)
        return found["plan"]

    def starts(self, planned: Planned, by_name: Mapping[str, Candidate]) -> dict[str, int]:
        """The length from which on each chosen method is faster than exact attention, at most this one."""
        layer_of = {name: layer for layer, name in planned.chosen.items() if name != EXACT}
        lengths = [max(int(part * self.length), 1) for part in FRACTIONS]

        def tried() -> dict[str, list[bool]]:
            with recorded(self.load.model) as calls:
                self.load.run(self.load.items[0])
            inputs = {call.number: call for call in reversed(calls)}
            won: dict[str, list[bool]] = {}
            for name, layer in layer_of.items():
                won |= faster_at(inputs[layer], {name: by_name[name].by_layer[layer]}, lengths)
            return won

        self.progress(f"{self.length:,} tokens: shorter inputs", 0, 1)
        won = self.store.get(CROSSOVER(self.length), tried)
        return {name: choice.crossover(lengths, wins, self.length) for name, wins in won.items()}

    def usual_errors(self, methods: Mapping[int, Any]) -> dict[str, Any]:
        """The baseline of an audit of every call on the held-out passages."""
        with running(self.load.model, methods), audit(self.load.model, tolerance=1e9, every=1) as audited:
            for item in self.load.held_out:
                self.load.run(item)
            return audited.baseline()

    def floors(self, planned: Planned) -> list[dict[str, Any]]:
        """What other floors would give, as predicted from the same figures."""
        found = []
        for floor in sorted({*FLOORS, self.of.floor}):
            accepted = (1.0 - floor) / self.of.shift
            chosen = choice.cheapest(planned.seconds, planned.mean_losses, accepted)
            best = choice.best_uniform(planned.seconds, planned.mean_losses, accepted)
            mix = choice.uniform(planned.mean_losses, best) if best else {}
            found.append(
                {
                    "floor": floor,
                    "chosen": {str(layer): name for layer, name in chosen.items()},
                    "loss": choice.total(planned.mean_losses, chosen),
                    "speedup": planned.predicted_speedup(chosen),
                    "uniform": best,
                    "uniform_speedup": planned.predicted_speedup(mix) if best else 1.0,
                }
            )
        return found


def swap_of(chosen: Mapping[int, str], by_name: Mapping[str, Candidate]) -> dict[int, Method | Bound]:
    """What `hf.swap` is given for a choice."""
    return {layer: Full() if name == EXACT else by_name[name].by_layer[layer] for layer, name in chosen.items()}


def candidates_for(model: Any, methods: Sequence[Method] | None, adapters: Mapping[str, dict[int, Bound]]) -> Any:
    """The candidates of a length, as `Planning` wants them: methods in the layers that can run them, and adapters."""
    refused: dict[Method, dict[int, str]] = {}
    numbers = [layer.number for layer in hf.find_layers(model)]

    def of(length: int) -> list[Candidate]:
        found = []
        for method in grid(length) if methods is None else methods:
            if method not in refused:
                refused[method] = hf.refusals(model, method)
            able = {n: method for n in numbers if n not in refused[method]}
            if able and not method.is_exact:
                found.append(Candidate(str(method), dict(able)))
        found += [Candidate(name, dict(bounds)) for name, bounds in adapters.items()]
        return found

    return of


def plan_of(planning: Planning, made_on: dict[str, Any]) -> Plan:
    """The plan that was found."""
    model = planning.loads[0].model
    layers: dict[int, Method] = {}
    bounds: dict[int, Bound] = {}
    for number, steps in planning.steps().items():
        layers[number], bound = joined(hf.find_layers(model)[number], steps)
        bounds |= {} if bound is None else {number: bound}
    lengths = tuple(planned.length for planned in planning.lengths)
    verified = {str(planned.length): _verified(planned, planning) for planned in planning.lengths}
    return Plan(describe_model(model), lengths, layers, verified, made_on, bounds)


def _verified(planned: Planned, planning: Planning) -> dict[str, Any]:
    found = planned.verified
    if found is None:
        return {
            "floor": planning.floor,
            "shift": planning.shift,
            "fidelity": 1.0,
            "bound": 1.0,
            "confidence": 1.0,
            "passages": 0,
            "speedup": 1.0,
            "exact_because": planned.why_exact or "",
        }
    return {
        "floor": planning.floor,
        "shift": planning.shift,
        "fidelity": 1 - found.loss,
        "bound": 1 - found.bound,
        "confidence": choice.CONFIDENCE,
        "passages": len(found.losses),
        "speedup": found.speedup,
        "predicted_loss": found.predicted,
        "loss": found.loss,
        "baseline": planned.baseline,
    }
