"""`sq.plan_module`: a method for each layer of any module, for an accepted loss of its output."""

import math
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from subquad.core.errors import InputError
from subquad.core.spelling import listed
from subquad.methods import Full, Method
from subquad.methods.full import EXACT
from subquad.nn import describe
from subquad.nn.swapping import NAME
from subquad.tools.measure.calls import ModuleCall, as_calls, device_of, run_exactly, spread_order
from subquad.tools.measure.deadline import Deadline
from subquad.tools.measure.fidelity import relative_error
from subquad.tools.measure.metrics import Judge, Metric, Score, judge_of
from subquad.tools.measure.noise import AGAIN, against_itself
from subquad.tools.measure.timing import Cost, Effort, cost, one_round, ratios, speedup, stopwatch, until_steady
from subquad.tools.measure.tradeoff import EQUAL, SIMILAR, closest_of_fast, tie_of
from subquad.tools.measure.without_attention import WithoutAttention
from subquad.tools.modules.attention import ModuleLayers, attention_sites
from subquad.tools.modules.inputs import check_minutes, check_module, grouped, methods_of
from subquad.tools.modules.planned import HeldOutResult, ModulePlan
from subquad.tools.modules.unchanged import unchanged
from subquad.tools.plan import choice
from subquad.tools.plan.effort import KEPT, MOST, divided
from subquad.tools.plan.grid import grid, pareto
from subquad.tools.runs.jobs import Progress, silent

FEWEST = 4  # inputs
SCREENING, MEASURING = 0.25, 0.5  # shares of the time: until layers are screened, and of the remaining time for losses
CALL_SECONDS = 0.3  # share of the rounds of a call of a layer
LEAST_VERIFIED = 2  # held-out inputs, however long they take
VERIFYING_ROUNDS = 9  # timings of a choice, if time allows


def plan_module(
    module: nn.Module,
    inputs: Iterable[Any],
    *,
    methods: str | Method | Sequence[str | Method] | None = None,
    metric: str | Metric | None = None,
    score: Score | None = None,
    min_fidelity: float = 0.99,
    minutes: float = 10.0,
    progress: Progress = silent,
) -> ModulePlan:
    """Choose a method for each attention layer of any module, within an accepted loss of its output.

        minimise Σ_l t(l, c_l)   subject to   Σ_l loss(l, c_l) ≤ budget            one method c_l in each layer l

    Times are measured in the layers, losses of the module's output with one method in one layer, on a third of the
    inputs or fewer. The choice is verified on the others, which are held out, and made again with a smaller budget
    until it keeps `min_fidelity` there. The module runs in eval mode without gradients, and is afterwards exactly what
    it was.

    For a module whose layers `sq.nn.swap` takes. `sq.plan` plans for transformers models, by length.

    Args:
        module: any module with `nn.MultiheadAttention` or timm's `Attention`.
        inputs: what the module is called with, as in `sq.compare`; four or more. Give lengths as they occur: one plan
            is made for all of them.
        methods: what to try, one or several; by default settings of several methods for the longest input.
        metric: as in `sq.compare`.
        score: as in `sq.compare`.
        min_fidelity: what the plan keeps on held-out inputs, at a confidence of 95 %, in the units of the metric.
        minutes: how long it may take; how much is measured follows from it.
        progress: called with what is under way, and how much of it is done.

    Returns:
        A `ModulePlan`. `sq.nn.swap(module, plan.layers)` puts it in; `plan.layers` is empty if exact attention should
        stay, with the reason in `plan.why_exact`.

    Raises:
        ValueError: fewer than four inputs, a module without layers that `sq.nn.swap` takes, a method with learned
            parameters, and as `sq.compare`.
        TypeError: as `sq.compare`.

    >>> import torch, subquad as sq
    >>> layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    >>> encoder, inputs = torch.nn.TransformerEncoder(layer, 2), [torch.randn(1, 64, 32) for _ in range(6)]
    >>> plan = sq.plan_module(encoder, inputs, methods="clustered:clusters=8", min_fidelity=0.5, minutes=0.1)
    >>> list(plan.kinds)
    ['layers.0.self_attn', 'layers.1.self_attn']
    """
    check_module(module)
    judge, calls = judge_of(metric, score, min_fidelity), as_calls(inputs)
    tried = None if methods is None else methods_of(methods)
    check_minutes(minutes)
    for method in tried or ():
        if method.traits.learned:
            raise InputError(f"{method} has learned parameters, and a plan tries methods that need no fitting")
    if len(calls) < FEWEST:
        raise InputError(
            f"there are {len(calls)} inputs, but a plan needs {FEWEST}: two to measure losses on and two to verify it"
        )
    deadline, screening = Deadline(60 * minutes), Deadline(SCREENING * 60 * minutes)
    with unchanged(module):
        run_exactly(calls[0], module)
        sites = attention_sites(module, calls[0])
        if not isinstance(sites, ModuleLayers):
            raise InputError(_other_function(sites.function, module))
        by_length, _ = grouped(sites, calls, SCREENING * 60 * minutes / 2)
        planning = ModulePlanning(sites, judge, deadline, progress)
        return planning.run(by_length, tried if tried is not None else grid(max(by_length)), len(calls), screening)


def _other_function(function: str, module: nn.Module) -> str:
    if function == "sq.hf.swap":
        return (
            f"{type(module).__name__} contains a transformers model; use sq.plan(model, inputs), which plans by length"
        )
    return (
        f"{type(module).__name__} has no layers that sq.nn.swap takes: its attention is calls of "
        "scaled_dot_product_attention, which sq.intercept runs by one method; use sq.compare to choose it"
    )


@dataclass
class LayerCall:
    """The arguments of a call of a layer's attention."""

    args: tuple[Tensor, ...]
    options: dict[str, Any]
    sizes: dict[str, Any]

    def bound(self, method: Method) -> Callable[[], Tensor]:
        """A call of a method on it."""
        return partial(method.bind(**self.sizes).eval(), *self.args, **self.options)

    @property
    def shape(self) -> tuple[Any, ...]:
        """The properties of the call that its time depends on."""
        mask = self.options["mask"]
        return tuple(self.args[0].shape), tuple(self.args[1].shape), mask.is_causal, mask.span


@dataclass
class VerifiedChoice:
    """A choice on the held-out inputs."""

    chosen: dict[int, str]
    losses: list[float]  # input by input
    values: list[float]
    references: list[float]
    bound: float  # on the mean loss
    cost: Cost
    noise: float  # how far exact attention differs from itself, as a factor


class ModulePlanning:
    """One plan under way."""

    def __init__(self, sites: ModuleLayers, judge: Judge, deadline: Deadline, progress: Progress):
        self.sites, self.judge, self.deadline, self.progress = sites, judge, deadline, progress
        self.device = device_of(sites.module)
        self.names: list[str] = []  # of layers that are called, by number
        self.notes: list[str] = []
        self.pass_seconds = 0.0  # of exact attention

    def run(
        self, by_length: Mapping[int, list[ModuleCall]], methods: Sequence[Method], inputs: int, screening: Deadline
    ) -> ModulePlan:
        """Screen the methods, measure losses, choose and verify."""
        # In the order of lengths, so that neighbours go to both.
        parts = divided([call for calls in by_length.values() for call in calls], MOST)
        items, held_out = map(spread_order, parts)
        references = [self.judge.reference(run_exactly(call, self.sites.module), call) for call in items]
        accepted = self.judge.accepted_loss(references)
        longest = by_length[max(by_length)][0]
        seconds = self.screen(longest, methods, screening)
        losses = self.losses(items, seconds)
        without = None if self.judge.is_score else self.without_attention(items[0])
        losses, accepted = self.distinguished(losses, accepted, without)
        verified, why_exact = self.verify(seconds, losses, held_out, accepted)
        used = len(items) + (len(held_out) if verified is None else len(verified.losses))
        if used < inputs:
            self.notes.append(f"The time sufficed for {used} of {inputs} inputs; more minutes measure more.")
        return self._plan(verified, why_exact, losses)

    def screen(self, call: ModuleCall, methods: Sequence[Method], deadline: Deadline) -> dict[int, dict[str, float]]:
        """Seconds of the candidates of each layer on its own inputs, exact attention's among them.

        Of those that are faster than exact attention, the Pareto front of time and error.
        """
        layer_calls = self._recorded(call)
        self.names = list(layer_calls)
        timed: dict[Any, dict[str, float]] = {}
        seconds: dict[int, dict[str, float]] = {}
        assigned = {method: self.sites.assign(method).methods or () for method in methods}
        able = {
            name: self._able(layer_calls[name], [method for method in methods if name in assigned[method]])
            for name in self.names
        }
        for number, name in enumerate(self.names):
            self.progress("timing methods in layers", number, len(self.names))
            layer_call = layer_calls[name]
            key = (layer_call.shape, tuple(able[name]))
            if key not in timed:
                timed[key] = self._times(layer_call, able[name], deadline.left)
            times = {each: s for each, s in timed[key].items() if each != EXACT}
            faster = {each: s for each, s in times.items() if s < choice.GAIN * timed[key][EXACT]}
            errors = {each: able[name][each][1] for each in faster}
            front = pareto(errors, faster, KEPT) if faster else []
            seconds[number] = {EXACT: timed[key][EXACT]} | {each: faster[each] for each in front}
        self.methods = {str(method): method for method in methods}
        return seconds

    def _recorded(self, call: ModuleCall) -> dict[str, LayerCall]:
        """The first call of each layer, by name."""
        module, calls = self.sites.module, dict[str, LayerCall]()
        with ExitStack() as stack:
            stack.enter_context(self.sites.running(dict.fromkeys(self.sites.exact_able, Full())))
            for name in self.sites.exact_able:
                bound: Any = module.get_submodule(f"{name}.{NAME}".lstrip("."))
                sizes = {"heads": bound.heads, "kv_heads": bound.kv_heads, "head_dim": bound.head_dim}

                def hook(
                    part: nn.Module,
                    args: tuple[Tensor, ...],
                    options: dict[str, Any],
                    name: str = name,
                    sizes: dict[str, Any] = sizes,
                ) -> None:
                    calls.setdefault(name, LayerCall(args, dict(options), sizes))

                stack.callback(bound.register_forward_pre_hook(hook, with_kwargs=True).remove)
            call.run(module)
        return {name: calls[name] for name in self.sites.exact_able if name in calls}

    @torch.no_grad()
    def _able(self, layer_call: LayerCall, methods: Sequence[Method]) -> dict[str, tuple[Method, float]]:
        """The methods that run in a layer, with the relative errors of their outputs."""
        exact, able = layer_call.bound(Full())(), dict[str, tuple[Method, float]]()
        for method in methods:
            try:
                error = relative_error(layer_call.bound(method)(), exact)
            except (ValueError, TypeError):  # a mask that it does not take
                continue
            if math.isfinite(error):
                able[str(method)] = (method, error)
        return able

    @torch.no_grad()
    def _times(
        self, layer_call: LayerCall, able: Mapping[str, tuple[Method, float]], allowed: float
    ) -> dict[str, float]:
        """Seconds of exact attention, and of each method by its ratio to that in the same rounds.

        Rounds take the `allowed` seconds together, or the time of the fewest.
        """
        calls: dict[str, Any] = {EXACT: layer_call.bound(Full())}
        calls |= {each: layer_call.bound(method) for each, (method, _) in able.items()}
        effort = Effort(seconds=min(CALL_SECONDS, max(allowed, 0.0) / len(calls)), least=3, enough=7, most=25)
        rounds = until_steady(calls, effort, self.device)
        exact = statistics.median(rounds[EXACT])
        return {each: exact / speedup(s, rounds[EXACT]) for each, s in rounds.items()}

    def losses(
        self, items: Sequence[ModuleCall], seconds: Mapping[int, Mapping[str, float]]
    ) -> dict[int, dict[str, list[float]]]:
        """Losses of the output with one method in one layer, input by input.

        If that takes too long, neighbouring layers have theirs measured together, and an equal share each.
        """
        candidates = {number: [each for each in times if each != EXACT] for number, times in seconds.items()}
        losses: dict[int, dict[str, list[float]]] = {
            number: {each: [] for each in names} for number, names in candidates.items()
        }
        pass_seconds = min(stopwatch(partial(items[0].run, self.sites.module), self.device)[0] for _ in range(2))
        self.pass_seconds = pass_seconds
        deadline = self.deadline.part(MEASURING)
        together = self._together(candidates, 2 * pass_seconds / max(deadline.left, 1e-9))
        for done, call in enumerate(items):
            before = deadline.left
            exact = run_exactly(call, self.sites.module)
            reference = self.judge.value(exact, exact, call)
            for group in _neighbours(list(candidates), together):
                self.progress(
                    "losses of single layers", done * len(candidates) + group[0], len(items) * len(candidates)
                )
                for each in dict.fromkeys(name for number in group for name in candidates[number]):
                    numbers = [number for number in group if each in candidates[number]]
                    value = self._value(dict.fromkeys(numbers, each), call, exact)
                    for number in numbers:
                        losses[number][each].append((reference - value) / len(numbers))
            if done >= 1 and not deadline.allows(before - deadline.left):
                break
        if together > 1:
            self.notes.append(f"Losses were measured of {together} layers at a time; more minutes measure each.")
        return {
            number: {each: values for each, values in by_name.items() if all(map(math.isfinite, values))}
            for number, by_name in losses.items()
        }

    def without_attention(self, call: ModuleCall) -> float:
        """The loss of an output without attention."""
        exact = run_exactly(call, self.sites.module)
        with self.sites.running(dict.fromkeys(self.sites.exact_able, WithoutAttention())):
            output = call.run(self.sites.module)
        return self.judge.value(exact, exact, call) - self.judge.value(output, exact, call)

    def distinguished(
        self, losses: dict[int, dict[str, list[float]]], accepted: float, without: float | None
    ) -> tuple[dict[int, dict[str, list[float]]], float]:
        """The losses that prove something, and the loss that is accepted, with a note if either is restricted."""
        kernels = [name for name, method in self.methods.items() if method.is_exact]
        means = {
            n: {each: statistics.mean(values) for each, values in by_name.items()} for n, by_name in losses.items()
        }
        if count := choice.tied(means, kernels):
            self.notes.append(
                f"These inputs do not tell methods apart: {tie_of(count)}; "
                "use trained weights, or a metric that shows the difference."
            )
            return {n: {x: each[x] for x in each if x in kernels} for n, each in losses.items()}, accepted
        provable = choice.provable(accepted, without)
        if provable < accepted:
            self.notes.insert(
                0,
                f"Without any attention the loss is only {without:.4f}, so a tenth of that is accepted; use trained "
                "weights, or a metric that shows more.",
            )
        return losses, provable

    def _together(self, candidates: Mapping[int, Sequence[str]], share_of_pass: float) -> int:
        """How many layers have their losses measured together, so that two inputs fit: 1, 2, 4, … or all."""
        together = 1
        while together < len(candidates):
            groups = _neighbours(list(candidates), together)
            passes = sum(len({name for number in group for name in candidates[number]}) for group in groups)
            if passes * share_of_pass <= 1:
                return together
            together *= 2
        return max(len(candidates), 1)

    def _value(self, chosen: Mapping[int, str], call: ModuleCall, exact: Any) -> float:
        """The value of the output with some layers' methods; NaN if a method refuses this input."""
        try:
            with self.sites.running(self.layers_of(chosen)):
                output = call.run(self.sites.module)
        except (ValueError, TypeError):
            return math.nan
        return self.judge.value(output, exact, call)

    def layers_of(self, chosen: Mapping[int, str]) -> dict[str, Method]:
        """The mapping for `sq.nn.swap`: layers with exact attention are left out."""
        return {self.names[number]: self.methods[each] for number, each in chosen.items() if each != EXACT}

    def verify(
        self,
        seconds: Mapping[int, Mapping[str, float]],
        losses: Mapping[int, Mapping[str, Sequence[float]]],
        held_out: Sequence[ModuleCall],
        accepted: float,
    ) -> tuple[VerifiedChoice | None, str | None]:
        """Choose and verify until a choice holds; the fastest that holds, or the last one with why it is not taken."""
        means = {
            number: {EXACT: 0.0} | {each: statistics.mean(values) for each, values in by_name.items()}
            for number, by_name in losses.items()
        }
        times = {number: {each: seconds[number][each] for each in by_name} for number, by_name in means.items()}
        confidence = choice.of_round()
        budget = choice.with_room(times, losses, accepted, confidence, len(held_out))
        uniform = choice.best_uniform(times, means, accepted)
        tried: list[VerifiedChoice] = []
        for number in range(choice.ROUNDS):
            chosen = choice.closest(times, means, budget, self.pass_seconds)
            if all(each == EXACT for each in chosen.values()):
                break
            self.progress("verifying the plan", number, choice.ROUNDS)
            choices = {"plan": chosen}
            if number == 0 and uniform is not None:
                choices["uniform"] = choice.uniform(means, uniform)
            before = self.deadline.left
            verified = self.verifications(choices, held_out, confidence)
            tried += [verified[name] for name in reversed(verified)]  # the plan last
            if tried[-1].bound <= accepted or not self.deadline.allows(before - self.deadline.left):
                break
            budget = choice.next_budget(budget, accepted, tried[-1].bound)
        return self._best(tried, accepted)

    def _best(self, tried: Sequence[VerifiedChoice], accepted: float) -> tuple[VerifiedChoice | None, str | None]:
        if not tried:
            return None, "no method in any layer is faster and keeps the fidelity"
        holding = [verified for verified in tried if verified.bound <= accepted]
        if not holding:
            last = tried[-1]
            return last, (
                f"the last choice has a mean loss of {statistics.mean(last.losses):.4f} (at most {last.bound:.4f} at "
                f"the confidence of a round) on {len(last.losses)} held-out inputs, and {accepted:.4f} is accepted"
            )
        best = closest_of_fast(
            holding,
            lambda verified: verified.cost["speedup"],
            lambda verified: max(statistics.mean(verified.losses), 0.0),
            accepted,
            max(verified.noise for verified in holding),
        )
        assert best is not None
        lossy = statistics.mean(best.losses) > EQUAL * accepted
        least = max(SIMILAR, best.noise) if lossy else choice.FASTER
        if best.cost["speedup"] < least or best.cost.get("verdict") != "faster":
            return best, f"{best.cost['speedup']:.2f}× the speed of the module's own attention is not clearly faster"
        return best, None

    def verifications(
        self, choices: Mapping[str, Mapping[int, str]], held_out: Sequence[ModuleCall], confidence: float
    ) -> dict[str, VerifiedChoice]:
        """Choices on the held-out inputs, in rounds of random order with exact attention timed twice."""
        layers = {name: self.layers_of(chosen) for name, chosen in choices.items()}
        runs: dict[str, dict[str, Method]] = {EXACT: {}, AGAIN: {}} | layers
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        values: dict[str, list[float]] = {name: [] for name in choices}
        references: list[float] = []
        draw, deadline = random.Random(0), self.deadline.part(0.5)
        for number in deadline.within(range(max(len(held_out), VERIFYING_ROUNDS)), LEAST_VERIFIED):
            call = held_out[number % len(held_out)]
            taken, outputs = one_round(runs, partial(self._timed, call), draw)
            for name in runs:
                seconds[name].append(taken[name])
            if number < len(held_out):
                references.append(self.judge.reference(outputs[EXACT], call))
                for name in choices:
                    values[name].append(self.judge.value(outputs[name], outputs[EXACT], call))
            del outputs  # before those of the next round are there
        noise = against_itself(ratios(seconds[AGAIN], seconds[EXACT]))
        verified = {}
        for name, chosen in choices.items():
            losses = [exact - value for exact, value in zip(references, values[name], strict=True)]
            finite = all(map(math.isfinite, losses))
            bound = choice.upper_bound(losses, confidence) if finite else math.inf
            speed = cost(seconds[name], seconds[EXACT], noise=noise)
            verified[name] = VerifiedChoice(dict(chosen), losses, values[name], list(references), bound, speed, noise)
        return verified

    def _timed(self, call: ModuleCall, methods: Mapping[str, Method]) -> tuple[float, Any]:
        """Seconds of a held-out input with these methods, and the output."""
        with self.sites.running(methods), _named_refusal(call, methods):
            return stopwatch(partial(call.run, self.sites.module), self.device)

    def _plan(
        self,
        verified: VerifiedChoice | None,
        why_exact: str | None,
        losses: Mapping[int, Mapping[str, Sequence[float]]],
    ) -> ModulePlan:
        chosen = {} if verified is None or why_exact is not None else verified.chosen
        result = None
        if verified is not None:
            fidelity = self.judge.fidelity(verified.values, verified.references)
            # The bound is on the mean loss, and a loss of 0 is the fidelity of the exact output.
            exact = self.judge.fidelity(verified.references, verified.references)
            result = HeldOutResult(len(verified.losses), fidelity, exact - verified.bound, verified.cost)
        return ModulePlan(
            type(self.sites.module).__name__,
            self.judge.name,
            self.judge.min_fidelity,
            self.layers_of(chosen),
            dict(describe(self.sites.module).kinds),
            {self.names[n]: statistics.mean(losses[n][each]) for n, each in chosen.items() if each != EXACT},
            result,
            why_exact,
            tuple(self.notes),
        )


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


def _neighbours(numbers: Sequence[int], together: int) -> list[Sequence[int]]:
    return [numbers[begin : begin + together] for begin in range(0, len(numbers), together)]
