"""`sq.compare`: methods in any module, on the user's inputs, judged by a function of its output."""

import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from torch import nn

from subquad.core.spelling import listed
from subquad.methods import Full, Method, resolve
from subquad.methods.full import EXACT
from subquad.tools.compare.module_result import ModuleComparison
from subquad.tools.compare.schema import MethodReport
from subquad.tools.compare.settings import COMPARED, COMPARED_CAUSAL
from subquad.tools.measure.deadline import Deadline
from subquad.tools.measure.metrics import Judge, Metric, Score, judge_of, relative_error_of
from subquad.tools.measure.module_calls import ModuleCall, as_calls, device_of, run_exactly
from subquad.tools.measure.noise import AGAIN, noise_of
from subquad.tools.measure.rounds import MeasuredPass, RoundTimes, measured_pass
from subquad.tools.measure.timing import one_round, stopwatch
from subquad.tools.measure.without_attention import WITHOUT, WithoutAttention
from subquad.tools.models.dtypes import FP32, TORCH
from subquad.tools.modules.attention_sites import Assigned, AttentionSites, after_pass, attention_sites, outside
from subquad.tools.modules.inputs import LENGTHS, check_minutes, check_module, grouped, methods_of
from subquad.tools.modules.unchanged import unchanged
from subquad.tools.runs import machine
from subquad.tools.runs.jobs import Progress, silent

LEAST_ROUNDS, MOST_ROUNDS = 9, 60  # of timings at a length, if time allows
SECONDS = 2.0  # of the rounds at a length, from which on `LEAST_ROUNDS` suffice
NOT_OURS = "not subquad's, so it is measured, but never recommended"
UNCHANGED = 1e-6  # relative error of the module's own output after a row of others, at most
OBSERVING = 0.1  # share of the time in which the lengths of inputs are counted

Change = Callable[[nn.Module], AbstractContextManager[Any]]  # changes a module in a `with` block


def compare(
    module: nn.Module,
    inputs: Iterable[Any],
    *,
    methods: str | Method | Sequence[str | Method] | None = None,
    metric: str | Metric | None = None,
    score: Score | None = None,
    exact: nn.Module | None = None,
    others: Mapping[str, Change] | None = None,
    min_fidelity: float = 0.99,
    minutes: float = 2.0,
    progress: Progress = silent,
) -> ModuleComparison:
    """Compare attention methods in any PyTorch module: fidelity of its output, speed and memory.

    Methods go into a transformers model by `sq.hf.swap`; into `nn.MultiheadAttention` and timm's `Attention` by
    `sq.nn.swap`; and, where a module has none of these, into its calls of `scaled_dot_product_attention` by
    `sq.intercept`. The result names the way. The module runs in eval mode without gradients, and is afterwards exactly
    what it was, also if an error is raised.

    Every round runs all methods on one input in random order, and the module's own attention twice: speeds are ratios
    to that in the same round, and a method is faster only beyond the noise. Two rows are there to compare with: exact
    attention swapped in by `sq.nn.swap`, because torch's own layers may run by fused kernels that no method can use;
    and the module without attention, whose fidelity is the least of the scale.

    Args:
        module: any module.
        inputs: what the module is called with, one item per call: a tensor, a tuple of positional arguments, or a
            mapping of keyword arguments. Lengths may differ: up to four have figures of their own.
        methods: what to try, one or several; by default the rows of `subquad compare`.
        metric: from the output and the exact output, larger where they are closer. Or a name: "cosine", the mean
            cosine along the last axis of the first floating-point tensor in the output (the default; padded positions
            count, unless they are 0 in both outputs); "relative-error", 1 − ‖out − exact‖ / ‖exact‖ of that tensor;
            "kl", e^{−KL(exact ‖ out)} of logits.
        score: instead of a metric, from the output and its input, larger is better, such as 1.0 where a class is right.
            The fidelity is then 1 − (mean score of exact attention − mean score).
        exact: a module whose outputs are the exact ones, called with the same inputs; by default the module itself.
        others: rows that are not subquad's, by their names: functions that take the module and return a context
            manager, in whose block the module runs, such as `lambda module: sdpa_kernel(SDPBackend.MATH)`. They are
            measured like methods, and never recommended.
        min_fidelity: what the recommended method keeps, in the units of the metric.
        minutes: how long it may take. One round of each length is always run.
        progress: called with what is under way, and how much of it is done.

    Returns:
        A `ModuleComparison`. It prints as a table. `recommendation` has a method that keeps `min_fidelity`: of those
        within 5 %, or within the noise, of the fastest, the closest. It is exact attention, and the result states this
        first, if the metric does not tell methods apart: two or more approximations all have the fidelity of exact
        attention, or the fidelity without attention is at least 0.9 and a method loses more than a tenth as much.

    Raises:
        ValueError: no inputs; an input that the module does not take, with the module's message; no attention that a
            method can replace; an output without a floating-point tensor, for a named metric; an unknown metric or
            method; a metric that is not finite for the exact output; a row of `others` after which the module has
            other outputs than before. A method that cannot run is not an error but a row with the reason.
        TypeError: `module` is not a module or is compiled, an input has another type, or the metric does not return a
            number.

    >>> import torch, subquad as sq
    >>> layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    >>> inputs = [torch.randn(1, 100, 32) for _ in range(3)]
    >>> result = sq.compare(torch.nn.TransformerEncoder(layer, 2), inputs, methods="i-clustered:clusters=8")
    >>> result.attention
    'sq.nn.swap (2 layers)'
    """
    check_module(module)
    judge, calls = judge_of(metric, score, min_fidelity), as_calls(inputs)
    tried = None if methods is None else methods_of(methods)
    check_minutes(minutes)
    if exact is not None and not isinstance(exact, nn.Module):
        raise TypeError(f"exact must be a torch.nn.Module, got {type(exact).__name__}")
    deadline = Deadline(60 * minutes)
    average = machine.load_average()
    with unchanged(module), nullcontext() if exact is None else unchanged(exact):
        used = machine.watch()
        run_exactly(calls[0], module)
        sites = attention_sites(module, calls[0])
        by_length, is_causal = grouped(sites, calls, OBSERVING * 60 * minutes)
        not_reached = outside(sites, calls[0])
        if tried is None:
            causal_model = is_causal and sites.function == "sq.hf.swap"
            tried = [resolve(text) for text in (COMPARED_CAUSAL if causal_model else COMPARED)]
        rows = [EntryRow(Full(), Assigned(None), EXACT, "exact")]
        rows += [EntryRow(m, sites.assign(m), str(m)) for m in tried]
        rows += [EntryRow(Full(), Assigned(change), name, "other") for name, change in (others or {}).items()]
        rows += [EntryRow(m, sites.assign(m), name, "reference") for name, m in references(sites).items()]
        check_names(rows)
        measurement = Measurement(sites, judge, exact or module, by_length, rows)
        measurement.run(deadline, progress)
        use = used()
    notes = [*([not_reached] if not_reached else []), *measurement.notes(len(calls))]
    factors = list(measurement.noise.values())
    noise = noise_of(machine.load(average, [use]), factors, factors)
    return ModuleComparison(
        type(module).__name__,
        str(sites),
        judge.name,
        judge.min_fidelity,
        {length: len(group.references) for length, group in measurement.groups.items()},
        tuple(map(measurement.report, measurement.rows)),
        measurement.noise,
        (*notes, noise.says),
        is_causal,
    )


def references(sites: AttentionSites) -> dict[str, Method]:
    """The methods that others are compared with, by the names of their rows: exact attention, and none at all.

    Layers that `sq.nn.swap` changes leave torch's fused encoder kernels, so exact attention may take longer there.
    """
    swapped: dict[str, Method] = {f"full (by {sites.function})": Full()} if sites.function == "sq.nn.swap" else {}
    return {**swapped, WITHOUT: WithoutAttention()}


def check_names(rows: Sequence["EntryRow"]) -> None:
    """ValueError for two rows of one name, whose figures would be mixed."""
    counts = Counter(row.name for row in rows)
    if twice := [row.name for row in rows if row.status == "other" and counts[row.name] > 1]:
        raise ValueError(f"others has a row {twice[0]!r}, but that is the name of another row: give it another name")


@dataclass
class EntryRow:
    """A method in the comparison; the first one is the module's own attention."""

    method: Method
    assigned: Assigned
    name: str
    status: Literal["exact", "measured", "other", "reference"] = "measured"
    reason: str | None = None  # why it was refused in a pass
    notes: tuple[str, ...] = ()

    @property
    def refusal(self) -> str | None:
        """The reason why it does not run; None if it does."""
        return self.assigned.reason or self.reason


@dataclass
class LengthGroup:
    """The measurements at a length: values of the judge and seconds by row, and memory."""

    calls: list[ModuleCall]
    references: list[float] = field(default_factory=list)  # of exact outputs
    values: dict[str, list[float]] = field(default_factory=dict)
    errors: dict[str, list[float]] = field(default_factory=dict)  # relative, of outputs with a floating-point tensor
    rounds: list[dict[str, MeasuredPass]] = field(default_factory=list)
    with_memory: bool = True  # the first round counts memory, and its times do not count
    spent: float = 0.0

    @property
    def times(self) -> RoundTimes:
        """The times of the rows."""
        return RoundTimes.of_rounds(self.rounds, warms_up=self.with_memory)

    @property
    def is_timed(self) -> bool:
        """True if every row was timed at least once."""
        return len(self.rounds) > self.with_memory

    @property
    def is_done(self) -> bool:
        """True if every input was run, and times are stable."""
        timed = len(self.rounds) - self.with_memory
        steady = timed >= MOST_ROUNDS or (timed >= LEAST_ROUNDS and self.spent >= SECONDS)
        return steady and len(self.references) == len(self.calls)


class Measurement:
    """Rounds of all rows on one input at a time."""

    def __init__(
        self,
        sites: AttentionSites,
        judge: Judge,
        exact: nn.Module,
        by_length: dict[int, list[ModuleCall]],
        rows: Sequence[EntryRow],
    ):
        self.sites, self.judge, self.exact, self.rows = sites, judge, exact, list(rows)
        self.groups = {length: LengthGroup(calls) for length, calls in by_length.items()}
        self.device = device_of(sites.module)
        self._draw = random.Random(0)

    def run(self, deadline: Deadline, progress: Progress) -> None:
        """Rounds at every length, the shortest first, until times are stable or time is short; at least one each."""
        total = sum(max(len(group.calls), LEAST_ROUNDS + 1) for group in self.groups.values())
        for number, group in enumerate(self.groups.values()):
            self._choose_effort(group, deadline.left / (len(self.groups) - number))
        while pending := [
            group
            for group in self.groups.values()
            if not group.is_timed or (not group.is_done and deadline.allows(group.spent / len(group.rounds)))
        ]:
            for group in pending:
                done = sum(len(group.rounds) for group in self.groups.values())
                progress("comparing methods", min(done, total), total)
                group.spent += stopwatch(partial(self._round, group))[0]
        progress("comparing methods", total, total)

    def _choose_effort(self, group: LengthGroup, seconds: float) -> None:
        """Warm up, and leave memory out if a round for it and one for times are predicted to take longer than this."""
        exact = partial(run_exactly, group.calls[0], self.sites.module)
        group.with_memory = 2 * (len(self.rows) + 1) * stopwatch(exact, self.device)[0] <= seconds

    def _round(self, group: LengthGroup) -> None:
        """Run every row on the next input, and count memory or time."""
        number = len(group.rounds)
        call, counts_memory = group.calls[number % len(group.calls)], number == 0 and group.with_memory
        runs = {row.name: row for row in self.rows if row.refusal is None}
        if not counts_memory:
            runs[AGAIN] = runs[EXACT]
        costs, outputs = one_round(runs, partial(self._measured, call, counts_memory), self._draw)
        if number < len(group.calls):
            self._judge(group, call, outputs)
        group.rounds.append(costs)

    def _measured(self, call: ModuleCall, counts_memory: bool, row: EntryRow) -> tuple[MeasuredPass, Any] | None:
        """The seconds and the memory of a pass, and its output; None if the row's method refuses it."""
        measure = partial(measured_pass, partial(call.run, self.sites.module), counts_memory, self.device)
        if row.status == "exact":
            try:
                return measure()
            except Exception:
                run_exactly(call, self.sites.module)  # raises with the number of the input
                raise
        if row.status == "other":
            return self._measured_other(call, row, measure)
        try:
            with self.sites.running(row.assigned.methods) as log:
                measured = measure()
            reason, row.notes = after_pass(log)
        except (ValueError, TypeError) as error:
            reason = str(error)
        if reason is None:
            return measured
        row.reason = f"input {call.number}: {' '.join(reason.split())}"
        return None

    def _measured_other(
        self, call: ModuleCall, row: EntryRow, measure: Callable[[], tuple[MeasuredPass, Any]]
    ) -> tuple[MeasuredPass, Any] | None:
        """A pass of the module as the row changes it; None if that fails. The first one must leave it as it was."""
        module = self.sites.module
        measured: tuple[MeasuredPass, Any] | None = None
        is_first_round = not any(group.rounds for group in self.groups.values())
        before = run_exactly(call, module) if is_first_round else None
        try:
            with row.assigned.methods(module):
                measured = measure()
        except Exception as error:  # of any kind, because it is another package's code
            row.reason = f"input {call.number}: {type(error).__name__}: {' '.join(str(error).split())}"
        if before is not None:
            error_after = relative_error_of(run_exactly(call, module), before)
            if error_after is not None and not error_after <= UNCHANGED:
                raise ValueError(
                    f"the row {row.name!r} changed the module for good: after it, the relative error of the module's "
                    f"own output is {error_after:.2g}, so nothing could be compared with it"
                )
        return measured

    def _judge(self, group: LengthGroup, call: ModuleCall, outputs: dict[str, Any]) -> None:
        is_itself = self.exact is self.sites.module
        exact = outputs[EXACT] if is_itself else run_exactly(call, self.exact, "the module of `exact=`")
        group.references.append(self.judge.reference(exact, call))
        for name, output in outputs.items():
            if name != AGAIN:
                group.values.setdefault(name, []).append(self.judge.value(output, exact, call))
                if (error := relative_error_of(output, exact)) is not None:
                    group.errors.setdefault(name, []).append(error)
        for row in self.rows:
            values = group.values.get(row.name, [])
            if row.refusal is None and values and not math.isfinite(values[-1]):
                row.reason = f"input {call.number}: its {self.judge.name} is {values[-1]}"

    @property
    def noise(self) -> dict[int, float]:
        """By length, how far exact attention differs from itself."""
        return {length: group.times.noise for length, group in self.groups.items()}

    @property
    def _small_dtype(self) -> str | None:
        """The short name of the 16-bit dtype that the module's weights have; None: they have none."""
        dtypes = {parameter.dtype for parameter in self.sites.module.parameters()}
        return next((name for name, dtype in TORCH.items() if name != FP32 and dtype in dtypes), None)

    def report(self, row: EntryRow) -> MethodReport:
        """The row of a method in the result."""
        report = partial(MethodReport, method=row.name, settings=row.method.to_dict())
        if row.refusal is not None:
            return report(status="refused", reason=row.refusal)
        noise, groups = self.noise, {str(length): group for length, group in self.groups.items()}
        values = {at: group.values[row.name] for at, group in groups.items()}
        errors = {at: statistics.fmean(g.errors[row.name]) for at, g in groups.items() if row.name in g.errors}
        notes = [*([NOT_OURS] if row.status == "other" else []), *row.assigned.notes, *row.notes]
        return report(
            status=row.status,
            dtype=self._small_dtype if row.status == "measured" else None,
            fidelity={at: self.judge.fidelity(values[at], group.references) for at, group in groups.items()},
            relative_error=errors or None,
            model={at: group.times.cost(row.name, noise[int(at)]) for at, group in groups.items()},
            remarks=list(dict.fromkeys(notes)) or None,
            task={at: sum(each) / len(each) for at, each in values.items()} if self.judge.is_score else None,
        )

    def notes(self, inputs: int) -> list[str]:
        """The notes that a reader needs on how it was measured."""
        measured = sum(len(group.references) for group in self.groups.values())
        notes = []
        if measured < inputs:
            notes.append(f"The time sufficed for {measured} of {inputs} inputs; more minutes measure more.")
        without = [f"{length:,}" for length, group in self.groups.items() if not group.with_memory]
        if without:
            notes.append(f"There was no time to measure memory at {listed(without)} tokens.")
        shapes = {call.shapes for group in self.groups.values() for call in group.calls}
        if len(self.groups) == 1 and len(shapes) > LENGTHS:
            notes.append(
                f"The inputs have more than {LENGTHS} lengths; they are one group, under the longest of "
                f"{max(self.groups):,} tokens."
            )
        return notes
