"""Times and errors of a plan's candidates on one load."""

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from subquad.masks import Mask
from subquad.methods import BoundMethod, Full, Method
from subquad.methods.full import EXACT
from subquad.tools.measure.capture import LayerInputs
from subquad.tools.measure.deadline import Deadline
from subquad.tools.measure.fidelity import relative_error
from subquad.tools.measure.group import ALONE, MeasuringGroup
from subquad.tools.measure.prefix import Chain, kept, skipping
from subquad.tools.measure.timing import Effort, one_round, speedup, stopwatch, timed_rounds, until_steady
from subquad.tools.plan.effort import spread_out
from subquad.tools.plan.subject import PlanSubject

ROUNDS = Effort(seconds=0.8, least=3, enough=7, most=25)  # of the calls of one layer
PASSES, MOST_PASSES, PASSES_SECONDS = 2, 4, 2.0  # timed exact passes; more than two of fast models only
SLOW = 3.0  # times exact attention's first call, from which on a candidate's is not repeated
SCREENED = 3  # layers whose errors are measured, however long they take
SAME = 1e-6  # a loss below this is rounding: passes whose first blocks were skipped give the same output


@dataclass(frozen=True)
class Candidate:
    """A method as a plan's choice: what runs in each layer that can run it."""

    name: str
    by_layer: dict[int, Method | BoundMethod]

    @property
    def bounds(self) -> dict[int, BoundMethod]:
        """The methods that are bound already, with learned parameters, by layer."""
        return {number: method for number, method in self.by_layer.items() if isinstance(method, BoundMethod)}


@dataclass
class PassTimes:
    """Seconds of an exact pass, and of the losses of an output with putting methods in and out."""

    seconds: float
    loss_seconds: float
    single_loss_seconds: float


@dataclass
class Screen:
    """Every candidate on the layers' own inputs."""

    seconds: dict[str, dict[str, float]]  # by layer and candidate: a call; exact attention's too
    errors: dict[str, dict[str, float]]  # by layer and candidate: relative error of the layer's output; some layers'
    head_spread: dict[str, float] = field(default_factory=dict)  # by layer: largest head's error / the median head's


@dataclass
class HeldOutPass:
    """One held-out input through several choices."""

    losses: dict[str, float]
    seconds: dict[str, float]


def call_shape(inputs: LayerInputs) -> tuple[Any, ...]:
    """The properties of a layer's inputs that the time of a call depends on."""
    mask = inputs.options["mask"]
    return tuple(inputs.query.shape), tuple(inputs.key.shape), mask.is_causal, mask.span


@torch.inference_mode()
def pass_times(load: PlanSubject, allowed: float = math.inf) -> PassTimes:
    """Time exact passes of the first input, and losses of its output.

    The first pass, which may read the weights from the disk, does not count, unless there is no time for another one.
    """
    passes: list[float] = []
    with load.running(None):
        while len(passes) < PASSES or (sum(passes) < PASSES_SECONDS and len(passes) < MOST_PASSES):
            if passes and sum(passes) + passes[-1] > allowed:
                break
            seconds, output = stopwatch(lambda: load.run(load.items[0]), load.device, load.group)
            passes.append(seconds)
    losses = load.loss, load.single_loss
    seconds_of = [stopwatch(partial(_judge, load, loss, output), load.device, load.group)[0] for loss in losses]
    return PassTimes(statistics.median(passes[1:] or passes), *seconds_of)


def _judge(load: PlanSubject, loss: Callable[[Any, Any], float], output: Any) -> None:
    """The work for a loss in addition to the pass."""
    with load.running(EXACT):
        loss(copy(output), output)  # a copy: some losses take less time for the same object


@torch.inference_mode()
def screen(load: PlanSubject, candidates: Sequence[Candidate], allowed: float = math.inf) -> Screen:
    """Errors and times of all candidates on what the layers are given for the first input.

    After the `allowed` seconds no further layer has its errors measured; those that have are spread over the model.
    """
    group = load.group
    deadline = Deadline(allowed, group)
    with load.recorded() as calls:
        load.run(load.items[0])
    first = {inputs.number: inputs for inputs in reversed(calls)}  # of layers that run twice, the first call
    seconds = _layer_times(first, candidates, max(deadline.left, 0.0), group)
    errors: dict[str, dict[str, float]] = {str(number): {} for number in sorted(first)}
    spreads: dict[str, float] = {}
    numbers = sorted(first)
    for position in deadline.within(spread_out(len(numbers)), SCREENED):
        number = numbers[position]
        of_layer = seconds[str(number)]
        able = [c for c in candidates if c.name in of_layer and of_layer[c.name] < SLOW * of_layer[EXACT]]
        errors[str(number)], spread = _layer_errors(first[number], able, group)
        spreads |= {} if spread is None else {str(number): spread}
    return Screen(seconds, errors, spreads)


def _layer_errors(
    inputs: LayerInputs, candidates: Sequence[Candidate], group: MeasuringGroup
) -> tuple[dict[str, float], float | None]:
    """Relative errors in a layer by candidate; and the largest head's error divided by the median head's."""
    exact = inputs.run(Full())
    outs = {c.name: inputs.run(c.by_layer[inputs.number]) for c in candidates if inputs.number in c.by_layer}
    heads = [_of_heads(out, exact, group) for out in outs.values()]
    spread = statistics.median(max(each) / max(statistics.median(each), 1e-9) for each in heads) if heads else None
    return {name: relative_error(out, exact, group) for name, out in outs.items()}, spread


def _layer_times(
    first: Mapping[int, LayerInputs], candidates: Sequence[Candidate], allowed: float, group: MeasuringGroup
) -> dict[str, dict[str, float]]:
    """Seconds of a call by layer and candidate; layers whose inputs are alike are timed together.

    Rounds take the `allowed` seconds together, or the time of the fewest.
    """
    alike: dict[Any, list[int]] = {}
    for number, inputs in first.items():
        alike.setdefault(call_shape(inputs), []).append(number)
    seconds: dict[str, dict[str, float]] = {}
    for numbers in alike.values():
        numbers.sort()
        middle = numbers[len(numbers) // 2]
        # Learned parameters of another layer cost as much as the middle one's.
        methods = {c.name: [c.by_layer[n] for n in (middle, *numbers) if n in c.by_layer] for c in candidates}
        able = {name: each[0] for name, each in methods.items() if each}
        timed = call_times(first[middle], able, group, allowed / len(alike))
        for number in numbers:
            tried = {EXACT, *(c.name for c in candidates if number in c.by_layer)}
            seconds[str(number)] = {name: s for name, s in timed.items() if name in tried}
    return seconds


def _of_heads(out: torch.Tensor, exact: torch.Tensor, group: MeasuringGroup) -> list[float]:
    wrong, size = (group.all_reduce(x.double().square().sum((0, 2, 3))).sqrt() for x in (out - exact, exact))
    return (wrong / size.clamp(min=1e-30)).tolist()


def call_times(
    inputs: LayerInputs, methods: Mapping[str, Method | BoundMethod], group: MeasuringGroup, allowed: float
) -> dict[str, float]:
    """Seconds of each method on these inputs, from its ratio to exact attention in the same rounds.

    A candidate whose first call takes far longer than exact attention's is called only once.
    """
    calls: dict[str, Any] = {EXACT: lambda: inputs.run(Full())}
    calls |= {name: lambda m=method: inputs.run(m) for name, method in methods.items()}
    warm_up = timed_rounds({"first": calls[EXACT]} | calls, 1, device=inputs.query.device, group=group)
    first = {name: seconds for name, (seconds,) in warm_up.items()}
    timed = {name: call for name, call in calls.items() if name == EXACT or first[name] < SLOW * first[EXACT]}
    effort = replace(ROUNDS, seconds=min(ROUNDS.seconds, allowed / len(timed)))
    rounds = until_steady(timed, effort, inputs.query.device, group=group)
    exact = statistics.median(rounds[EXACT])
    ratios = {name: first[name] / first[EXACT] for name in calls} | {
        name: statistics.median(mine / its for mine, its in zip(seconds, rounds[EXACT], strict=True))
        for name, seconds in rounds.items()
    }
    return {name: exact * ratio for name, ratio in ratios.items()}


class SingleLosses:
    """Losses of outputs with a candidate in some layers, and exact attention in all others.

    What exact attention gives is computed once for each passage, and kept for the last one alone. The blocks in front
    of the first layer are not computed again, where they are a chain.
    """

    def __init__(self, load: PlanSubject):
        self.load = load
        self._item: int | None = None
        self._exact: Any = None
        self._chain: Chain | None = None
        self._outputs: list[Any] = []

    def loss(self, item: int, methods: Mapping[int, Method | BoundMethod]) -> float:
        """The loss with these methods in their layers, on the passage of this number; NaN if they refuse it."""
        load = self.load
        with load.no_gradients():
            if self._item != item:
                self._read(item)
            blocks = self._chain.before(min(methods)) if self._chain else ()
            try:
                with load.running(methods), skipping(blocks, self._outputs):
                    output = load.run(load.items[item])
            except load.refusals:
                return math.nan
            return float(load.single_loss(output, self._exact))

    def _read(self, item: int) -> None:
        """Run exact attention on a passage."""
        load, blocks = self.load, self.load.chain()
        self._item, self._exact, self._outputs = None, None, []  # free the memory of the passage before
        with load.running(EXACT), kept(blocks.blocks if blocks else ()) as outputs:
            exact = load.run(load.items[item])
        _check_finite(load.single_loss(exact, exact))
        is_chain = blocks is not None and _same(load, load.items[item], exact, blocks, outputs)
        self._chain, self._outputs = (blocks, outputs) if is_chain else (None, [])
        self._item, self._exact = item, exact


def _check_finite(self_loss: float) -> None:
    """ValueError where exact attention itself has no loss: the model, the metric or the score gives NaN or infinity."""
    if not math.isfinite(self_loss):
        raise ValueError(
            f"an output of exact attention compared with itself has a loss of {self_loss}, but it must be a finite "
            "number: what the model, the metric or the score gives there is not finite"
        )


def _same(load: PlanSubject, item: Any, exact: Any, blocks: Chain, outputs: Sequence[Any]) -> bool:
    """True if skipping all blocks but the last one gives the exact output: they are a chain, run once each."""
    if any(output is None for output in outputs):
        return False
    with load.running(EXACT), skipping(blocks.blocks[:-1], outputs):
        try:
            return abs(load.single_loss(load.run(item), exact)) < SAME
        except (RuntimeError, TypeError, ValueError, IndexError):  # blocks that hand on what is not their output
            return False


@torch.inference_mode()
def held_out_pass(load: PlanSubject, item: Any, choices: Mapping[str, Any], seed: int) -> HeldOutPass:
    """One held-out input through every choice, exact attention among them: losses, and seconds of whole passes.

    The order is drawn from the seed.
    """

    def timed(methods: Any) -> tuple[float, Any]:
        with load.running(methods):
            return stopwatch(lambda: load.run(item), load.device, load.group)

    seconds, outputs = one_round(choices, timed, random.Random(seed))
    exact = outputs.pop(EXACT)
    losses = {EXACT: float(load.loss(exact, exact))}
    _check_finite(losses[EXACT])
    return HeldOutPass(losses | {name: float(load.loss(output, exact)) for name, output in outputs.items()}, seconds)


@torch.inference_mode()
def faster_at(
    inputs: LayerInputs,
    methods: Mapping[str, Method | BoundMethod],
    lengths: Sequence[int],
    rounds: int = 7,
    group: MeasuringGroup = ALONE,
) -> dict[str, list[bool]]:
    """Return, by method and length, whether it is faster than exact attention on the first tokens of a layer's inputs.

    Of a group, each process takes the first of its own tokens, and together they have that number.
    """
    won: dict[str, list[bool]] = {name: [] for name in methods}
    for length in lengths:
        cut = _first_tokens(inputs, length, group)
        calls: dict[str, Any] = {EXACT: lambda cut=cut: cut.run(Full())}
        calls |= {name: lambda m=method, cut=cut: cut.run(m) for name, method in methods.items()}
        device = cut.query.device
        timed_rounds(calls, 1, device=device, group=group)
        taken = timed_rounds(calls, rounds, random.Random(length), device, group=group)
        for name in methods:
            won[name].append(speedup(taken[name], taken[EXACT]) > 1.0)
    return won


def _first_tokens(inputs: LayerInputs, length: int, group: MeasuringGroup) -> LayerInputs:
    """A layer's inputs for the first tokens only, without padding."""
    mask, sequence = inputs.options["mask"], None if group.ranks is None else group.ranks.even(length)
    options = inputs.options | {
        "parallel": sequence,
        "mask": Mask(is_causal=mask.is_causal, offset=0 if mask.is_causal else None, span=mask.span),
        "bias": None,
    }
    query, key, value = (
        x[:, :, : group.local_tokens(length)].contiguous() for x in (inputs.query, inputs.key, inputs.value)
    )
    return LayerInputs(inputs.number, inputs.name, query, key, value, options, inputs.rotary)
