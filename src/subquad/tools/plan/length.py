"""Planning one length, in jobs whose results are kept as soon as they are done.

    pass/<length>                           seconds of an exact pass, and of losses
    screen/<length>/<minutes>               times and errors of all candidates in all layers, on the first passage
    effort/<length>/<minutes>               how many candidates are measured, and how many layers at a time
    loss/<length>/<i>/<layers>/<candidate>  the final loss with a candidate in some layers, on the i-th passage
    without/<length>/<i>                    the loss without attention on the i-th passage
    losses/<length>/<minutes>               how many of these losses there was time for
    held-out/<length>/<minutes>             how many held-out passages there is time for
    verify/<length>/<round>/<mark>/<i>      what was chosen in a round on the i-th held-out passage, and exact attention
    steps/<length>/<mark>                   generated tokens after the first passage, exact and with the plan
    crossover/<length>/<mark>               from which length on the chosen methods are faster than exact attention
    baseline/<length>/<mark>                usual errors of the plan's layers on the held-out passages, for audits

Losses of single layers are added up; the plan is the cheapest choice whose sum is under the budget or, of all choices
that are about as fast, the closest one. The first budget is the accepted loss less room for the spread over passages. A
verification on held-out passages gives a bound on the mean loss of the plan; where it is above the accepted loss the
budget shrinks, and at last exact attention is what is left.

How many candidates, passages and rounds there are follows from the time of a pass and the time there is (`effort`).
Each step asks the deadline first, with its predicted time, and leaves time for the least verification. What the clock
decided is kept like a result, so that a run that resumes chooses the same.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Any

from subquad import hf
from subquad.audits import audit
from subquad.hf.plans import joined
from subquad.methods import BoundMethod, Full, Method
from subquad.methods.full import EXACT
from subquad.tools.measure.deadline import Deadline
from subquad.tools.measure.without_attention import WITHOUT as WITHOUT_ATTENTION
from subquad.tools.measure.without_attention import WithoutAttention
from subquad.tools.models.generation import StepTimes, has_exact_steps
from subquad.tools.plan import choice
from subquad.tools.plan.effort import (
    JOB_SECONDS,
    KEPT,
    LEAST_KEPT,
    PASSAGES,
    SCREENING,
    VERIFIED,
    PassCost,
    PlanEffort,
    VerifiedPassages,
    affordable,
    affordable_verification,
    least_seconds,
    spread_out,
)
from subquad.tools.plan.loads import PlanInputs, score_loss
from subquad.tools.plan.measure import (
    Candidate,
    HeldOutPass,
    PassTimes,
    Screen,
    SingleLosses,
    faster_at,
    held_out_pass,
    pass_times,
    screen,
)
from subquad.tools.plan.planner import Messages, OutOfTime, Planner, SingleLoss
from subquad.tools.plan.planning_results import Planned, Verified
from subquad.tools.plan.schema import OtherFloor
from subquad.tools.plan.workers import UNAIDED, Workers
from subquad.tools.runs.cache import JobCache
from subquad.tools.runs.jobs import Job, JobKind, Progress
from subquad.tools.runs.runner import run_jobs

PASS: JobKind[PassTimes] = JobKind("pass", PassTimes)
SCREEN: JobKind[Screen] = JobKind("screen", Screen)
EFFORT: JobKind[PlanEffort] = JobKind("effort", PlanEffort)
LOSS: JobKind[float] = JobKind("loss", float)
WITHOUT: JobKind[HeldOutPass] = JobKind("without", HeldOutPass)
LOSSES: JobKind[int] = JobKind("losses", int)
HELD_OUT: JobKind[VerifiedPassages] = JobKind("held-out", VerifiedPassages)
VERIFY: JobKind[HeldOutPass] = JobKind("verify", HeldOutPass)
BASELINE: JobKind[dict[str, Any]] = JobKind("baseline", dict[str, Any])
STEPS: JobKind[StepTimes] = JobKind("steps", StepTimes)
CROSSOVER: JobKind[dict[str, list[bool]]] = JobKind("crossover", dict[str, list[bool]])

FLOORS = (0.9, 0.95, 0.98, 0.99, 0.995, 0.999)  # of the table of what other floors would give
FRACTIONS = (0.25, 0.4, 0.55, 0.7, 0.85)  # of a length, where the crossover is looked for
CROSSOVER_ROUNDS = (7, 5, 3)  # of timing there: as many as there is time for
PLAN = "plan"
STEPS_COST = 4.0  # exact passes that take as long as the steps of a plan and of exact attention
RECENT = 8  # steps from which it is seen how much slower than predicted the machine is now


MESSAGES = Messages(
    nothing="no method in any layer keeps the floor",
    failed="the last choice has a loss of {loss:.4f} (at most {bound:.4f} at confidence {confidence:.4f}) on {count} "
    "held-out {noun}, and {accepted:.4f} is accepted",
    unclear="the verified plan has {speedup:.2f}× the speed of exact attention with a loss of {loss:.4f}, which is not "
    "a clear gain",
    tied="{tie}, 1.0000{scale}",
    small="the fidelity without any attention is still {fidelity:.4f}, and a tenth of that loss, {accepted:.2g}, is "
    "accepted",
)


@dataclass(frozen=True)
class ShorterLengths:
    """The methods that a plan runs for texts that are no longer than a length."""

    longest: int
    steps: dict[int, dict[int, Method | BoundMethod]]  # by layer: from which length on each method runs

    def with_longer(self, model: Any, methods: Mapping[int, Method | BoundMethod]) -> dict[int, Method | BoundMethod]:
        """The methods of all layers, each text of a batch by its length: these where it is longer."""
        both = {}
        for layer in hf.find_layers(model):
            steps = {**self.steps[layer.number], self.longest + 1: methods.get(layer.number, Full())}
            method, bound = joined(layer, steps)
            both[layer.number] = method if bound is None else bound
        return both


@dataclass
class Length(Planner):
    """Planning one length."""

    messages = MESSAGES

    load: PlanInputs
    candidates: Sequence[Candidate]
    floor: float
    shift: float
    cache: JobCache
    progress: Progress
    minutes: float  # of the whole run: what one with another limit decided by the clock is not taken from it
    workers: Workers = UNAIDED
    shorter: ShorterLengths | None = None  # the methods of shorter texts of a batch

    deadline: Deadline = field(init=False)  # the deadline of `plan`
    cost: PassCost = field(init=False)  # at the pace that was seen
    held_out: VerifiedPassages = field(init=False)

    def __post_init__(self) -> None:
        self.by_name = {candidate.name: candidate for candidate in self.candidates}

    @property
    def noun(self) -> str:
        """The name of the inputs in reports."""
        return self.load.noun

    @property
    def length(self) -> int:
        """Tokens of an input."""
        return self.load.length

    @property
    def accepted(self) -> float:
        """The loss that is accepted on the text that is planned on."""
        return (1.0 - self.floor) / self.shift

    @property
    def may_be_binary(self) -> bool:
        """True of the user's own metric or score alone: a passage without a loss says little there."""
        return self.load.may_be_binary

    def passes(self, deadline: Deadline) -> PassTimes:
        """Times of exact passes and of losses."""
        self.progress(f"timing exact passes at {self.length:,} tokens", 0, 1)
        return self.cache.get(PASS.job(self.length, run=partial(pass_times, self.load, deadline.left)))

    def without_time(self, pass_seconds: float, left: float) -> Planned:
        """Exact attention, because an exact pass takes at least `pass_seconds`, and `left` are left."""
        return _undecided(Planned(self.length), least_seconds(pass_seconds), left)

    def plan(self, deadline: Deadline) -> Planned:
        """Measure, choose and verify."""
        self.deadline, passes = deadline, self.passes(deadline)
        least = least_seconds(passes.seconds, passes.loss_seconds)
        if not self.cache.has(SCREEN(self.length, self.minutes)) and not deadline.allows(least):
            return _undecided(Planned(self.length, passes), least, deadline.left)
        self.progress(f"trying all candidates at {self.length:,} tokens", 0, 1)
        allowed = min(SCREENING * deadline.left, JOB_SECONDS)
        run = partial(screen, self.load, self.candidates, allowed)
        screened = self.cache.get(SCREEN.job(self.length, self.minutes, run=run))
        front = self.kept(screened, self.front(screened, KEPT))
        planned = Planned(self.length, passes, screened, {n: {} for n in front}, dict.fromkeys(front, EXACT))
        if not any(front.values()):
            planned.why_exact = "no candidate is faster than exact attention in any layer"
            return planned
        times = passes.seconds, passes.loss_seconds, passes.single_loss_seconds
        self.cost = PassCost(*times, layers=sum(map(bool, front.values())), chained=self.load.chain() is not None)
        effort = self.effort()
        if effort is None:
            return _undecided(planned, least, deadline.left)
        planned.losses, pace = self.losses(screened, effort)
        self.cost = self.cost.slower(pace)
        if not any(planned.losses.values()):
            return _undecided(planned, least, deadline.left)
        planned.without = self.without_attention()
        self.tell_apart(planned)
        self.held_out = self.cache.get(HELD_OUT.job(self.length, self.minutes, run=self._affordable_verification))
        try:
            self.choose(planned, self.held_out.passages, self.held_out.with_uniform)
        except OutOfTime:
            return _undecided(planned, least, deadline.left)
        planned.left_out = self.left_out(planned, front, effort)
        if planned.verified is not None:
            planned.starts = self.starts(planned)
            if self.load.group.count == 1:  # an audit needs all tokens
                planned.baseline = self.baseline(planned)
            planned.steps = self.steps(planned)
        planned.floors = self.floors(planned)
        return planned

    def effort(self) -> PlanEffort | None:
        """The losses to measure, or those of an interrupted run; None if the time does not suffice for anything."""
        key = EFFORT(self.length, self.minutes)
        if self.cache.has(key):
            return self.cache.read(key, PlanEffort).result
        effort = affordable(self.cost, self.deadline.left)
        return effort and self.cache.get(EFFORT.job(self.length, self.minutes, run=lambda: effort))

    def kept(self, screened: Screen, names: Sequence[str]) -> dict[int, list[Candidate]]:
        """The candidates of each layer with these names, where they pay; of a layer that was not screened, too."""
        return {
            int(layer): [
                self.by_name[name]
                for name in names
                if int(layer) in self.by_name[name].by_layer
                and screened.seconds[layer][name] < choice.GAIN * screened.seconds[layer][EXACT]
            ]
            for layer in screened.errors
        }

    def losses(self, screened: Screen, effort: PlanEffort) -> tuple[dict[int, dict[str, list[float]]], float]:
        """Losses of single layers, as many as time allows; and how many times longer than predicted a pass takes here.

        A few candidates are measured on two passages first, then the others, and then all on further passages. Only
        passages that all candidates have count. A candidate with a loss that is not finite is left out.
        """
        names = self.front(screened, effort.candidates)
        kept, order = self.kept(screened, names), [names[i] for i in spread_out(len(names))]
        at_once = effort.together
        first = [*self.sweep(kept, at_once, order[:LEAST_KEPT]), *self.sweep(kept, at_once, order[LEAST_KEPT:])]
        further = self.sweep(kept, at_once, order, range(PASSAGES, len(self.load.items)))
        measured, pace = self._measured([*first, *further], len(first), effort)
        both = {(each.layers, each.candidate) for each, _ in measured if each.item == PASSAGES - 1}
        if both:
            measured = [pair for pair in measured if (pair[0].layers, pair[0].candidate) in both]
        counts = {item: sum(each.item == item for each, _ in measured) for item in range(len(self.load.items))}
        whole = {item for item, count in counts.items() if count == counts[0]}
        return self.by_layer(kept, (pair for pair in measured if pair[0].item in whole)), pace

    def _measured(
        self, wanted: Sequence[SingleLoss], first: int, effort: PlanEffort
    ) -> tuple[list[tuple[SingleLoss, float]], float]:
        """The losses that there is time for, in order; of the passages after the first ones, only whole ones are begun.

        Also how many times longer than predicted a pass takes in this process alone. Workers that share its processors
        take about as many times longer as there are workers, which does not count.
        """
        passes, width = SingleLosses(self.load), self.workers.executor.width
        cost, deadline = self.cost, self.deadline
        ended = LOSSES(self.length, self.minutes)
        is_ended = self.cache.has(ended)
        if is_ended:
            wanted = wanted[: self.cache.read(ended, int).result]
        jobs = [
            LOSS.job(
                *(self.length, each.item, "+".join(map(str, each.layers)), each.candidate),
                run=self.workers.single_loss(passes, each.item, self.by_name[each.candidate], each.layers),
            )
            for each in wanted
        ]
        left = deadline.left
        reserve, paces = left - cost.for_losses(left), [1.0]
        measured: list[tuple[SingleLoss, float]] = []
        for begin in range(0, len(jobs), width):
            chosen, batch = wanted[begin : begin + width], jobs[begin : begin + width]
            is_new = begin == 0 or any(each.item != wanted[begin - 1].item for each in chosen)
            step = max(cost.of_single(each.position) for each in chosen)
            before = deadline.left
            is_measured = not is_ended and not all(self.cache.has(job.key) for job in batch)
            if is_measured:
                pace = statistics.median(paces[-RECENT:])
                predicted = step
                if is_new and begin >= first:
                    predicted = effort.seconds / width  # of a whole passage
                elif is_new:
                    predicted += cost.seconds + cost.single_loss_seconds  # exact attention
                if not deadline.allows(pace * predicted, max(reserve, max(pace / width, 1.0) * cost.reserve)):
                    break
            measured += zip(chosen, self._run(batch, begin, len(jobs)), strict=True)
            if is_measured and not is_new:
                paces.append((before - deadline.left) / max(step, 1e-9))
        if measured:
            self.cache.get(LOSSES.job(self.length, self.minutes, run=lambda: len(measured)))
        return measured, max(statistics.median(paces[-RECENT:]) / width, 1.0)

    def _run(self, batch: Sequence[Job[float]], begin: int, total: int) -> list[float]:
        """The results of some jobs, in their order."""
        progress = partial(self._report, f"losses of single layers at {self.length:,} tokens", begin, total)
        results = {job.key: each.result for job, each in run_jobs(batch, self.cache, progress, self.workers.executor)}
        return [results[job.key] for job in batch]

    def _report(self, what: str, begin: int, total: int, job: str, done: int, batch: int) -> None:
        """Report how many of all jobs are done, from how many of those that are under way are."""
        if done < batch:
            self.progress(what, begin + done, total)

    def without_attention(self) -> float | None:
        """The mean loss of outputs without attention, on the passages that all losses have.

        None if time is short, of a score, whose single values show little, and over ranks, where exact attention has
        ways of its own.
        """
        if self.load.loss is score_loss or self.load.group.count > 1:
            return None
        nothing = dict.fromkeys((layer.number for layer in hf.find_layers(self.load.model)), WithoutAttention())
        losses = []
        for i, item in enumerate(self.load.items[:PASSAGES]):
            choices = {EXACT: None, WITHOUT_ATTENTION: nothing}
            job = WITHOUT.job(self.length, i, run=partial(held_out_pass, self.load, item, choices, seed=i))
            if not self.cache.has(job.key) and not self.deadline.allows(
                self.cost.of_verification(1, 2), self.cost.reserve
            ):
                return None
            losses.append(self.cache.get(job).losses[WITHOUT_ATTENTION])
        return statistics.mean(losses)

    def _affordable_verification(self) -> VerifiedPassages:
        return affordable_verification(self.cost, self.deadline.left, len(self.load.held_out))

    def share_of_next(self, last: Verified) -> float:
        """Half of the budget for the last round that there is time for, which is then far more exact."""
        a_round = self.cost.of_verification(len(last.losses), 2)
        return 1.0 if self.deadline.allows(2 * a_round, self.cost.afterwards) else 0.5

    def served(self, mix: Mapping[int, str]) -> dict[int, Method | BoundMethod]:
        """The methods that run if the plan has this choice: shorter texts of a batch run those of their own length."""
        methods = swap_of(mix, self.by_name)
        return methods if self.shorter is None else self.shorter.with_longer(self.load.model, methods)

    def _mark_of(self, mixes: Mapping[str, Mapping[int, str]]) -> str:
        """A mark of some choices, and of what runs for shorter texts."""
        listed: list[Any] = sorted((name, sorted(mix.items())) for name, mix in mixes.items())
        if self.shorter is not None:
            listed += [(n, start, str(m)) for n, steps in self.shorter.steps.items() for start, m in steps.items()]
        return _mark(listed)

    def verified_on(self, count: int) -> dict[int, Any]:
        """Some held-out passages by number, of which the first few are spread over all."""
        return {i: self.load.held_out[i] for i in spread_out(len(self.load.held_out))[:count]}

    def verification(self, planned: Planned, mixes: Mapping[str, dict[int, str]], number: int) -> dict[str, Verified]:
        """Choices on the held-out passages; a round that takes longer than predicted ends after three or more.

        Raises:
            OutOfTime: there is no time for three.
        """
        on, cost, deadline = self.held_out, self.cost, self.deadline
        choices: dict[str, Any] = {EXACT: None} | {name: self.served(mix) for name, mix in mixes.items()}
        mark, passes = self._mark_of(mixes), []
        step, least = cost.of_verification(1, len(choices)), min(VERIFIED, on.passages)
        for done, (i, item) in enumerate(self.verified_on(on.passages).items()):
            self.progress(f"verifying the plan at {self.length:,} tokens", done, on.passages)
            job = VERIFY.job(
                *(self.length, number, mark, i), run=partial(held_out_pass, self.load, item, choices, seed=i)
            )
            if not self.cache.has(job.key):
                if done >= least and not deadline.allows(step, cost.afterwards):
                    break
                before = deadline.left
                needed = (least - done) * step if number and done < least else step
                if done < least and not deadline.allows_late(needed):
                    raise OutOfTime
                self.cache.get(job)
                step = max(step, before - deadline.left)
            passes.append(self.cache.get(job))
        confidence = choice.of_round()
        return {
            name: Verified(
                chosen=mix,
                predicted=choice.total(planned.mean_losses, mix),
                losses=[each.losses[name] for each in passes],
                bound=choice.upper_bound([each.losses[name] for each in passes], confidence, binary=self.may_be_binary),
                speedups=[each.seconds[EXACT] / each.seconds[name] for each in passes],
            )
            for name, mix in mixes.items()
        }

    def starts(self, planned: Planned) -> dict[str, int]:
        """The length from which on each chosen method is faster than exact attention, at most this one.

        This one if there is no time to measure it.
        """
        layer_of = {name: layer for layer, name in planned.chosen.items() if name != EXACT}
        lengths = [max(int(part * self.length), self.load.group.count) for part in FRACTIONS]
        a_round = sum(FRACTIONS) * sum(
            planned.seconds[layer][EXACT] + planned.seconds[layer][name] for name, layer in layer_of.items()
        )
        reserve = PASSAGES * self.cost.seconds if self.load.group.count == 1 else 0.0  # for the baseline
        left = min(self.deadline.left - reserve, JOB_SECONDS) - self.cost.seconds
        rounds = next((rounds for rounds in CROSSOVER_ROUNDS if (rounds + 1) * a_round <= left), 0)

        def measured() -> dict[str, list[bool]]:
            with self.load.recorded() as calls:
                self.load.run(self.load.items[0])
            inputs = {call.number: call for call in reversed(calls)}
            won: dict[str, list[bool]] = {}
            for name, layer in layer_of.items():
                tried = {name: self.by_name[name].by_layer[layer]}
                won |= faster_at(inputs[layer], tried, lengths, rounds, group=self.load.group)
            return won

        job = CROSSOVER.job(self.length, self._mark_of({PLAN: planned.chosen}), run=measured)
        if not rounds and not self.cache.has(job.key):
            planned.left_out.append("no timing of shorter inputs, which run exact attention")
            return {}
        self.progress(f"timing inputs shorter than {self.length:,} tokens", 0, 1)
        won = self.cache.get(job)
        return {name: choice.crossover(lengths, wins, self.length) for name, wins in won.items()}

    def baseline(self, planned: Planned) -> dict[str, Any] | None:
        """The usual errors of the plan's layers on the held-out passages that time allows; None if not even on two."""
        passages = int(min(self.deadline.left, JOB_SECONDS) / max(self.cost.seconds, 1e-9))
        items = list(self.verified_on(min(max(passages, PASSAGES), self.held_out.passages)).values())
        run = partial(self.usual_errors, self.served(planned.chosen), items)
        job = BASELINE.job(self.length, self._mark_of({PLAN: planned.chosen}), run=run)
        if not self.cache.has(job.key) and not self.deadline.allows_late(PASSAGES * self.cost.seconds):
            planned.left_out.append("no baseline for audits")
            return None
        return self.cache.get(job)

    def steps(self, planned: Planned) -> StepTimes | None:
        """Generated tokens after the first passage, with exact attention and with the plan; None if not timed."""
        if self.load.steps is None:
            return None
        served = self.served(planned.chosen)
        planned.has_exact_steps = all(map(has_exact_steps, served.values()))
        choices: dict[str, Any] = {EXACT: None, PLAN: served}
        run = partial(self.load.steps, self.load.items[0], choices)
        job = STEPS.job(self.length, self._mark_of({PLAN: planned.chosen}), run=run)
        if not self.cache.has(job.key) and not self.deadline.allows_late(STEPS_COST * self.cost.seconds):
            planned.left_out.append("no times of generated tokens")
            return None
        self.progress(f"timing generated tokens after {self.length:,} tokens", 0, 1)
        return self.cache.get(job)

    def usual_errors(self, methods: Mapping[int, Any], items: Sequence[Any]) -> dict[str, Any]:
        """The baseline of an audit of every call on some passages."""
        inside = hf.transformers_model(self.load.model).base_model  # without a head, whose output would be audited too
        with self.load.running(methods), audit(inside, tolerance=1e9, every=1) as audited:
            for item in items:
                self.load.run(item)
            return audited.baseline()

    def left_out(self, planned: Planned, front: Mapping[int, list[Candidate]], effort: PlanEffort) -> list[str]:
        """The measurements that were cut short or left out for lack of time."""
        on_front = len({c.name for tried in front.values() for c in tried})
        measured = len({name for by_name in planned.losses.values() for name in by_name})
        screened = sum(map(bool, planned.screen.errors.values()))
        passages = max((len(each) for by_name in planned.losses.values() for each in by_name.values()), default=0)
        verified = max((len(each.losses) for each in planned.rounds), default=self.held_out.passages)
        parts = [
            f"errors of {screened} of {len(planned.screen.errors)} layers" * (screened < len(front)),
            f"losses of {measured} of {on_front} candidates" * (measured < on_front),
            f"losses of {effort.together} layers at a time" * (effort.together > 1),
            f"losses on one of the {self.load.noun}" * (passages < PASSAGES),
            f"a verification on {verified} of {len(self.load.held_out)} held-out {self.load.noun}"
            * (verified < len(self.load.held_out)),
            "no verification of the best single method"
            * (planned.uniform is not None and not self.held_out.with_uniform),
        ]
        return [part for part in parts if part]

    def floors(self, planned: Planned) -> list[OtherFloor]:
        """The choices that several floors would give, as predicted from the same figures."""
        rows = []
        assert planned.passes is not None
        for floor in sorted({*FLOORS, self.floor}):
            accepted = (1.0 - floor) / self.shift
            chosen = choice.closest(planned.seconds, planned.mean_losses, accepted, planned.passes.seconds)
            best = choice.best_uniform(planned.seconds, planned.mean_losses, accepted)
            mix = choice.uniform(planned.mean_losses, best) if best else {}
            rows.append(
                OtherFloor(
                    floor=floor,
                    chosen={str(layer): name for layer, name in chosen.items()},
                    loss=choice.total(planned.mean_losses, chosen),
                    speedup=planned.predicted_speedup(chosen),
                    uniform=best,
                    uniform_speedup=planned.predicted_speedup(mix) if best else 1.0,
                )
            )
        return rows


def swap_of(chosen: Mapping[int, str], by_name: Mapping[str, Candidate]) -> dict[int, Method | BoundMethod]:
    """The methods of a choice by layer, as `hf.swap` takes them."""
    return {layer: Full() if name == EXACT else by_name[name].by_layer[layer] for layer, name in chosen.items()}


def _undecided(planned: Planned, seconds: float, left: float) -> Planned:
    """Exact attention, because the least that decides anything takes these seconds, of which `left` were left."""
    planned.least_seconds = seconds
    planned.why_exact = (
        f"nothing was decided: measuring and verifying takes about {seconds:.3g} s at least, of which "
        f"{max(left, 0):.3g} were left; give more --minutes"
    )
    return planned


def _mark(choices: Any) -> str:
    """A mark of what is measured, so that a result is never taken for that of something else."""
    return sha256(repr(choices).encode()).hexdigest()[:12]
