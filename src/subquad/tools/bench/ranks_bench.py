"""`subquad bench` under torchrun: methods and exact attention with tokens split over the ranks.

Every rank makes only its own tokens, so inputs may be longer than one of them holds. A time is that of the slowest
rank. All ranks make the same calls in the same order: what they decide, they decide from numbers that all of them have.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from subquad.core.errors import InputError, as_input_error
from subquad.distributed import MODES as ALL_MODES
from subquad.distributed import Sequence, traffic
from subquad.methods import Full, Method, parse_method
from subquad.methods.full import EXACT
from subquad.tools.bench.benched_plans import resolved
from subquad.tools.bench.calls import NO_MEMORY, Calls, Load, hindrance, in_words, loads_of, threads
from subquad.tools.bench.ranks_page import KIND
from subquad.tools.bench.run import check
from subquad.tools.bench.settings import BenchSettings
from subquad.tools.measure.fidelity import relative_error
from subquad.tools.measure.group import MeasuringGroup
from subquad.tools.measure.timing import predicted, spread, timed_rounds
from subquad.tools.runs import machine
from subquad.tools.runs.jobs import Job, JobKind, Progress
from subquad.tools.runs.options import as_command
from subquad.tools.runs.runner import JobRun

Call = Callable[[], Tensor]
MODES = tuple(mode for mode in ALL_MODES if mode != "auto")
ROUNDS, FEW = 9, 3  # of a length, in addition to the warm-up
JOBS_VERSION = 1  # changes with what the results of jobs hold, so that a run of another version is not resumed


@dataclass
class Row:
    """One method at one length in one mode.

    Attributes:
        bytes: bytes that are sent in a call, of the rank that sends most.
        exchanges: its exchanges in a call.
        error: ‖out − exact‖ / ‖exact‖ over the tokens of all ranks; None where exact attention was not run.
        reason: the reason why it was not run.
    """

    method: str
    mode: str
    dtype: str
    passes: str
    length: int
    ms: float | None = None
    ms_low: float | None = None
    ms_high: float | None = None
    bytes: int | None = None
    exchanges: int | None = None
    error: float | None = None
    reason: str | None = None


ROWS: JobKind[list[Row]] = JobKind(
    "ranks", list[Row], lambda load: f"timing each method in each mode at {in_words(load)}", timed=True
)


def measure(settings: BenchSettings, out: Path, progress: Progress, group: MeasuringGroup) -> "RanksBench":
    """Measure all rows, the same on all ranks. Finished units are kept under `out`.

    Raises:
        InputError: something in the settings does not work; the message has the remedy.
    """
    check(settings)
    settings = resolved(settings)
    if min(settings.lengths) < group.count:
        raise InputError(f"{min(settings.lengths)} tokens do not go on {group.count} ranks; give more tokens")
    with as_input_error(), threads(settings.threads):
        bench = RanksBench(settings, list(dict.fromkeys([Full(), *map(parse_method, settings.methods)])), group)
        bench.finish(out, progress, group=group)
    return bench


@dataclass
class RanksBench(JobRun):
    """Settings, methods with exact attention first, the ranks, and the results of the units so far."""

    settings: BenchSettings
    methods: list[Method]
    group: MeasuringGroup

    def fingerprint(self) -> dict[str, Any]:
        """All that the results depend on."""
        return {
            "settings": asdict(self.settings) | {"methods": [str(method) for method in self.methods]},
            "machine": [machine.versions(), machine.hardware(self.settings.device)],
            "ranks": self.group.count,
            "units": JOBS_VERSION,
        }

    def report(self, asked: BenchSettings) -> dict[str, Any]:
        """All rows, with what they depend on: plain data."""
        return {
            "kind": KIND,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": as_command("bench", asked, self.group.count),
            "ranks": self.group.count,
            "settings": asdict(self.settings),
            "rows": [asdict(row) for load in loads_of(self.settings) for row in self.results[ROWS(load.key)]],
            "versions": machine.versions(),
            "hardware": machine.hardware(self.settings.device),
            "notes": self.resumed_note,
        }

    def jobs(self) -> Iterator[Job[Any]]:
        """The units with what makes them; later ones read the records of shorter lengths."""
        for load in loads_of(self.settings):
            yield ROWS.job(load.key, run=partial(self.rows, load))

    def cost(self, key: str) -> float:
        """In proportion to the tokens."""
        return float(key.rpartition("/")[2])

    def rows(self, load: Load) -> list[Row]:
        """All methods in all modes on one load, round by round, in an order that is the same on all ranks."""
        assert self.group.ranks is not None
        inputs, calls, rows = Calls(load, self.group), dict[str, Call](), dict[str, Row]()
        for method in map(str, self.methods):
            for mode in MODES:
                name, sequence = f"{method} {mode}", Sequence.even(load.length, mode=mode)
                row = rows[name] = Row(method, mode, load.dtype, load.passes, load.length)
                row.reason = self._too_slow(load, row) or _hindrance(partial(_once, inputs, method, sequence))
                if row.reason is None:
                    calls[name] = inputs.call_of(method, sequence)
        self._add_traffic(calls, rows)
        draw, device = random.Random(load.seed), torch.device(load.device)
        count = FEW if self.settings.quick else ROUNDS
        for name, seconds in timed_rounds(calls, count, draw, device, inputs.clear, self.group).items():
            rows[name].ms_low, rows[name].ms, rows[name].ms_high = spread([1e3 * each for each in seconds])
        return list(rows.values())

    def _too_slow(self, load: Load, row: Row) -> str | None:
        """The reason not to run a method, by its time at the longest shorter length."""
        before = [one for one in loads_of(self.settings) if replace(one, length=load.length) == load]
        for one in reversed([one for one in before if one.length < load.length]):
            for known in self.results[ROWS(one.key)]:
                if (known.method, known.mode) == (row.method, row.mode) and known.ms is not None:
                    expected = predicted(parse_method(row.method), known.ms / 1e3, load.length / one.length)
                    return f"predicted {expected:,.0f} s per call" if expected > self.settings.call_limit else None
        return None

    def _add_traffic(self, calls: Mapping[str, Call], rows: Mapping[str, Row]) -> None:
        """Add what each call sends, and how far its output is from exact attention's."""
        exact = None
        for name, call in calls.items():
            with traffic() as sent:
                out = call().detach()
            row = rows[name]
            exact = out if exact is None and row.method == EXACT else exact
            row.bytes, row.exchanges = int(self.group.maximum(float(sent.bytes))), sent.calls
            row.error = None if exact is None else relative_error(out, exact, self.group)


def _once(inputs: Calls, method: str, sequence: Sequence) -> Tensor:
    return inputs.call_of(method, sequence)()


def _hindrance(call: Call) -> str | None:
    """The reason why this call cannot run, the same on all ranks. InputError if one of them runs out of memory."""
    reason = hindrance(call)
    if reason == NO_MEMORY:
        raise InputError(f"{reason}; give shorter inputs or more ranks")
    return reason
