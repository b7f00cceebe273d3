"""A comparison: what is measured of each row, cut into units whose results are kept until the report is written.

An interrupted run resumes from the units that are done.

Rows are timed in turn, in a new order in each turn. Exact attention is timed twice in it, and how far its two times
differ is the noise; in long prompts of a causal language model it is timed once, and the noise is how far the turns
differ. The units also record the other processes' share of the processors meanwhile.
"""

import math
import random
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch

from subquad import hf
from subquad.core.errors import InputError, is_out_of_memory
from subquad.methods import Full
from subquad.methods.full import EXACT
from subquad.tools.compare.compare_jobs import (
    EAGER,
    JOBS_VERSION,
    LAYERS,
    OP,
    QUALITY,
    SEQUENCE,
    STEPS,
    TASK,
    EagerPass,
    Embeddings,
    LayerErrors,
    Losses,
    OpRounds,
    OpTiming,
    SequencePass,
    SequenceRound,
    StepRounds,
)
from subquad.tools.compare.growth import exponent
from subquad.tools.compare.labelled_tasks import LabelledTask
from subquad.tools.compare.settings import COMPARED, COMPARED_LONG, CompareSettings
from subquad.tools.measure.capture import LayerInputs, recorded
from subquad.tools.measure.deadline import Deadline
from subquad.tools.measure.fidelity import cosine, relative_error, weights_l1
from subquad.tools.measure.group import MeasuringGroup
from subquad.tools.measure.noise import AGAIN
from subquad.tools.measure.peak_memory import peak_extra_mib
from subquad.tools.measure.rounds import MeasuredPass, RoundTimes, measured_pass
from subquad.tools.measure.timing import one_round, predicted, stopwatch, timed_rounds
from subquad.tools.measure.without_attention import WITHOUT, WithoutAttention
from subquad.tools.models.compare_rows import CompareRow, mark_of
from subquad.tools.models.dtypes import FP32, TORCH
from subquad.tools.models.generation import (
    STEPS_IN_ROUND,
    new_tokens_after,
    prompt_tokens,
    request_seconds,
    time_steps,
)
from subquad.tools.models.next_tokens import quarter_perplexities
from subquad.tools.models.passages import TokenizedText
from subquad.tools.models.pretrained import BATCH, Pretrained, running
from subquad.tools.runs import machine
from subquad.tools.runs.floor import Floor
from subquad.tools.runs.jobs import Job
from subquad.tools.runs.runner import JobRun

LAYER_PASSAGES, LAYER_TOKENS = 4, 2048  # on which layers are measured one by one, at most
WEIGHTS_UP_TO = 1024  # tokens: rows of attention weights take as many columns of values
CAUSAL_SEQUENCES = 5  # each position of one is a measurement of its next token
MOST_POSITIONS = 1024  # of a sequence, whose next tokens are compared: logits of all would take longer than the model
GROWTH = 1.7  # the exponent of the length in predictions of times
EVEN = 6000  # tokens at which attention is predicted to take as long as the rest of a causal model
OVERHEAD = 1.4  # of a turn: what follows its passes, as next-token distributions do, at any length
STEP_TOKENS = 500  # of a prefill, which take about as long as a row's steps
EAGER_SHARE = 4.0  # the time of eager attention that is predicted, as a multiple of SDPA's
TOO_SLOW = 2.0  # seconds per call: a method that is predicted to exceed it is left out, and the report states it
LONGEST, INSTEAD = 8192, 4096  # the longest prompt by default, and the one that is run if there is no time for it
LONG = LONGEST  # tokens from which on a causal model is run with few rows, and with one text


@dataclass(kw_only=True)
class Comparison(JobRun):
    """A comparison: model, text and rows at hand, and the results of the units so far."""

    settings: CompareSettings
    asked: CompareSettings  # before the lengths of an extension were added to them
    pretrained: Pretrained
    reading: TokenizedText
    rows: list[CompareRow]
    refused: list[CompareRow]
    task: LabelledTask | None
    length: int
    floor: Floor
    models: dict[tuple[int, str], Pretrained] = field(default_factory=dict)  # by length, 0 up to the own, and dtype
    deadline: Deadline = field(init=False)
    ended: bool = False  # whether nothing more will be measured, finished or not

    def __post_init__(self) -> None:
        self.deadline = Deadline(60 * self.settings.minutes, self.group)

    @property
    def group(self) -> MeasuringGroup:
        """The processes that measure."""
        return self.pretrained.group

    @property
    def lengths(self) -> list[int]:
        """The lengths at which the whole model is run, its own first.

        By default those of a causal language model are its own and `LONGEST`, as far as its positions reach, and
        `INSTEAD` where there was no time for that. In batches of several texts they are those that texts have.
        """
        return [n for n in self._lengths_of_any_text if n not in self.beyond_texts]

    @property
    def _lengths_of_any_text(self) -> list[int]:
        if not self.pretrained.is_causal_lm or self.settings.lengths is not None:
            return [self.length, *(n for n in self.settings.model_lengths if n > self.length)]
        longest = min(n for n in (LONGEST, self.pretrained.limit, self.settings.max_length) if n is not None)
        instead = [n for n in (INSTEAD,) if n < longest and self.rounds_at(n)]
        return [self.length, *(n for n in (*instead, longest) if n > self.length)]

    @cached_property
    def beyond_texts(self) -> list[int]:
        """The lengths beyond the main one that no text has, or too few pieces of texts, if a batch has several."""
        size, longer = self.settings.batch, [n for n in self._lengths_of_any_text if n > self.length]
        return [n for n in longer if size > 1 and not self.reading.fills(self.pretrained, n, size)]

    @property
    def why_beyond_texts(self) -> str:
        """The reason for `beyond_texts`, in a clause."""
        longest = max(self.reading.document_lengths)
        return (
            f"texts in batches are neither joined nor repeated, the longest document has {longest:,} tokens, and a "
            f"batch needs {self.settings.batch} pieces"
        )

    @property
    def _lengths_to_try(self) -> list[int]:
        """`lengths`, with `INSTEAD` as long as the longest was not run, and may be left out for lack of time."""
        by_default = self.pretrained.is_causal_lm and self.settings.lengths is None
        first, longest = self.lengths[0], self.lengths[-1]
        instead = by_default and first < INSTEAD < longest and not self.rounds_at(longest)
        return sorted({*self.lengths, *([INSTEAD] if instead else [])})

    def is_long(self, length: int) -> bool:
        """True if a causal model is run at this length with few rows, and with one text."""
        return self.pretrained.is_causal_lm and length >= LONG

    def rows_at(self, length: int, i: int) -> list[CompareRow]:
        """The rows that are timed with the i-th batch of a length, unless their methods are too slow there.

        At a long one they are those in the dtype that the processor is fast in, and by default the closest of these.
        Exact attention in fp32, which all are compared with, runs once then.
        """
        if not self.is_long(length):
            return self.rows
        dtype, usual = self.dtypes[-1], {EXACT, *COMPARED_LONG}
        named = self.settings.methods != COMPARED
        rows = [row for row in self.rows if row.dtype == dtype]
        rows = [row for row in rows if named or row.is_named or str(row.method) in usual]
        return [row for row in self.rows if row.is_exact and i == 0 and row not in rows] + rows

    @property
    def dtypes(self) -> list[str]:
        """The dtypes in which the model runs, fp32 first."""
        return list(dict.fromkeys(row.dtype for row in self.rows))

    @property
    def call_lengths(self) -> list[int]:
        """The lengths at which one layer's attention is run alone; by default up to a causal model's positions."""
        lengths, limit = list(self.settings.call_lengths), self.pretrained.limit
        if not self.pretrained.is_causal_lm or limit is None or self.settings.op_lengths is not None:
            return lengths
        return [n for n in lengths if n <= limit] or lengths

    @property
    def lengths_done(self) -> list[int]:
        """Those of `lengths` at which a batch was run."""
        return [n for n in self.lengths if self.rounds_at(n)]

    @property
    def step_lengths(self) -> list[int]:
        """Those of `lengths` after which steps are timed."""
        return [n for n in self.lengths if self.new_tokens_after(n)]

    @property
    def step_lengths_done(self) -> list[int]:
        """Those of `step_lengths` whose steps were timed."""
        return [n for n in self.step_lengths if STEPS(n) in self.results]

    @property
    def call_lengths_done(self) -> list[int]:
        """Those of `call_lengths` that were timed."""
        return [n for n in self.call_lengths if OP(n) in self.results]

    @property
    def has_passages(self) -> bool:
        """True if the passages were read with every row, so that quality at the model's own length is theirs."""
        return not self.pretrained.is_causal_lm and all(QUALITY(row.name) in self.results for row in self.rows)

    @property
    def is_finished(self) -> bool:
        """True if everything was measured."""
        return all(job.key in self.results for job in self.jobs())

    def fingerprint(self) -> dict[str, Any]:
        """All that the results depend on."""
        task = self.task
        return {
            "model": self.pretrained.identity(),
            "methods": [[row.name, mark_of(row.bounds), *map(str, row.planned.values())] for row in self.rows],
            "text": [self.reading.passages, self.reading.queries, len(self.reading.tokens)],
            "task": None if task is None else [task.name, task.texts, task.labels, task.train, task.wanted],
            "lengths": [self.settings.lengths or [self.lengths[0], self.lengths[-1]], self.call_lengths],
            "steps": [[n, self.prompt_of_request(n)] for n in self.step_lengths],
            "batch": self.settings.batch,
            "seed": self.settings.seed,
            "machine": [machine.versions(), machine.hardware(self.settings.device)],
            "units": JOBS_VERSION,
            **({} if self.group.count == 1 else {"ranks": self.group.count}),
        }

    def check_finite(self) -> None:
        """ValueError when NaN or infinity reaches an attention layer; names the layer."""
        with recorded(self.pretrained.model, self.group):
            self.pretrained.forward(self.reading.passages[:1])

    # ------------------------------------------------------------------ units

    def jobs(self) -> Iterator[Job[Any]]:
        """The jobs, the most telling first; those of single calls and of sequences read the results of shorter lengths.

        Each length gets two batches before any length gets a third one. A causal language model is run at its longest
        length as soon as one batch of the shortest shows whether there is time for it, and gets a third turn there as
        soon as requests after the shortest are timed: two turns tell speeds apart on a quiet machine only.
        """
        first, *longer = self._lengths_to_try
        begun: Counter[int] = Counter()  # batches of each length

        def rounds(length: int, count: int) -> Iterator[Job[Any]]:
            """The jobs of the next batches of a length, until it has `count` of them, or all that there are."""
            for i in range(begun[length], min(count, self.sequence_count(length))):
                yield SEQUENCE.job(length, i, run=partial(self.sequence_round, length, i))
            begun[length] = max(begun[length], count)

        early = (first, *reversed(longer)) if self.pretrained.is_causal_lm else ()
        for length in early:
            yield from rounds(length, 2 if self.is_long(length) and length != first else 1)
        yield from rounds(first, 2)
        yield from self._steps(first)
        for row in [] if early else self.rows:  # a causal one is complete with its sequences
            yield QUALITY.job(row.name, run=partial(self.quality, row))
        for row in self.rows if self.task else []:
            yield TASK.job(row.name, run=partial(self.task_score, row))
        for length in longer:
            yield from rounds(length, 3 if self.is_long(length) else 2)
            yield from self._steps(length)
        if self.has_eager:
            yield EAGER.job(first, run=partial(self.eager, first))
        for count in range(3, max(map(self.sequence_count, self.lengths)) + 1):
            for length in (first, *longer):
                yield from rounds(length, count)
        for length in longer if self.has_eager else []:
            if not self.is_long(length):
                yield EAGER.job(length, run=partial(self.eager, length))
        for length in self.call_lengths:
            yield OP.job(length, run=partial(self.op, length))
        for row in self.rows if self.settings.layers else []:
            if row.dtype == FP32 and not row.is_exact and row.other is None:
                yield LAYERS.job(row.name, run=partial(self.layer_errors, row))

    def _steps(self, length: int) -> Iterator[Job[Any]]:
        if self.new_tokens_after(length):
            yield STEPS.job(length, run=partial(self.steps, length))

    def cost(self, key: str) -> float:
        """About how many tokens go through the model."""
        kind, _, arguments = key.partition("/")
        if kind == STEPS.name:
            return float(self.settings.batch * len(self.dtypes) * int(arguments) + STEP_TOKENS * len(self.rows))
        if kind in (SEQUENCE.name, OP.name):
            share = self.settings.batch if kind == SEQUENCE.name else 0.5  # one layer, in more rounds
            return float(share * len(self.rows) * int(arguments.partition("/")[0]))
        if kind == EAGER.name:
            return float(3 * self.settings.batch * int(arguments))
        if kind == TASK.name and self.task is not None:
            return len(self.task.texts) * self.length / 4  # its texts are seldom as long as the model allows
        return float(self.length * len(self._layer_passages if kind == LAYERS.name else self.reading.passages))

    # ------------------------------------------------------------------ time

    def limit(self) -> float | None:
        """The seconds that are left of the time limit."""
        return self.deadline.left

    def has_time(self, key: str) -> bool:
        """True if a job is predicted to end within the time limit.

        The first two batches at the model's own length run in any case, with the steps after it, and so does what an
        option asks for: the task, and the errors of layers.
        """
        kind, _, arguments = key.partition("/")
        if kind in (TASK.name, LAYERS.name) or key in (
            *(SEQUENCE(self.length, 0), SEQUENCE(self.length, 1)),
            STEPS(self.length),
        ):
            return True
        if kind == QUALITY.name:
            return self._has_time_for_quality
        if kind != OP.name and int(arguments.partition("/")[0]) not in self._lengths_to_try:
            return False  # the longest was run
        if kind == SEQUENCE.name and self._was_passed_over(*map(int, arguments.split("/"))):
            return False
        return self.deadline.allows(self._predicted(kind, arguments), self._seconds_of_first)

    def _was_passed_over(self, length: int, i: int) -> bool:
        """True if there was no time for the i-th turn, and a later one at this length warmed up in its place."""
        ran = self._timing_rounds(length)
        return bool(ran) and i < min(ran) and any(x.extra_mib is not None for x in self.rounds_at(length)[0].values())

    @property
    def _seconds_of_first(self) -> float:
        """Predicted seconds of what runs in any case at the first length, and did not run yet: a turn, and steps."""
        if not self.pretrained.is_causal_lm or SEQUENCE(self.length, 0) not in self.results:
            return 0.0
        has_steps = self.new_tokens_after(self.length) > 0 and STEPS(self.length) not in self.results
        rounds = (SEQUENCE(self.length, 1) not in self.results) + has_steps / 4
        return rounds * sum(each.seconds for each in self.rounds_at(self.length)[0].values())

    @cached_property
    def _has_time_for_quality(self) -> bool:
        """Decided once: cosines over all passages and over the sequences do not belong into one table."""
        passages = len(self.reading.passages) / self.settings.batch
        a_round = OVERHEAD * sum(row.seconds for row in self.rounds_at(self.length)[-1].values())
        return self.deadline.allows(passages * a_round)

    def _predicted(self, kind: str, arguments: str) -> float:
        """Seconds that a job may take: those of the last turn at this length, or of a shorter one, grown in between."""
        length = int(arguments.partition("/")[0])
        if kind == OP.name:
            shorter = [n for n in self.call_lengths_done if n < length]
            if not shorter:
                return 0.0
            return sum(map(sum, self.call_times(shorter[-1]).seconds.values())) * (length / shorter[-1]) ** GROWTH
        if kind in (EAGER.name, STEPS.name) and length not in self.lengths_done:
            return math.inf
        if kind == STEPS.name:
            return self._predicted_steps(length)
        measured = [n for n in self.lengths_done if n <= length][-1]
        growth = (length / measured) ** GROWTH
        if kind == EAGER.name:
            return EAGER_SHARE * self.pass_times(measured).seconds[EXACT][0] * growth
        return self._predicted_round(length, measured)

    def _predicted_steps(self, length: int) -> float:
        """Seconds of the prefills of exact attention in each dtype, and of all steps, if they are known from before."""
        exact = [row.name for row in self.rows_at(length, 1) if row.is_full]
        seconds = self.pass_times(length).seconds
        prefills = OVERHEAD * sum(seconds[name][-1] for name in exact)
        shorter = [n for n in self.step_lengths_done if n < length]
        if not shorter:
            return prefills
        timed = [sum(row.seconds) for row in self.results[STEPS(shorter[-1])].times.rows.values()]
        return prefills + OVERHEAD * STEPS_IN_ROUND * sum(timed) * length / shorter[-1]

    def _predicted_round(self, length: int, measured: int) -> float:
        """Seconds of the next turn at a length, from the last ones of its rows at a measured length."""
        last: dict[str, SequencePass] = {}
        for each in self.rounds_at(measured):
            last |= each
        rows = [row for row in self.rows_at(length, len(self.rounds_at(length))) if row.name in last]
        seconds = [last[row.name].seconds for row in rows]
        grown = sum(each * self._growth(row, measured, length) for each, row in zip(seconds, rows, strict=True))
        has_outputs = not (self.is_long(length) and self.rounds_at(length))
        return grown + (OVERHEAD - 1) * sum(seconds) * has_outputs

    def _growth(self, row: CompareRow, measured: int, length: int) -> float:
        """By how much a pass of a row is predicted to take longer at a length than at the measured one."""
        if not self.pretrained.is_causal_lm:
            return (length / measured) ** GROWTH
        power = exponent(row.method)
        before, after = (n + EVEN * (n / EVEN) ** power for n in (measured, length))
        return after / before

    # ------------------------------------------------------------------ measurements

    @torch.no_grad()
    def layer_errors(self, row: CompareRow) -> LayerErrors:
        """On the exact model's own q, k and v of a few passages: output errors, and L1 distances of weights."""
        errors: dict[str, list[float]] = {}
        distances = []
        for inputs, exact in self._exact_layers:
            if inputs.number in row.layers:
                method = row.at(inputs.number)
                error = relative_error(inputs.run(method), exact, self.group)
                errors.setdefault(str(inputs.number), []).append(error)
                if self.group.count == 1 and self.length <= WEIGHTS_UP_TO:  # of split tokens a row is on all ranks
                    distances.append(weights_l1(method, inputs.query, inputs.key, inputs.value, **inputs.options))
        means = {number: sum(e) / len(e) for number, e in errors.items()}
        return LayerErrors(means, sum(distances) / len(distances) if distances else None)

    @property
    def _layer_passages(self) -> list[list[int]]:
        return self.reading.passages[: max(LAYER_TOKENS // self.length, 1)][:LAYER_PASSAGES]

    @cached_property
    def _exact_layers(self) -> list[tuple[LayerInputs, torch.Tensor]]:
        with recorded(self.pretrained.model, self.group) as calls:
            for passage in self._layer_passages:
                self.pretrained.forward([passage])
        return [(inputs, inputs.run(Full())) for inputs in calls]

    def quality(self, row: CompareRow) -> Embeddings | Losses:
        """The passages and queries read with this method: embeddings, or losses."""
        model = self._model_for(self.length, row.dtype)
        with running(model.model, row.swap, self.group):
            if model.kind != "embedding":
                return self._losses(model, self.reading.passages)
            texts = (self.reading.passages, self.reading.queries)
            return Embeddings(*(_rounded(model.embed_all(items)) for items in texts))

    def task_score(self, row: CompareRow) -> dict[str, float]:
        """The labelled task with this method in the model, and the cosine of its embeddings to the exact ones."""
        assert self.task is not None
        if row.is_exact:
            return self.task.score(self._exact_task) | {"cosine": 1.0}
        model = self._model_for(self.length, row.dtype)
        with running(model.model, row.swap, self.group):
            vectors = model.embed_all(self._task_items)
        if not vectors.isfinite().all():  # no probe learns from them, and an argmax over NaN is an index
            exact = self.results[TASK(EXACT)]
            return dict.fromkeys(exact, math.nan)
        return self.task.score(vectors) | {"cosine": float(cosine(vectors, self._exact_task).mean())}

    @cached_property
    def _task_items(self) -> list[list[int]]:
        assert self.task is not None
        return [self.pretrained.wrap(self.pretrained.content_ids(text), self.length) for text in self.task.texts]

    @cached_property
    def _exact_task(self) -> torch.Tensor:
        with running(self.pretrained.model, None, self.group):
            return self.pretrained.embed_all(self._task_items)

    def sequence_round(self, length: int, i: int) -> SequenceRound:
        """The i-th batch of this length through every row in turn.

        The first one warms up, and measures memory and the output without attention; if there was no time for it, the
        next one that runs does. At a long length all batches are one and the same, whose first run counts, and its
        outputs are kept once.
        """
        batches, is_long = self._batches(length), self.is_long(length)
        is_first = all(i < j for j in self._timing_rounds(length))
        items = batches[i % len(batches)]
        rows = {row.name: row for row in self.rows_at(length, 0 if is_first else i)}
        ran = {row.name for row in self._fast_enough(length)} if is_first else self.rounds_at(length)[0]
        runs = {name: (row.dtype, row.swap) for name, row in rows.items() if name in ran}
        if not (is_first or is_long):
            runs[AGAIN] = runs[EXACT]
        elif self.group.count == 1 and not is_long:  # split tokens: exact attention has its own way over the ranks
            runs[WITHOUT] = FP32, WithoutAttention()
        used = machine.watch(self.group.count)
        passes, outputs = one_round(runs, partial(self._pass, length, items, is_first), random.Random(i))
        use = used()
        outputs.pop(AGAIN, None)
        if is_long and not is_first:
            outputs.clear()
        quarters: list[float] = []
        if self.pretrained.is_causal_lm and outputs:
            model = self._model_for(length, FP32)
            with running(model.model, None, self.group):
                if self.is_extended(length):
                    quarters = model.quarters(items, outputs[EXACT], MOST_POSITIONS)
                outputs = model.next_tokens(items, outputs, EXACT, MOST_POSITIONS)
                outputs = {name: each.sums() for name, each in outputs.items()}
        made = {name: SequencePass(_plain(outputs.get(name, ())), *costs) for name, costs in passes.items()}
        return SequenceRound(made, use, sum(map(len, items)), quarters)

    def _pass(
        self, length: int, items: list[list[int]], counts_memory: bool, run: tuple[str, Any]
    ) -> tuple[MeasuredPass, Any]:
        """A batch through a row's model; `run` has the dtype and the methods."""
        model = self._model_for(length, run[0])
        forward = partial(model.forward, items, cached=self.new_tokens_after(length) > 0)
        with running(model.model, run[1], self.group):
            return measured_pass(forward, counts_memory, model.device, self.group)

    def is_extended(self, length: int) -> bool:
        """True if inputs of this length are read by extended positions."""
        return self.pretrained.limit is not None and length > self.pretrained.limit

    def quarters(self, length: int) -> list[float]:
        """The exact model's perplexities in the quarters of the texts of an extended length; else empty."""
        parts = [each.quarters for each in self._timing_rounds(length).values() if each.quarters]
        return quarter_perplexities(parts) if parts else []

    def new_tokens_after(self, length: int) -> int:
        """The new tokens of a request after a prompt of this length; 0 if no steps are timed there."""
        return new_tokens_after(self.pretrained, length, self.settings.new_tokens)

    def prompt_of_request(self, length: int) -> int:
        """The tokens of a prompt of this length after which steps are timed."""
        return prompt_tokens(self.pretrained, length, self.new_tokens_after(length))

    def steps(self, length: int) -> StepRounds:
        """Steps after the first batch of this length, of all rows that are timed there."""
        ran, rows = self.rounds_at(length)[0], self.rows_at(length, 1)
        runs = {row.name: (self._model_for(length, row.dtype), row.swap) for row in rows if row.name in ran}
        items = [item[: self.prompt_of_request(length)] for item in self._batches(length)[0]]
        used = machine.watch()
        times = time_steps(runs | {AGAIN: runs[self.exact_at(length)]}, items, random.Random(length))
        return StepRounds(times, used())

    def step_times(self, length: int) -> RoundTimes:
        """Seconds of a step of each row that has steps, round by round."""
        rows = self.results[STEPS(length)].times.rows
        seconds = {name: row.seconds for name, row in rows.items() if row.reason is None}
        return RoundTimes(seconds, exact=self.exact_at(length))

    def request_times(self, length: int) -> RoundTimes:
        """Seconds of a whole request of each row that has steps, one for each prefill, with the prefill's memory."""
        steps = self.step_times(length).medians
        prefills, new = self.pass_times(length), self.new_tokens_after(length)
        seconds = {
            name: request_seconds(each, steps[name], new) for name, each in prefills.seconds.items() if name in steps
        }
        return replace(prefills, seconds=seconds)

    def call_times(self, length: int) -> RoundTimes:
        """Seconds of one layer's attention alone, round by round, and its memory."""
        rows = self.results[OP(length)].rows.items()
        return RoundTimes({name: row.seconds for name, row in rows}, {name: row.extra_mib for name, row in rows})

    @property
    def times(self) -> dict[str, dict[str, RoundTimes]]:
        """All times by what was timed, as the report names it, and by length."""
        return {
            "model": {str(n): self.pass_times(n) for n in self.lengths_done},
            "op": {str(n): self.call_times(n) for n in self.call_lengths_done},
            "step": {str(n): self.step_times(n) for n in self.step_lengths_done},
            "request": {str(n): self.request_times(n) for n in self.step_lengths_done},
        }

    @property
    def has_eager(self) -> bool:
        """True if the model has eager attention, which many models still run, in addition to SDPA."""
        return self.group.count == 1 and self.pretrained.model.config._attn_implementation == "sdpa"

    def eager(self, length: int) -> EagerPass:
        """The first batch of this length through the model in fp32 with its own attention as eager code.

        NaN where the matrices of weights do not fit into memory.
        """
        model = self._model_for(length, FP32)
        model.model.set_attn_implementation("eager")
        try:
            forward = partial(model.forward, self._batches(length)[0], cached=self.new_tokens_after(length) > 0)
            seconds, (mib, _) = stopwatch(partial(peak_extra_mib, forward, model.device), model.device)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return EagerPass(math.nan, math.nan)
        finally:
            model.model.set_attn_implementation("sdpa")
        return EagerPass(seconds, mib)

    def ran_eager(self, length: int) -> bool:
        """True if eager attention was measured at a length, and did not run out of memory."""
        return EAGER(length) in self.results and not math.isnan(self.results[EAGER(length)].seconds)

    def _batches(self, length: int) -> list[list[list[int]]]:
        """The batches that are run at a length; a single one at a long length."""
        model, count = self._model_for(length, FP32), 1 if self.is_long(length) else self.sequence_count(length)
        if self.settings.batch > 1:
            return self.reading.batches(model, length, count, self.settings.batch, self.settings.seed)
        return [[item] for item in self.reading.sequences(model, length, count)]

    def sequence_count(self, length: int) -> int:
        """The largest number of turns at a length, the first one as a warm-up."""
        if self.pretrained.is_causal_lm:
            return CAUSAL_SEQUENCES
        return 10 if length <= 512 else 5 if length <= 2048 else 4

    def rounds_at(self, length: int) -> list[dict[str, SequencePass]]:
        """The results of the rows for each batch of a length so far."""
        return [each.rows for each in self._timing_rounds(length).values()]

    def _timing_rounds(self, length: int) -> dict[int, SequenceRound]:
        """The turns at a length that have results, in their order: one may be missing before others."""
        keys = {i: SEQUENCE(length, i) for i in range(self.sequence_count(length))}
        return {i: self.results[key] for i, key in keys.items() if key in self.results}

    def pass_times(self, length: int) -> RoundTimes:
        """Seconds of a pass of each row, batch by batch, and its memory. At a long length every turn counts."""
        return RoundTimes.of_rounds(self.rounds_at(length), self.exact_at(length), warms_up=not self.is_long(length))

    def exact_at(self, length: int) -> str:
        """The row of exact attention that is timed in every turn at a length."""
        return next(row.name for row in self.rows_at(length, 1) if row.is_full)

    def texts_at(self, length: int) -> int:
        """The number of texts that were run at a length."""
        return self.settings.batch * (1 if self.is_long(length) else len(self.rounds_at(length)))

    def tokens(self, length: int) -> float:
        """Mean number of tokens of a timed batch, without padding."""
        counts = [each.tokens for each in self._timing_rounds(length).values()]
        return statistics.fmean(counts[1:] or counts)

    def _model_for(self, length: int, dtype: str) -> Pretrained:
        """The model that reaches this length, in this dtype; of those with extended positions the last is kept."""
        limit = self.pretrained.limit
        reach = 0 if limit is None or length <= limit else length
        if (reach, FP32) not in self.models:
            self.models = {(reach, FP32): self.pretrained.reaching(length)}
        if (reach, dtype) not in self.models:
            self.models[reach, dtype] = self.models[reach, FP32].in_dtype(TORCH[dtype])
        return self.models[reach, dtype]

    def _fast_enough(self, length: int) -> list[CompareRow]:
        """Rows that accept this length, and whose time at the one before predicts that they are worth measuring."""
        shorter = [n for n in self.lengths_done if n < length]
        if not shorter:
            return self.rows
        seconds = self.pass_times(shorter[-1]).medians
        return [row for row in self.rows if row.takes(length) and _worth(row, seconds, length / shorter[-1])]

    def op(self, length: int) -> OpRounds:
        """One layer's attention alone, on N(0,1) inputs of its shape, batch 1: seconds of each round, and memory.

        A row whose parameters are for shorter inputs is left out: the model could not run it at this length. So are
        plans, which have several methods, and attention that is not subquad's, which only a whole model calls.
        """
        model = self.pretrained.model
        rows = [row for row in self.rows if row.is_called_alone]
        layer = hf.find_layers(model)[0]
        heads, kv_heads, width = hf.head_counts(layer)
        sequence = None if self.group.ranks is None else self.group.ranks.even(length)
        local_tokens, rank = self.group.local_tokens(length), 0 if sequence is None else sequence.rank
        generator = torch.Generator().manual_seed(self.settings.seed * self.group.count + rank)
        q, k, v = (
            torch.randn(1, h, local_tokens, width, generator=generator, device="cpu").to(model.device, model.dtype)
            for h in (heads, kv_heads, kv_heads)
        )
        shorter = [n for n in self.call_lengths if n < length]
        if shorter:
            medians = self.call_times(shorter[-1]).medians
            rows = [row for row in rows if _worth(row, medians, length / shorter[-1])]
        rows = [row for row in rows if row.takes(length)]
        calls = {row.name: row.alone(q, k, v, is_causal=layer.causal, parallel=sequence) for row in rows}
        used = machine.watch(self.group.count)
        with torch.inference_mode():
            memory = {name: peak_extra_mib(call, model.device, self.group)[0] for name, call in calls.items()}
            timed, count = calls | {AGAIN: calls[EXACT]}, 9 if length <= 2048 else 3
            seconds = timed_rounds(timed, count, random.Random(length), model.device, group=self.group)
        return OpRounds({name: OpTiming(each, memory.get(name)) for name, each in seconds.items()}, used())

    def _losses(self, model: Pretrained, items: Sequence[Sequence[int]]) -> Losses:
        nll, count = 0.0, 0
        for at in range(0, len(items), BATCH):
            more, counted = model.losses(items[at : at + BATCH], seed=self.settings.seed + at)
            nll, count = nll + more, count + counted
        if count == 0:
            raise InputError("the text is too short to compute a perplexity")
        return Losses(nll, count)


def _worth(row: CompareRow, seconds: Mapping[str, float], growth: float) -> bool:
    """True if a method's time, predicted from a shorter length, is at most TOO_SLOW or at most exact attention's."""
    if row.is_full:
        return True
    if row.name not in seconds:
        return False
    limit = TOO_SLOW if row.method.traits.quadratic_baseline else max(TOO_SLOW, seconds[EXACT] * growth**2)
    return predicted(row.method, seconds[row.name], growth) <= limit


def _plain(output: Any) -> list[Any]:
    """The output of a forward pass, as a record keeps it."""
    return _rounded(output) if isinstance(output, torch.Tensor) else list(output)


def _rounded(vectors: torch.Tensor) -> list[list[float]]:
    return [[round(x, 6) for x in row] for row in vectors.tolist()]
