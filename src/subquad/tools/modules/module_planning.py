"""`sq.plan` on a module without a transformers model: the planner of tools/plan, with the module as its subject."""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from subquad.core.errors import InputError
from subquad.core.spelling import listed
from subquad.methods import Full, Method
from subquad.methods.full import EXACT
from subquad.nn import describe
from subquad.nn.swapping import NAME
from subquad.tools.measure.capture import LayerInputs
from subquad.tools.measure.deadline import Deadline
from subquad.tools.measure.fidelity import relative_error
from subquad.tools.measure.group import ALONE
from subquad.tools.measure.metrics import Judge
from subquad.tools.measure.module_calls import ModuleCall, device_of, run_exactly, spread_order
from subquad.tools.measure.noise import AGAIN, against_itself
from subquad.tools.measure.timing import Cost, cost, one_round, ratios, stopwatch
from subquad.tools.measure.tradeoff import EQUAL, SIMILAR
from subquad.tools.measure.without_attention import WithoutAttention
from subquad.tools.modules.attention_sites import ModuleLayers, attention_sites
from subquad.tools.modules.inputs import check_minutes, check_module, grouped, methods_of
from subquad.tools.modules.planned import HeldOutResult, ModulePlan
from subquad.tools.modules.unchanged import unchanged
from subquad.tools.plan import choice
from subquad.tools.plan.arguments import check_unlearned
from subquad.tools.plan.effort import KEPT, MEASURING, MOST, PASSAGES, divided
from subquad.tools.plan.grid import grid
from subquad.tools.plan.measure import Candidate, PassTimes, Screen, SingleLosses, call_shape, call_times
from subquad.tools.plan.planner import Messages, Planner
from subquad.tools.plan.planning_results import Planned, Verified
from subquad.tools.plan.subject import PlanSubject
from subquad.tools.runs.jobs import Progress
from subquad.tools.runs.records import to_plain

FEWEST = 4  # inputs
SCREENING = 0.25  # share of the time until layers are screened
CALL_SECONDS = 0.3  # share of the rounds of a call of a layer
LEAST_VERIFIED = 2  # held-out inputs, however long they take
VERIFYING_ROUNDS = 9  # timings of a choice, if time allows


def plan_module(
    module: nn.Module,
    calls: Sequence[ModuleCall],
    judge: Judge,
    methods: str | Method | Sequence[str | Method] | None,
    minutes: float,
    progress: Progress,
) -> ModulePlan:
    """A plan for a module that contains no transformers model."""
    check_module(module)
    tried = None if methods is None else methods_of(methods)
    check_minutes(minutes)
    check_unlearned(tried or [])
    if len(calls) < FEWEST:
        raise InputError(
            f"there are {len(calls)} inputs, but a plan needs {FEWEST}: two to measure losses on and two to verify it"
        )
    deadline, screening = Deadline(60 * minutes), Deadline(SCREENING * 60 * minutes)
    with unchanged(module):
        run_exactly(calls[0], module)
        sites = attention_sites(module, calls[0])
        if not isinstance(sites, ModuleLayers):
            raise InputError(
                f"{type(module).__name__} has no layers that sq.nn.swap takes: its attention is calls of "
                "scaled_dot_product_attention, which sq.intercept runs by one method; use sq.compare to choose it"
            )
        by_length, _ = grouped(sites, calls, SCREENING * 60 * minutes / 2, lengths=None)
        planning = ModulePlanning(sites, judge, deadline, progress)
        return planning.run(by_length, tried if tried is not None else grid(max(by_length)), len(calls), screening)


class JudgedOutput:
    """An output for an input, and what the judge says of it as the exact one."""

    def __init__(self, output: Any, call: ModuleCall, judge: Judge):
        self.output, self.call, self.judge = output, call, judge

    @cached_property
    def reference(self) -> float:
        """Its own value, if it is the exact output."""
        return self.judge.value(self.output, self.output, self.call)


@dataclass(frozen=True)
class ModuleSubject(PlanSubject):
    """A module as a plan's subject: its layers by number, and how outputs are judged."""

    sites: ModuleLayers
    judge: Judge
    length: int
    items: Sequence[ModuleCall]
    names: Sequence[str]  # the names of layers that can run a method at all
    no_gradients = torch.no_grad  # and not inference mode, in which a module cannot compute gradients inside
    refusals = (ValueError, TypeError)  # of a method, for an input that it does not take

    @property
    def device(self) -> torch.device:
        """The device of the module."""
        return device_of(self.sites.module)

    def run(self, item: ModuleCall) -> JudgedOutput:
        """The output for an input."""
        return JudgedOutput(item.run(self.sites.module), item, self.judge)

    def loss(self, output: JudgedOutput, exact: JudgedOutput) -> float:
        """The value of the exact output minus that of this one."""
        return exact.reference - self.judge.value(output.output, exact.output, exact.call)

    @contextmanager
    def recorded(self) -> Iterator[list[LayerInputs]]:
        """Collect the inputs of the first call of each layer inside, with exact attention by subquad."""
        calls: list[LayerInputs] = []

        def hook(number: int, part: nn.Module, args: tuple[Tensor, Tensor, Tensor], options: dict[str, Any]) -> None:
            if all(inputs.number != number for inputs in calls):
                calls.append(LayerInputs(number, self.names[number], *args, dict(options)))

        with self.running(dict.fromkeys(range(len(self.names)), Full())), ExitStack() as stack:
            for number, name in enumerate(self.names):
                bound = self.sites.module.get_submodule(f"{name}.{NAME}".lstrip("."))
                stack.callback(bound.register_forward_pre_hook(partial(hook, number), with_kwargs=True).remove)
            yield calls

    def running(self, methods: Any) -> AbstractContextManager[None]:
        """Run methods in the layers with these numbers; the others, or with `EXACT` all, have their own attention."""
        return self.sites.running({} if methods == EXACT else {self.names[n]: method for n, method in methods.items()})


@dataclass
class VerifiedInModule(Verified):
    """A choice on the held-out inputs, with the value of the exact outputs there and its times."""

    exact: float = 1.0
    cost: Cost | None = None


MESSAGES = Messages(
    nothing="no method in any layer is faster and keeps the fidelity",
    failed="the last choice has a mean loss of {loss:.4f} (at most {bound:.4f} at the confidence of a round) on "
    "{count} held-out {noun}, and {accepted:.4f} is accepted",
    unclear="{speedup:.2f}× the speed of the module's own attention is not clearly faster",
    tied="These inputs do not tell methods apart: {tie}; use trained weights, or a metric that shows the difference.",
    small="Without any attention the loss is only {without:.4f}, so a tenth of that is accepted; use trained weights, "
    "or a metric that shows more.",
)


class ModulePlanning(Planner):
    """One plan under way."""

    messages, noun, verifies_any_gain, keeps_failure = MESSAGES, "inputs", True, True
    accepted = 0.0

    def __init__(self, sites: ModuleLayers, judge: Judge, deadline: Deadline, progress: Progress):
        self.sites, self.judge, self.deadline, self.progress = sites, judge, deadline, progress
        self.device = device_of(sites.module)
        self.notes: list[str] = []

    @property
    def may_be_binary(self) -> bool:
        """True if the user's own metric or score judges outputs."""
        return self.judge.may_be_binary

    def run(
        self, by_length: Mapping[int, list[ModuleCall]], methods: Sequence[Method], inputs: int, screening: Deadline
    ) -> ModulePlan:
        """Screen the methods, measure losses, choose and verify."""
        # In the order of lengths, so that neighbours go to both.
        parts = divided([call for calls in by_length.values() for call in calls], MOST)
        items, self.held_out = map(spread_order, parts)
        references = [self.judge.reference(run_exactly(call, self.sites.module), call) for call in items]
        self.accepted = self.judge.accepted_loss(references)
        self.subject = ModuleSubject(self.sites, self.judge, max(by_length), items, self.sites.exact_able)
        longest = by_length[max(by_length)][0]
        screened = self.screen(longest, methods, screening)
        kept = {
            int(n): [self.by_name[name] for name in self.front(replace(screened, errors={n: errors}), KEPT)]
            for n, errors in screened.errors.items()
        }
        passes = PassTimes(min(self._pass_seconds(longest) for _ in range(2)), 0.0, 0.0)  # as the layers' times
        planned = Planned(self.subject.length, passes, screened, chosen=dict.fromkeys(kept, EXACT))
        losses = SingleLosses(self.subject)
        planned.losses = self.losses(losses, kept, sum(map(self._pass_seconds, items[:PASSAGES])))
        if not self.judge.is_score:
            planned.without = losses.loss(0, dict.fromkeys(kept, WithoutAttention()))
        self.tell_apart(planned)
        if planned.unproven is not None:
            self.notes.insert(0, planned.unproven)
        verified = self.choose(planned, len(self.held_out))
        used = len(items) + len(self.held_out if verified is None else verified.losses)
        if used < inputs:
            self.notes.append(f"The time sufficed for {used} of {inputs} inputs; more minutes measure more.")
        return self._plan(planned, verified)

    def _pass_seconds(self, call: ModuleCall) -> float:
        """Seconds of a pass with the module's own attention."""
        return stopwatch(partial(call.run, self.sites.module), self.device)[0]

    @torch.no_grad()
    def screen(self, call: ModuleCall, methods: Sequence[Method], deadline: Deadline) -> Screen:
        """Seconds and errors of the methods in each layer on its own inputs; those become candidates that run there."""
        with self.subject.recorded() as layers:
            call.run(self.sites.module)
        screened = Screen({}, {})
        self.by_name = {str(method): Candidate(str(method), {}) for method in methods}
        self.candidates = list(self.by_name.values())
        assigned = {method: self.sites.assign(method).methods or () for method in methods}
        timed: dict[Any, dict[str, float]] = {}
        for inputs in sorted(layers, key=lambda inputs: inputs.number):
            number = inputs.number
            self.progress("timing methods in layers", number, len(self.subject.names))
            exact, errors = inputs.run(Full()), dict[str, float]()
            for method in methods:
                if inputs.name in assigned[method] and math.isfinite(error := _error(inputs, method, exact)):
                    errors[str(method)] = error
                    self.by_name[str(method)].by_layer[number] = method
            key = call_shape(inputs), tuple(errors)
            if key not in timed:
                allowed = max(min(CALL_SECONDS * (len(errors) + 1), deadline.left), 0.0)
                able = {name: self.by_name[name].by_layer[number] for name in errors}
                timed[key] = call_times(inputs, able, ALONE, allowed)
            screened.seconds[str(number)], screened.errors[str(number)] = timed[key], errors
        return screened

    def losses(
        self, passes: SingleLosses, kept: Mapping[int, Sequence[Candidate]], first_seconds: float
    ) -> dict[int, dict[str, list[float]]]:
        """Losses of the output with one method in one layer, input by input; passes of the first two take some seconds.

        If that takes too long, neighbouring layers have theirs measured together, and an equal share each.
        """
        items, deadline = passes.load.items, self.deadline.part(MEASURING)
        together = self._together(kept, first_seconds / max(deadline.left, 1e-9))
        names = [candidate.name for candidate in self.candidates]
        measured = []
        for item in range(len(items)):
            begun = deadline.left
            for each in self.sweep(kept, together, names, [item]):
                self.progress("losses of single layers", item * len(kept) + each.layers[0], len(items) * len(kept))
                methods = {number: self.by_name[each.candidate].by_layer[number] for number in each.layers}
                measured.append((each, passes.loss(item, methods)))
            if item + 1 >= PASSAGES and not deadline.allows(begun - deadline.left):
                break
        if together > 1:
            self.notes.append(f"Losses were measured of {together} layers at a time; more minutes measure each.")
        return self.by_layer(kept, measured)

    def _together(self, kept: Mapping[int, Sequence[Candidate]], share_of_pass: float) -> int:
        """The number of layers whose losses are measured together, so that two inputs fit: 1, 2, 4, … or all."""
        together, names = 1, [candidate.name for candidate in self.candidates]
        while together < len(kept):
            if len(list(self.sweep(kept, together, names, [0]))) * share_of_pass <= 1:
                return together
            together *= 2
        return max(len(kept), 1)

    def layers_of(self, chosen: Mapping[int, str]) -> dict[str, Any]:
        """The mapping for `sq.nn.swap`: layers with exact attention are left out."""
        return {self.subject.names[n]: self.by_name[each].by_layer[n] for n, each in chosen.items() if each != EXACT}

    def verification(self, planned: Planned, mixes: Mapping[str, dict[int, str]], number: int) -> dict[str, Verified]:
        """Choices on the held-out inputs, in rounds of random order with exact attention timed twice."""
        self.progress("verifying the plan", number, choice.ROUNDS)
        runs: dict[str, dict[str, Method]] = {EXACT: {}, AGAIN: {}}
        runs |= {name: self.layers_of(mix) for name, mix in mixes.items()}
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        losses: dict[str, list[float]] = {name: [] for name in mixes}
        references: list[float] = []
        draw, begun, deadline = random.Random(0), self.deadline.left, self.deadline.part(0.5)
        for done in deadline.within(range(max(len(self.held_out), VERIFYING_ROUNDS)), LEAST_VERIFIED):
            call = self.held_out[done % len(self.held_out)]
            taken, outputs = one_round(runs, partial(self._timed, call), draw)
            for name in runs:
                seconds[name].append(taken[name])
            if done < len(self.held_out):
                exact = self.judge.reference(outputs[EXACT], call)
                references.append(exact)
                for name in mixes:
                    losses[name].append(exact - self.judge.value(outputs[name], outputs[EXACT], call))
            del outputs  # before those of the next round are there
        noise = against_itself(ratios(seconds[AGAIN], seconds[EXACT]))
        self.round_seconds = begun - self.deadline.left
        return {
            name: VerifiedInModule(
                chosen=mix,
                predicted=choice.total(planned.mean_losses, mix),
                losses=losses[name],
                bound=choice.upper_bound(losses[name], choice.of_round(), binary=self.may_be_binary),
                speedups=ratios(seconds[name], seconds[EXACT]),
                of_exact=noise,
                exact=self.judge.fidelity(references, references),
                cost=cost(seconds[name], seconds[EXACT], noise=noise),
            )
            for name, mix in mixes.items()
        }

    def share_of_next(self, last: Verified) -> float:
        """All of it, if there is time for another round that takes as long as the last one."""
        return float(self.deadline.allows(self.round_seconds))

    def is_clear(self, verified: Verified, accepted: float) -> bool:
        """True if a choice is faster beyond the noise, and one with a loss by more than is similar."""
        assert isinstance(verified, VerifiedInModule)
        assert verified.cost is not None
        least = max(SIMILAR, verified.noise) if verified.loss > EQUAL * accepted else choice.FASTER
        return verified.speedup >= least and verified.cost.verdict == "faster"

    def _timed(self, call: ModuleCall, methods: Mapping[str, Method]) -> tuple[float, Any]:
        """Seconds of a held-out input with these methods, and the output."""
        with self.sites.running(methods), _named_refusal(call, methods):
            return stopwatch(partial(call.run, self.sites.module), self.device)

    def _plan(self, planned: Planned, verified: Verified | None) -> ModulePlan:
        result, means = None, planned.mean_losses
        if verified is not None:
            assert isinstance(verified, VerifiedInModule)
            assert verified.cost is not None
            # The bound is on the mean loss, and a loss of 0 is the fidelity of the exact output.
            exact = verified.exact
            result = HeldOutResult(
                len(verified.losses), exact - verified.loss, exact - verified.bound, to_plain(verified.cost)
            )
        return ModulePlan(
            type(self.sites.module).__name__,
            self.judge.name,
            self.judge.min_fidelity,
            self.layers_of(planned.chosen),
            dict(describe(self.sites.module).kinds),
            {self.subject.names[n]: means[n][each] for n, each in planned.chosen.items() if each != EXACT},
            result,
            planned.why_exact,
            tuple(self.notes),
        )


def _error(inputs: LayerInputs, method: Method, exact: Tensor) -> float:
    """The relative error of a method on a layer's inputs; infinite if it refuses them, such as their mask."""
    try:
        return relative_error(inputs.run(method), exact)
    except (ValueError, TypeError):
        return math.inf


@contextmanager
def _named_refusal(call: ModuleCall, methods: Mapping[str, Method]) -> Iterator[None]:
    """InputError with the input where a method that took the measured inputs refuses a held-out one."""
    try:
        yield
    except (ValueError, TypeError) as error:
        named = listed(list(dict.fromkeys(map(str, methods.values())))) or "exact attention"
        raise InputError(
            f"{named} did not run on input {call.number}, which is held out: {error}; leave it out of methods, or plan "
            "for such inputs apart"
        ) from error
