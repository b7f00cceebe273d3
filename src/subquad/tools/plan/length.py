"""Planning one length, in units that are kept as soon as they are done.

    screen/<length>                     times and errors of all candidates in all layers, on the first passage
    losses/<length>/<i>                 the final loss with one candidate in one layer, on the i-th passage
    verify/<length>/<round>/<mark>/<i>  what was chosen in a round on the i-th held-out passage, beside exact attention
    crossover/<length>                  from which length on the chosen methods are faster than exact attention
    baseline/<length>                   usual errors of the plan's layers on the held-out passages, for audits

Losses of single layers are added up; the plan is the cheapest choice whose sum is under the budget. The first budget is
the accepted loss less room for the spread over passages. A verification on held-out passages gives a bound on the mean
loss of the plan; where it is above the accepted loss the budget shrinks, and at last exact attention is what is left.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any

from subquad.audits import audit
from subquad.methods import BoundMethod, Full, Method
from subquad.tools.measure.capture import recorded
from subquad.tools.models.pretrained import running
from subquad.tools.plan import choice
from subquad.tools.plan.grid import pareto
from subquad.tools.plan.loads import PlanInputs
from subquad.tools.plan.measure import (
    EXACT,
    Candidate,
    HeldOutPass,
    Screen,
    faster_at,
    held_out_pass,
    screen,
    single_losses,
)
from subquad.tools.plan.planned import Planned, Verified
from subquad.tools.runs.cache import JobCache
from subquad.tools.runs.executors import LOCAL, Executor
from subquad.tools.runs.jobs import JobKind, Progress
from subquad.tools.runs.runner import run_jobs

SCREEN: JobKind[Screen] = JobKind("screen", Screen)
LOSSES: JobKind[dict[str, dict[str, float]]] = JobKind("losses", dict[str, dict[str, float]])
VERIFY: JobKind[HeldOutPass] = JobKind("verify", HeldOutPass)
BASELINE: JobKind[dict[str, Any]] = JobKind("baseline", dict[str, Any])
CROSSOVER: JobKind[dict[str, list[bool]]] = JobKind("crossover", dict[str, list[bool]])

KEPT = 6  # candidates of a length whose losses are measured
GAIN = 0.97  # a candidate that takes more of exact attention's time in a layer is not one
FASTER = 1.02  # a plan whose whole model is not so much faster is exact attention
FLOORS = (0.9, 0.95, 0.98, 0.99, 0.995, 0.999)  # of the table of what other floors would give
FRACTIONS = (0.25, 0.4, 0.55, 0.7, 0.85)  # of a length, where the crossover is looked for
MEASURING = 0.6  # share of a length's time for losses; the rest is for verifying


@dataclass(frozen=True)
class Workers:
    """What measures losses of single layers: this process, or an executor whose workers load the model themselves.

    Everything that measures time runs in this process.

    Attributes:
        elsewhere: in a worker, the losses of an input, from the length, the input's number and the names of the
            candidates in each layer.
    """

    executor: Executor = LOCAL
    elsewhere: Callable[[int, int, dict[int, list[str]]], dict[str, dict[str, float]]] | None = None

    def losses(self, load: PlanInputs, item: int, kept: Mapping[int, list[Candidate]]) -> Callable[[], Any]:
        """What makes the losses of an input."""
        if self.elsewhere is None:
            return partial(single_losses, load, load.items[item], kept)
        names = {number: [c.name for c in tried] for number, tried in kept.items()}
        return partial(self.elsewhere, load.length, item, names)

    @property
    def note(self) -> tuple[str, ...]:
        """What a report says of it."""
        return (
            (f"Losses of single layers were measured by {self.executor.description}.",)
            if self.executor.description
            else ()
        )


UNAIDED = Workers()


@dataclass
class Length:
    """Planning one length."""

    load: PlanInputs
    candidates: Sequence[Candidate]
    floor: float
    shift: float
    cache: JobCache
    progress: Progress
    until: float  # when it should be done, on `time.perf_counter`
    workers: Workers = UNAIDED

    def __post_init__(self) -> None:
        self.begun = time.perf_counter()
        self.by_name = {candidate.name: candidate for candidate in self.candidates}

    @property
    def length(self) -> int:
        """Tokens of an input."""
        return self.load.length

    @property
    def accepted(self) -> float:
        """The loss that is accepted on the text that is planned on."""
        return (1.0 - self.floor) / self.shift

    def plan(self) -> Planned:
        """Measure, choose and verify."""
        self.progress(f"trying all candidates at {self.length:,} tokens", 0, 1)
        screened = self.cache.get(SCREEN.job(self.length, run=partial(screen, self.load, self.candidates)))
        kept = self.kept(screened)
        losses = self.losses(kept)
        planned = Planned(self.length, screened, losses, dict.fromkeys(losses, EXACT), None, [], None)
        if not any(kept.values()):
            planned.why_exact = "no candidate is faster than exact attention in any layer"
            return planned
        self.verify(planned)
        if planned.verified is not None:
            planned.starts = self.starts(planned)
            if self.load.group.count == 1:  # an audit needs all tokens
                chosen = swap_of(planned.chosen, self.by_name)
                job = BASELINE.job(self.length, run=partial(self.usual_errors, chosen))
                planned.baseline = self.cache.get(job)
        planned.floors = self.floors(planned)
        return planned

    def kept(self, screened: Screen) -> dict[int, list[Candidate]]:
        """The candidates of each layer whose losses are measured: those that pay, on the Pareto front."""
        pays: dict[str, list[tuple[float, float]]] = {}
        for layer, errors in screened.errors.items():
            exact = screened.seconds[layer][EXACT]
            for name, error in errors.items():
                if math.isfinite(error) and screened.seconds[layer][name] < GAIN * exact:
                    pays.setdefault(name, []).append((error, screened.seconds[layer][name] / exact))
        errors = {name: statistics.mean(error for error, _ in each) for name, each in pays.items()}
        seconds = {name: statistics.mean(share for _, share in each) for name, each in pays.items()}
        names = pareto(errors, seconds, KEPT)
        return {
            int(layer): [
                c
                for c in self.candidates
                if c.name in names
                and c.name in errors_of_layer
                and screened.seconds[layer][c.name] < GAIN * screened.seconds[layer][EXACT]
            ]
            for layer, errors_of_layer in screened.errors.items()
        }

    def losses(self, kept: Mapping[int, list[Candidate]]) -> dict[int, dict[str, list[float]]]:
        """Losses of single layers, passage by passage, on at least two passages and as many as time allows.

        A candidate with a loss that is not finite is left out.
        """
        by_layer: dict[int, dict[str, list[float]]] = {n: {c.name: [] for c in tried} for n, tried in kept.items()}
        if not any(kept.values()):
            return by_layer
        end = self.begun + MEASURING * (self.until - self.begun)
        jobs = [
            LOSSES.job(self.length, i, run=self.workers.losses(self.load, i, kept)) for i in range(len(self.load.items))
        ]
        results: list[dict[str, dict[str, float]]] = []
        for begin in range(0, len(jobs), self.workers.executor.width):
            batch = jobs[begin : begin + self.workers.executor.width]
            if begin >= 2 and self.past(end) and not all(self.cache.has(job.key) for job in batch):
                break
            progress = partial(self._report, f"losses of single layers at {self.length:,} tokens", begin, len(jobs))
            cached = {
                job.key: each.result for job, each in run_jobs(batch, self.cache, progress, self.workers.executor)
            }
            results += [cached[job.key] for job in batch]
        for result in results:
            for layer, losses in result.items():
                for name, loss in losses.items():
                    by_layer[int(layer)][name].append(loss)
        return {
            n: {name: each for name, each in candidates.items() if all(map(math.isfinite, each))}
            for n, candidates in by_layer.items()
        }

    def past(self, end: float) -> bool:
        """Whether it is later, on the clock of the main process."""
        return self.load.group.broadcast_from_main(lambda: time.perf_counter() > end)

    def _report(self, what: str, begin: int, total: int, job: str, done: int, batch: int) -> None:
        """Report how many of all jobs are done, from how many of those that are under way are."""
        if done < batch:
            self.progress(what, begin + done, total)

    def verify(self, planned: Planned) -> None:
        """Choose and verify until a verification holds; of all choices that were verified the fastest is taken.

        The best uniform choice is verified beside the first one. When the time is out, one last and far more exact
        choice is tried. Exact attention is taken where nothing was verified, or is no slower.
        """
        accepted, confidence = self.accepted, choice.of_round()
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
            verification = self.verification(planned, chosen, number, confidence)
            planned.rounds.append(verification)
            planned.why_exact = (
                f"the last choice has a loss of {verification.loss:.4f} (at most {verification.bound:.4f} at "
                f"confidence {confidence:.4f}) on {held_out} held-out passages, and {accepted:.4f} is accepted"
            )
            if verification.bound <= accepted or last:
                break
            last = self.past(self.until)
            budget = choice.next_budget(budget, accepted, verification.bound) * (0.5 if last else 1.0)
        tried = [*planned.rounds, *([planned.uniform_verified] if planned.uniform_verified else [])]
        held = [verification for verification in tried if verification.bound <= accepted]
        if not held:
            return
        best = max(held, key=lambda verification: verification.speedup)
        if best.speedup < FASTER:
            planned.why_exact = f"the verified plan has {best.speedup:.2f}× the speed of exact attention"
            return
        planned.chosen, planned.verified, planned.why_exact = best.chosen, best, None

    def verification(self, planned: Planned, chosen: dict[int, str], number: int, confidence: float) -> Verified:
        """The plan of a round on the held-out passages, and in the first round the best uniform choice beside it."""
        mixes = {"plan": chosen}
        if number == 0 and planned.uniform is not None:
            mixes["uniform"] = choice.uniform(planned.mean_losses, planned.uniform)
        choices: dict[str, Any] = {EXACT: None} | {name: swap_of(mix, self.by_name) for name, mix in mixes.items()}
        passes = []
        for i, item in enumerate(self.load.held_out):
            self.progress(f"verifying the plan at {self.length:,} tokens", i, len(self.load.held_out))
            run = partial(held_out_pass, self.load, item, choices, seed=i)
            passes.append(self.cache.get(VERIFY.job(self.length, number, _mark(mixes), i, run=run)))
        verified = {
            name: Verified(
                chosen=mix,
                predicted=choice.total(planned.mean_losses, mix),
                losses=[each.losses[name] for each in passes],
                bound=choice.upper_bound([each.losses[name] for each in passes], confidence),
                speedups=[each.seconds[EXACT] / each.seconds[name] for each in passes],
            )
            for name, mix in mixes.items()
        }
        planned.uniform_verified = verified.get("uniform", planned.uniform_verified)
        return verified["plan"]

    def starts(self, planned: Planned) -> dict[str, int]:
        """The length from which on each chosen method is faster than exact attention, at most this one."""
        layer_of = {name: layer for layer, name in planned.chosen.items() if name != EXACT}
        lengths = [max(int(part * self.length), self.load.group.count) for part in FRACTIONS]

        def measured() -> dict[str, list[bool]]:
            with recorded(self.load.model, self.load.group) as calls:
                self.load.run(self.load.items[0])
            inputs = {call.number: call for call in reversed(calls)}
            won: dict[str, list[bool]] = {}
            for name, layer in layer_of.items():
                tried = {name: self.by_name[name].by_layer[layer]}
                won |= faster_at(inputs[layer], tried, lengths, group=self.load.group)
            return won

        self.progress(f"timing inputs shorter than {self.length:,} tokens", 0, 1)
        won = self.cache.get(CROSSOVER.job(self.length, run=measured))
        return {name: choice.crossover(lengths, wins, self.length) for name, wins in won.items()}

    def usual_errors(self, methods: Mapping[int, Any]) -> dict[str, Any]:
        """The baseline of an audit of every call on the held-out passages."""
        with running(self.load.model, methods), audit(self.load.model, tolerance=1e9, every=1) as audited:
            for item in self.load.held_out:
                self.load.run(item)
            return audited.baseline()

    def floors(self, planned: Planned) -> list[dict[str, Any]]:
        """What other floors would give, as predicted from the same figures."""
        rows = []
        for floor in sorted({*FLOORS, self.floor}):
            accepted = (1.0 - floor) / self.shift
            chosen = choice.cheapest(planned.seconds, planned.mean_losses, accepted)
            best = choice.best_uniform(planned.seconds, planned.mean_losses, accepted)
            mix = choice.uniform(planned.mean_losses, best) if best else {}
            rows.append(
                {
                    "floor": floor,
                    "chosen": {str(layer): name for layer, name in chosen.items()},
                    "loss": choice.total(planned.mean_losses, chosen),
                    "speedup": planned.predicted_speedup(chosen),
                    "uniform": best,
                    "uniform_speedup": planned.predicted_speedup(mix) if best else 1.0,
                }
            )
        return rows


def swap_of(chosen: Mapping[int, str], by_name: Mapping[str, Candidate]) -> dict[int, Method | BoundMethod]:
    """What `hf.swap` is given for a choice."""
    return {layer: Full() if name == EXACT else by_name[name].by_layer[layer] for layer, name in chosen.items()}


def _mark(mixes: Mapping[str, Mapping[int, str]]) -> str:
    """A mark of some choices, so that a verification is never taken for that of others."""
    return sha256(repr(sorted((name, sorted(mix.items())) for name, mix in mixes.items())).encode()).hexdigest()[:12]
