"""`subquad needle`: whether a decoder retrieves facts from far back in its prompt.

Each prompt through each method is a unit of its own, whose result is kept until the report is written, so that an
interrupted run resumes:

    answer/<task>/<length>/<depth>/<sample>/<method>    the score of the answer
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from subquad.core.checksums import digest_of
from subquad.core.errors import InputError, as_input_error
from subquad.core.spelling import instead
from subquad.methods import Full, Method, parse_method
from subquad.tools.data.texts import STANDARD_LIBRARY, read_documents, report_folders, standard_library
from subquad.tools.measure.capture import recorded
from subquad.tools.models.compare_rows import CompareRow, mark_of, row_of
from subquad.tools.models.pretrained import Pretrained, check_model, load, running
from subquad.tools.needle.halves_oracle import oracle_of
from subquad.tools.needle.prompts import Haystack, Prompt
from subquad.tools.needle.scoring import AnswerScore, answer_score
from subquad.tools.needle.settings import NEEDLE_LENGTHS, NEEDLE_METHODS, NeedleSettings
from subquad.tools.needle.tasks import TASKS
from subquad.tools.runs import machine
from subquad.tools.runs.common_options import check_model_runs
from subquad.tools.runs.jobs import Job, JobKey, JobKind, Progress, silent
from subquad.tools.runs.runner import JobRun

JOBS_VERSION = 1  # changes with what the results of jobs hold, so that a run of another version is not resumed
ORACLE = "oracle-top"
PROBED = 64  # tokens of a prompt that are read once, to find values that are not finite
ORACLE_COST = 8.0  # times that of a method


@dataclass(frozen=True)
class Spot:
    """The parameters of one prompt; `depth` is None where the facts are all over the text."""

    task: str
    length: int
    depth: float | None
    sample: int

    @property
    def parts(self) -> tuple[object, ...]:
        """The parts of a job's name."""
        depth = "all" if self.depth is None else str(self.depth).removesuffix(".0")  # all digits: each depth by itself
        return self.task, self.length, depth, self.sample


def _label(task: str, length: int, depth: str, sample: int, method: str) -> str:
    where = "all over the text" if depth == "all" else f"at depth {depth}"
    return f"{task} {where}, {length:,} tokens, prompt {sample + 1}, with {method}"


ANSWER: JobKind[AnswerScore] = JobKind("answer", AnswerScore, _label)


def measure(settings: NeedleSettings, out: Path, progress: Progress = silent) -> "NeedleRun":
    """Measure everything and return the run with its results. Finished units are kept under `out`.

    Raises:
        InputError: something in the settings does not work; the message has the remedy.
    """
    progress("loading", 0, 1)
    run = NeedleRun.prepare(settings)
    report_folders(progress, settings.text)
    run.check_finite()
    run.finish(out, progress)
    return run


def check(settings: NeedleSettings) -> None:
    """Raise InputError for what is wrong in the settings, as far as it shows before the model is loaded."""
    _parse_inputs(settings)
    check_model(settings.model, settings.device)


def _parse_inputs(settings: NeedleSettings) -> tuple[list[Method], list[str] | None]:
    """The methods, without exact attention, and the documents that the settings name."""
    for task in settings.tasks:
        if task not in TASKS:
            raise InputError(f"no task {task!r}{instead(task, TASKS, '`subquad needle --help` lists')}")
    for depth in settings.depths:
        if not 0 <= depth <= 1:
            raise InputError(f"--depths has {depth:g}, but a depth is from 0, the beginning of the text, to 1, its end")
    if settings.samples < 1:
        raise InputError(f"--samples {settings.samples} must be at least 1")
    if settings.oracle_length < 0:
        raise InputError(f"--oracle-length {settings.oracle_length} must be 0 or more")
    check_model_runs(settings.dtype, 1, settings.extend, None)
    with as_input_error():
        methods = [method for method in dict.fromkeys(map(parse_method, settings.methods)) if method != Full()]
    if not methods:
        raise InputError("no methods to measure besides exact attention: --methods names none")
    return methods, read_documents(settings.text, settings.column) if settings.text else None


@dataclass(kw_only=True)
class NeedleRun(JobRun):
    """A run: model, text, rows and prompts at hand, and the results of the units so far."""

    settings: NeedleSettings
    pretrained: Pretrained
    text: dict[str, Any]
    rows: list[CompareRow]  # exact attention first
    oracles: dict[int, CompareRow]  # by length
    matched: str | None  # the method whose exact keys the oracle has as many of
    prompts: dict[Spot, Prompt]

    @classmethod
    def prepare(cls, settings: NeedleSettings) -> "NeedleRun":
        """Check all that the user gave, cheapest first, load the model, and make the prompts."""
        methods, documents = _parse_inputs(settings)
        pretrained = load(settings.model, settings.device, dtype=settings.dtype)
        if not pretrained.is_causal_lm:
            raise InputError(
                f"{pretrained.name} is of the kind {pretrained.kind}; subquad needle needs a causal language model, "
                "such as demo-decoder"
            )
        pretrained = pretrained.extended_to(settings.extend, settings.lengths or (), rotary_only=True)
        lengths = _lengths(settings, pretrained)
        pretrained = pretrained.reaching(pretrained.extend or 0)
        rows = [row_of(pretrained, Full()), *(_row(pretrained, method) for method in methods)]
        oracles = {n: oracle_of(methods, n, pretrained.model.dtype) for n in lengths if n <= settings.oracle_length}
        texts = standard_library() if documents is None else documents
        haystack = Haystack(pretrained, [token for text in texts for token in pretrained.content_ids(text)])
        return cls(
            settings=settings,
            pretrained=pretrained,
            text={
                "source": ", ".join(map(str, settings.text)) or STANDARD_LIBRARY,
                "documents": len(texts),
                "tokens": len(haystack.tokens),
            },
            rows=rows,
            oracles={n: _row(pretrained, pair[1]) for n, pair in oracles.items() if pair},
            matched=next((str(pair[0]) for pair in oracles.values() if pair), None),
            prompts={
                spot: haystack.prompt(TASKS[spot.task], spot.length, spot.depth, spot.sample, settings.seed)
                for spot in _spots(settings, lengths)
            },
        )

    @property
    def lengths(self) -> list[int]:
        """The lengths of the prompts, the shortest first."""
        return list(dict.fromkeys(spot.length for spot in self.prompts))

    def fingerprint(self) -> dict[str, Any]:
        """All that the results depend on."""
        return {
            "model": self.pretrained.identity(),
            "methods": [[row.name, mark_of(row.bounds)] for row in (*self.rows, *self.oracles.values())],
            "prompts": digest_of({"prompts": [[each.tokens, each.answer] for each in self.prompts.values()]}),
            "machine": [machine.versions(), machine.hardware(self.settings.device)],
            "units": JOBS_VERSION,
        }

    def check_finite(self) -> None:
        """InputError when NaN or infinity reaches an attention layer; names the layer."""
        first = next(iter(self.prompts.values()))
        with as_input_error(), recorded(self.pretrained.model):
            self.pretrained.prefill([first.tokens[:PROBED]])

    def jobs(self) -> Iterator[Job[Any]]:
        """The units with what makes them, prompt by prompt."""
        for spot, prompt in self.prompts.items():
            for name, row in self.rows_at(spot).items():
                yield ANSWER.job(*spot.parts, name, run=partial(self.answer, prompt, row))

    def rows_at(self, spot: Spot) -> Mapping[str, CompareRow]:
        """The rows that read a prompt, by name: the oracle reads the first sample of each."""
        rows = {row.name: row for row in self.rows}
        if spot.sample == 0 and spot.length in self.oracles:
            rows[ORACLE] = self.oracles[spot.length]
        return rows

    def answer(self, prompt: Prompt, row: CompareRow) -> AnswerScore:
        """One prompt through one method."""
        with running(self.pretrained.model, row.swap):
            return answer_score(self.pretrained, prompt)

    def score(self, spot: Spot, name: str) -> AnswerScore:
        """The result of one prompt with one method."""
        key: JobKey[AnswerScore] = ANSWER(*spot.parts, name)
        return self.results[key]

    def cost(self, key: str) -> float:
        """About how many tokens go through the model."""
        _, _, length, _, _, name = key.split("/", 5)
        return int(length) * (ORACLE_COST if name == ORACLE else 1.0)


def _spots(settings: NeedleSettings, lengths: Sequence[int]) -> Iterator[Spot]:
    """All prompts, the shortest first, and one sample after the other."""
    depths = sorted(set(settings.depths))
    for length in lengths:
        for sample in range(settings.samples):
            for task in dict.fromkeys(settings.tasks):
                for depth in [None] if TASKS[task].spread else depths:
                    yield Spot(task, length, depth, sample)


def _lengths(settings: NeedleSettings, pretrained: Pretrained) -> list[int]:
    """The lengths that are asked for, or the default ones that the model's positions reach."""
    if settings.lengths is not None:
        return sorted({pretrained.length(length, "--lengths") for length in settings.lengths})
    limit = pretrained.limit or NEEDLE_LENGTHS[-1]
    lengths = [length for length in NEEDLE_LENGTHS if length <= limit] or [limit]
    return lengths if pretrained.extend is None else [*lengths, pretrained.extend]


def _row(pretrained: Pretrained, method: Method) -> CompareRow:
    """The row of a method; InputError where no layer can run it."""
    row = row_of(pretrained, method)
    if not row.layers:
        raise InputError(
            f"{method} cannot run in {pretrained.name}: {row.reason}; take one that can, such as "
            f"{NEEDLE_METHODS[0]} or {NEEDLE_METHODS[1]}"
        )
    return row
