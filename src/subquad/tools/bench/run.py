"""`subquad bench`: time and memory of methods against length, with SDPA in the same run.

The work is cut into units whose results are kept until the report is written, so that an interrupted run resumes:

    time/<dtype>/<passes>/<length>/<visit>       all methods and SDPA in turn, round by round
    memory/<dtype>/<passes>/<length>/<method>    one call in a process of its own

With an executor, units of memory are measured side by side, and units of time one at a time on a machine, panel next to
panel where there are several machines.

Every length is visited several times, with all others between and new inputs each time: rounds that follow each other
agree better than runs do. SDPA is timed twice in each round: how far its two times differ is the noise.
"""

import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from subquad.core.errors import as_input_error
from subquad.kernels.dispatch import choose
from subquad.methods import Full, Method, parse_method
from subquad.methods.full import EXACT
from subquad.tools.bench.benched_plans import resolved
from subquad.tools.bench.calls import Calls, Load, hindrance, in_words, loads_of, out_of_memory, second_call, threads
from subquad.tools.bench.extra_memory import extra_memory
from subquad.tools.bench.settings import BenchSettings
from subquad.tools.bench.size_checks import check_sizes
from subquad.tools.measure.noise import AGAIN
from subquad.tools.measure.resident import Peak
from subquad.tools.measure.timing import Effort, predicted, until_steady
from subquad.tools.runs import machine
from subquad.tools.runs.executors import LOCAL, Executor
from subquad.tools.runs.jobs import Job, JobKey, JobKind, Progress, silent
from subquad.tools.runs.runner import JobRun

VISITS = 3
JOBS_VERSION = 3  # changes with what the results of jobs hold, so that a run of another version is not resumed
THOROUGH = Effort(seconds=1.4, least=2, enough=9)  # a visit
BRIEF = Effort(seconds=0.2, least=2, enough=3, precision=0.03)
PROBE = 2048  # tokens: a first length above it is predicted from a call of this length


def check(settings: BenchSettings) -> None:
    """Raise InputError for what is wrong in the settings: in methods, plans, or what does not go together."""
    settings = resolved(settings)
    check_sizes(settings)
    with as_input_error():
        for method in settings.methods:
            parse_method(method)


def measure(
    settings: BenchSettings,
    out: Path,
    progress: Progress = silent,
    executor: Executor = LOCAL,
) -> "Bench":
    """Measure everything and return it. Finished units are kept under `out`.

    Raises:
        InputError: something in the settings does not work; the message has the remedy.
    """
    settings = resolved(settings)
    check_sizes(settings)
    average = machine.load_average()
    with as_input_error(), threads(settings.threads):
        bench = Bench(settings, list(dict.fromkeys([Full(), *map(parse_method, settings.methods)])))
        bench.versions, bench.hardware = machine.versions(), machine.hardware(settings.device)
    bench.load_average, bench.executor = average, executor.description
    with threads(settings.threads):
        bench.finish(out, progress, executor)
    return bench


@dataclass
class Timed:
    """Seconds of a method in each round of a visit, or the reason why it was not run."""

    seconds: list[float] | None = None
    reason: str | None = None


@dataclass
class Visit:
    """All methods at one length."""

    rows: dict[str, Timed]
    use: machine.Use


TIME: JobKind[Visit] = JobKind(
    "time",
    Visit,
    lambda load, visit: f"timing each method at {in_words(load)}, round {visit + 1} of {VISITS}",
    timed=True,
)
MEMORY: JobKind[Peak | None] = JobKind(
    "memory", Peak | None, lambda load, method: f"memory of {method} at {in_words(load)}"
)


@dataclass
class Bench(JobRun):
    """Settings, methods with SDPA first, and the results of the units so far."""

    settings: BenchSettings
    methods: list[Method]
    versions: dict[str, str] = field(default_factory=dict)
    hardware: dict[str, str] = field(default_factory=dict)
    executor: str = ""  # the executor of the jobs, if it was not this process

    @property
    def loads(self) -> list[Load]:
        """The calls to measure."""
        return loads_of(self.settings)

    @property
    def backend(self) -> str:
        """The fastest backend on the device; calls that it does not take run on the reference."""
        return choose(triton=None) if torch.device(self.settings.device).type == "cuda" else choose(cpu=None)

    def fingerprint(self) -> dict[str, Any]:
        """All that the results depend on."""
        return {
            "settings": asdict(self.settings) | {"methods": [str(method) for method in self.methods]},
            "machine": [self.versions, self.hardware, self.backend],
            "units": JOBS_VERSION,
        }

    def jobs(self) -> Iterator[Job[Any]]:
        """The units with what makes them; later ones read the records of shorter lengths and of earlier visits."""
        for visit in range(VISITS):
            for load in self.loads:
                yield TIME.job(load.key, visit, run=partial(self.time, load, visit), after=self._read_by(load, visit))
        for load in self.loads if not self.settings.quick else []:
            visits = [TIME(load.key, visit) for visit in range(VISITS)]
            for method in self.methods:
                yield MEMORY.job(load.key, method, run=partial(self.memory, load, method), after=visits)

    def _read_by(self, load: Load, visit: int) -> list[JobKey[Visit]]:
        """The visits whose records a visit reads: earlier ones; the first one those of shorter lengths in its panel."""
        if visit:
            return [TIME(load.key, earlier) for earlier in range(visit)]
        panel = (load.dtype, load.passes)
        return [TIME(one.key, 0) for one in self.loads if (one.dtype, one.passes) == panel and one.length < load.length]

    def cost(self, key: str) -> float:
        """A visit takes a fixed time at least, and longer at lengths at which a call does."""
        kind, *_, length, _ = key.split("/")
        return (1.0 if kind == TIME.name else 0.2) * (1.0 + float(length) / PROBE)

    def time(self, load: Load, visit: int) -> Visit:
        """All methods in turn, round by round."""
        with threads(self.settings.threads):
            used = machine.watch()
            return Visit(self._rows(load, visit), used())

    def _rows(self, load: Load, visit: int) -> dict[str, Timed]:
        try:
            calls = Calls(of_visit(load, visit))
        except (RuntimeError, MemoryError) as error:
            return {str(method): Timed(reason=out_of_memory(error)) for method in self.methods}
        reasons, able = {}, {}
        for method in self.methods:
            call = calls.call_of(str(method))
            known = self._too_slow(load, method) if visit == 0 else self.reason(load, method)
            reason = known or hindrance(call)
            if reason is None:
                able[str(method)] = call
            else:
                reasons[str(method)] = Timed(reason=reason)
        if EXACT in able:
            able[AGAIN] = able[EXACT]
        effort = BRIEF if self.settings.quick else THOROUGH
        seconds = until_steady(able, effort, torch.device(load.device), calls.clear) if able else {}
        return {name: Timed(rounds) for name, rounds in seconds.items()} | reasons

    def visits(self, load: Load, name: str) -> list[list[float]]:
        """Seconds of a method, or of AGAIN, in each visit so far; none where it was not run in one of them."""
        measured = self._timed(load, name)
        return [timed.seconds for timed in measured if timed.seconds is not None] if not _reason(measured) else []

    def reason(self, load: Load, method: Method) -> str | None:
        """The reason why a method was not run; None if it was."""
        return _reason(self._timed(load, str(method)))

    def _timed(self, load: Load, name: str) -> list[Timed]:
        visits = [TIME(load.key, visit) for visit in range(VISITS)]
        return [self.results[visit].rows[name] for visit in visits if visit in self.results]

    def memory(self, load: Load, method: Method) -> Peak | None:
        """Peak extra memory of one call; None where it is not run."""
        return None if self.reason(load, method) else extra_memory(load, str(method), self.settings.threads)

    def _too_slow(self, load: Load, method: Method) -> str | None:
        length, seconds = self._shorter(load, method)
        if length is None:
            return None
        expected = predicted(method, seconds, load.length / length)
        return f"predicted {expected:,.0f} s per call" if expected > self.settings.call_limit else None

    def _shorter(self, load: Load, method: Method) -> tuple[int | None, float]:
        """The longest shorter length at which the method was run, and its seconds there; else one call, untold."""
        shorter = [n for n in sorted(self.settings.lengths, reverse=True) if n < load.length]
        for length in shorter:
            if visits := self.visits(replace(load, length=length), str(method)):
                return length, statistics.median(visits[0])
        if shorter or load.length <= PROBE:
            return None, 0.0
        calls = Calls(replace(load, length=PROBE))
        return PROBE, second_call(calls.call_of(str(method)), load.device, calls.clear)


def of_visit(load: Load, visit: int) -> Load:
    """The load of a visit, whose inputs are others than those of each other visit."""
    return replace(load, seed=(VISITS * load.seed + visit) % 2**63)


def _reason(visits: list[Timed]) -> str | None:
    return next((timed.reason for timed in visits if timed.reason is not None), None)
