"""Planning one length, in units that are kept as soon as they are done.

    screen/<length>                     times and errors of all candidates in all layers, on the first passage
    losses/<length>/<mark>/<i>          the final loss with one candidate in one layer, on the i-th passage
    verify/<length>/<round>/<mark>/<i>  what was chosen in a round on the i-th held-out passage, beside exact attention
    crossover/<length>                  from which length on the chosen methods are faster than exact attention
    baseline/<length>                   usual errors of the plan's layers on the held-out passages, for audits

Losses of single layers are added up; the plan is the cheapest choice whose sum is under the budget. The first budget is
the accepted loss less room for the spread over passages. A verification on held-out passages gives a bound on the mean
loss of the plan; where it is above the accepted loss the budget shrinks, and at last exact attention is what is left.

How many candidates, passages and rounds there are follows from the time of a pass and the time there is (`effort`).
"""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any

from subquad import hf
from subquad.audits import audit
from subquad.core.spelling import listed
from subquad.methods import BoundMethod, Full, Method
from subquad.tools.measure.capture import recorded
from subquad.tools.measure.prefix import chain
from subquad.tools.models.pretrained import running
from subquad.tools.plan import choice
from subquad.tools.plan.effort import (
    AFTERWARDS,
    KEPT,
    MEASURING,
    PASSAGES,
    SCREENING,
    PassCost,
    PlanEffort,
    affordable,
    verified_passages,
)
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
)
from subquad.tools.plan.planned import Planned, Verified
from subquad.tools.plan.workers import UNAIDED, Workers
from subquad.tools.runs.cache import JobCache
from subquad.tools.runs.jobs import JobKind, Progress
from subquad.tools.runs.runner import run_jobs

SCREEN: JobKind[Screen] = JobKind("screen", Screen)
LOSSES: JobKind[dict[str, dict[str, float]]] = JobKind("losses", dict[str, dict[str, float]])
VERIFY: JobKind[HeldOutPass] = JobKind("verify", HeldOutPass)
BASELINE: JobKind[dict[str, Any]] = JobKind("baseline", dict[str, Any])
CROSSOVER: JobKind[dict[str, list[bool]]] = JobKind("crossover", dict[str, list[bool]])

GAIN = 0.97  # a candidate that takes more of exact attention's time in a layer is not one
FASTER = 1.02  # a plan whose whole model is not so much faster is exact attention
FLOORS = (0.9, 0.95, 0.98, 0.99, 0.995, 0.999)  # of the table of what other floors would give
FRACTIONS = (0.25, 0.4, 0.55, 0.7, 0.85)  # of a length, where the crossover is looked for


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
    seconds: float  # that it may take: what is measured follows from it, so that a run that resumes measures the same
    workers: Workers = UNAIDED

    def __post_init__(self) -> None:
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
        run = partial(screen, self.load, self.candidates, SCREENING * self.seconds)
        screened = self.cache.get(SCREEN.job(self.length, run=run))
        front = self.kept(screened, KEPT)
        planned = Planned(self.length, screened, {n: {} for n in front}, dict.fromkeys(front, EXACT), None, [], None)
        if not any(front.values()):
            planned.why_exact = "no candidate is faster than exact attention in any layer"
            return planned
        blocks = chain(self.load.model, hf.find_layers(self.load.model))
        layers = sum(map(bool, front.values()))
        cost = PassCost(screened.model_seconds, screened.loss_seconds, layers, blocks is not None)
        left = self.seconds - screened.spent
        effort = affordable(cost, left)
        if effort is None:
            planned.why_exact = (
                f"measuring and verifying takes about {cost.of_minimum:.3g} s at least, of which {max(left, 0):.3g} "
                "were left; give more --minutes"
            )
            return planned
        planned.losses = self.losses(self.kept(screened, effort.candidates), effort)
        held_out = self.verify(planned, cost)
        if planned.verified is not None:
            planned.starts = self.starts(planned)
            if self.load.group.count == 1:  # an audit needs all tokens
                planned.baseline = self.baseline(planned, cost, held_out)
        planned.floors = self.floors(planned)
        planned.left_out = self.left_out(planned, front, effort, held_out)
        return planned

    def kept(self, screened: Screen, most: int) -> dict[int, list[Candidate]]:
        """The candidates of each layer whose losses are measured: those that pay, at most `most` of the Pareto front.

        Of a layer that was not screened, all that pay.
        """
        pays: dict[str, list[tuple[float, float]]] = {}
        for layer, errors in screened.errors.items():
            exact = screened.seconds[layer][EXACT]
            for name, error in errors.items():
                if math.isfinite(error) and screened.seconds[layer][name] < GAIN * exact:
                    pays.setdefault(name, []).append((error, screened.seconds[layer][name] / exact))
        errors = {name: statistics.mean(error for error, _ in each) for name, each in pays.items()}
        seconds = {name: statistics.mean(share for _, share in each) for name, each in pays.items()}
        names = pareto(errors, seconds, most)
        return {
            int(layer): [
                c
                for c in self.candidates
                if c.name in names
                and int(layer) in c.by_layer
                and screened.seconds[layer][c.name] < GAIN * screened.seconds[layer][EXACT]
            ]
            for layer in screened.errors
        }

    def losses(self, kept: Mapping[int, list[Candidate]], effort: PlanEffort) -> dict[int, dict[str, list[float]]]:
        """Losses of single layers, passage by passage, on as many passages as time allows.

        These are two or more, unless the first one took all the time.

        A candidate with a loss that is not finite is left out.
        """
        by_layer: dict[int, dict[str, list[float]]] = {n: {c.name: [] for c in tried} for n, tried in kept.items()}
        begun = time.perf_counter()
        end = begun + MEASURING * (self.until - begun)
        mark = _mark([effort.together, *((n, [c.name for c in tried]) for n, tried in sorted(kept.items()))])
        jobs = [
            LOSSES.job(self.length, mark, i, run=self.workers.losses(self.load, i, kept, effort.together))
            for i in range(len(self.load.items))
        ]
        results: list[dict[str, dict[str, float]]] = []
        for begin in range(0, len(jobs), self.workers.executor.width):
            batch = jobs[begin : begin + self.workers.executor.width]
            late = self.past(end if begin < PASSAGES else end - effort.seconds)
            if begin > 0 and late and not all(self.cache.has(job.key) for job in batch):
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

    def verify(self, planned: Planned, cost: PassCost) -> dict[int, Any]:
        """Choose and verify until a verification holds; of all choices that were verified the fastest is taken.

        The best uniform choice is verified beside the first one. What is chosen when the time suffices for no further
        round is far more exact. Exact attention is taken where nothing was verified, or is no slower.

        Returns:
            The held-out passages that were used, by number.
        """
        accepted, confidence = self.accepted, choice.of_round()
        held_out = self.held_out(cost)
        budget = choice.with_room(planned.seconds, planned.losses, accepted, confidence, len(held_out))
        planned.uniform = choice.best_uniform(planned.seconds, planned.mean_losses, accepted)
        a_round = cost.of_verification(len(held_out), 2)
        for number in range(choice.ROUNDS):
            chosen = choice.cheapest(planned.seconds, planned.mean_losses, budget)
            if all(name == EXACT for name in chosen.values()):
                planned.why_exact = "no method in any layer keeps the floor"
                break
            if planned.predicted_speedup(chosen) < FASTER:
                planned.why_exact = "what the floor allows is no faster than exact attention"
                break
            verification = self.verification(planned, chosen, number, confidence, held_out)
            planned.rounds.append(verification)
            planned.why_exact = (
                f"the last choice has a loss of {verification.loss:.4f} (at most {verification.bound:.4f} at "
                f"confidence {confidence:.4f}) on {len(held_out)} held-out passages, and {accepted:.4f} is accepted"
            )
            if verification.bound <= accepted:
                break
            end = self.until - AFTERWARDS * cost.seconds
            if self.past(end - a_round):
                planned.why_exact += "; there was no time for another choice"
                break
            last = self.past(end - 2 * a_round)
            budget = choice.next_budget(budget, accepted, verification.bound) * (0.5 if last else 1.0)
        self._take_best(planned)
        return held_out

    def held_out(self, cost: PassCost) -> dict[int, Any]:
        """The held-out passages that time allows, by number, evenly spread."""
        items = self.load.held_out
        left = self.load.group.broadcast_from_main(lambda: self.until - time.perf_counter())
        count = verified_passages(cost, left, len(items))
        numbers = [i * len(items) // count for i in range(count)]
        return {i: items[i] for i in numbers}

    def _take_best(self, planned: Planned) -> None:
        tried = [*planned.rounds, *([planned.uniform_verified] if planned.uniform_verified else [])]
        held = [verification for verification in tried if verification.bound <= self.accepted]
        if not held:
            return
        best = max(held, key=lambda verification: verification.speedup)
        if best.speedup < FASTER:
            planned.why_exact = f"the verified plan has {best.speedup:.2f}× the speed of exact attention"
            return
        planned.chosen, planned.verified, planned.why_exact = best.chosen, best, None

    def verification(
        self, planned: Planned, chosen: dict[int, str], number: int, confidence: float, held_out: Mapping[int, Any]
    ) -> Verified:
        """The plan of a round on the held-out passages, and in the first round the best uniform choice beside it."""
        mixes = {"plan": chosen}
        if number == 0 and planned.uniform is not None:
            mixes["uniform"] = choice.uniform(planned.mean_losses, planned.uniform)
        choices: dict[str, Any] = {EXACT: None} | {name: swap_of(mix, self.by_name) for name, mix in mixes.items()}
        mark, passes = _mark(sorted((name, sorted(mix.items())) for name, mix in mixes.items())), []
        for done, (i, item) in enumerate(held_out.items()):
            self.progress(f"verifying the plan at {self.length:,} tokens", done, len(held_out))
            run = partial(held_out_pass, self.load, item, choices, seed=i)
            passes.append(self.cache.get(VERIFY.job(self.length, number, mark, i, run=run)))
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
        """The length from which on each chosen method is faster than exact attention, at most this one.

        This one where no time is left.
        """
        if self.past(self.until):
            return {}
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

    def baseline(self, planned: Planned, cost: PassCost, held_out: Mapping[int, Any]) -> dict[str, Any]:
        """The usual errors of the plan's layers on the held-out passages, or on two of them where no time is left."""
        left = self.load.group.broadcast_from_main(lambda: self.until - time.perf_counter())
        items = list(held_out.values())[: max(int(left / max(cost.seconds, 1e-9)), PASSAGES)]
        run = partial(self.usual_errors, swap_of(planned.chosen, self.by_name), items)
        return self.cache.get(BASELINE.job(self.length, run=run))

    def usual_errors(self, methods: Mapping[int, Any], items: Sequence[Any]) -> dict[str, Any]:
        """The baseline of an audit of every call on some passages."""
        with running(self.load.model, methods), audit(self.load.model, tolerance=1e9, every=1) as audited:
            for item in items:
                self.load.run(item)
            return audited.baseline()

    def left_out(
        self, planned: Planned, front: Mapping[int, list[Candidate]], effort: PlanEffort, held_out: Mapping[int, Any]
    ) -> str | None:
        """What the time did not suffice for, in a sentence; None where it sufficed."""
        on_front = len({c.name for tried in front.values() for c in tried})
        measured = len({name for by_name in planned.losses.values() for name in by_name})
        screened = sum(map(bool, planned.screen.errors.values()))
        passages = max((len(each) for by_name in planned.losses.values() for each in by_name.values()), default=0)
        parts = [
            f"errors of {screened} of {len(planned.screen.errors)} layers" * (screened < len(front)),
            f"losses of {measured} of {on_front} candidates" * (effort.candidates < on_front),
            f"losses of {effort.together} layers at a time" * (effort.together > 1),
            "losses on one passage" * (passages < PASSAGES),
            f"a verification on {len(held_out)} of {len(self.load.held_out)} held-out passages"
            * (len(held_out) < len(self.load.held_out)),
        ]
        if not any(parts):
            return None
        return f"the time sufficed for {listed([part for part in parts if part])}; more --minutes measure more"

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


def _mark(choices: Any) -> str:
    """A mark of what is measured, so that a result is never taken for that of something else."""
    return sha256(repr(choices).encode()).hexdigest()[:12]
