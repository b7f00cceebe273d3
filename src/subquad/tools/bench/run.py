"""`subquad bench`: time and memory of methods against length, beside SDPA in the same run.

The work is cut into units whose results are kept until the report is written, so that an interrupted run resumes:

    time/<dtype>/<passes>/<length>/<visit>       all methods and SDPA in turn, round by round
    memory/<dtype>/<passes>/<length>/<method>    one call in a process of its own

With an executor, units of memory are measured side by side, and units of time one at a time on a machine, panel beside
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

from subquad.core.errors import InputError, as_input_error, check_device
from subquad.core.spelling import instead
from subquad.kernels.dispatch import choose
from subquad.methods import Full, Method, parse_method
from subquad.tools.bench.calls import DTYPES, Calls, Load, hindrance, in_words, loads_of, out_of_memory, threads
from subquad.tools.bench.memory import extra_memory
from subquad.tools.bench.plans import resolved
from subquad.tools.bench.schema import EXACT
from subquad.tools.measure.noise import AGAIN
from subquad.tools.measure.resident import Peak
from subquad.tools.measure.timing import Effort, predicted, stopwatch, until_steady
from subquad.tools.runs import machine
from subquad.tools.runs.executors import LOCAL, Executor
from subquad.tools.runs.jobs import Job, JobKey, JobKind, Progress, silent
from subquad.tools.runs.runner import JobRun
from subquad.tools.runs.settings import PASSES, BenchSettings

VISITS = 3
JOBS_VERSION = 2  # changes with what the results of jobs hold, so that a run of another version is not resumed
THOROUGH = Effort(seconds=1.4, least=2, enough=9)  # a visit
BRIEF = Effort(seconds=0.2, least=2, enough=3, precision=0.03)
PROBE = 2048  # tokens: a first length above it is predicted from a call of this length


MOST_NUMBERS = 2**50  # of a tensor: a thousand times the memory of the largest machines
MOST_THREADS = 4096


def check(settings: BenchSettings) -> None:
    """Raise InputError for what is wrong in the settings: in methods, plans, or what does not go together."""
    settings = resolved(settings)
    _check_sizes(settings)
    with as_input_error():
        for method in settings.methods:
            parse_method(method)


def _check_sizes(s: BenchSettings) -> None:
    """Raise InputError if settings do not work together; the message names both sides."""
    assert s.heads is not None  # `resolved`
    assert s.head_dim is not None
    for option, values in (("methods", s.methods), ("lengths", s.lengths)):
        if not values:
            raise InputError(f"nothing to measure: --{option} names none")
    for option, values, known in (("pass", s.passes, PASSES), ("dtype", s.dtypes, tuple(DTYPES))):
        if not values:
            raise InputError(f"nothing to measure: no {option} is named; there are {', '.join(known)}")
        for name in values:
            if name not in known:
                raise InputError(f"no {option} {name!r}{instead(name, known, '')}")
    sizes = [("length", n) for n in s.lengths] + [("batch", s.batch), ("heads", s.heads)]
    sizes += [("head-dim", s.head_dim)] + ([] if s.threads is None else [("threads", s.threads)])
    for what, size in sizes:
        if size < 1:
            raise InputError(f"{what} {size} must be at least 1")
    numbers = s.batch * s.heads * max(s.lengths) * s.head_dim
    if numbers > MOST_NUMBERS:
        raise InputError(
            f"batch {s.batch}, heads {s.heads}, length {max(s.lengths)} and head-dim {s.head_dim} make "
            f"{numbers:,} numbers; no memory holds more than {MOST_NUMBERS:,}"
        )
    if s.threads is not None and s.threads > MOST_THREADS:
        raise InputError(f"threads {s.threads} must be at most {MOST_THREADS:,}")
    if not s.call_limit > 0:
        raise InputError(f"call-limit {s.call_limit:g} must be above 0 seconds")
    if s.seed < 0:
        raise InputError(f"seed {s.seed} must be at least 0")
    if s.seed >= 2**63:
        raise InputError(f"seed {s.seed} must be less than 2⁶³")
    if s.device.partition(":")[0] not in ("cpu", "cuda"):
        raise InputError(f"cannot time device {s.device!r}: only cpu and cuda devices are waited for")
    check_device(s.device)


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
    _check_sizes(settings)
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
    executor: str = ""  # what made the units, where it was not this process

    @property
    def loads(self) -> list[Load]:
        """What is measured."""
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
        with threads(self.settings.threads), machine.watched() as use:
            rows = self._rows(load, visit)
        return Visit(rows, use)

    def _rows(self, load: Load, visit: int) -> dict[str, Timed]:
        try:
            calls = Calls(load)
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
        """Why a method was not run."""
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
        return PROBE, _second_call(replace(load, length=PROBE), method)


def _reason(visits: list[Timed]) -> str | None:
    return next((timed.reason for timed in visits if timed.reason is not None), None)


def _second_call(load: Load, method: Method) -> float:
    """Seconds of a call after one that warms up; 0 where it cannot run, which says itself why."""
    calls = Calls(load)
    call = calls.call_of(str(method))
    if hindrance(call) is not None:
        return 0.0
    calls.clear()
    return stopwatch(call, torch.device(load.device))[0]
