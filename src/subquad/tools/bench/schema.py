"""The shape of `bench.json`, which the tables, the CSV and the plots of `subquad bench` are made from.

A figure that was not measured is None, never 0.
"""

from dataclasses import dataclass
from typing import Any, Literal

from subquad.tools.measure.noise import Noise, Verdict

KIND, SCHEMA = "subquad bench", 1


@dataclass(frozen=True)
class BenchCell:
    """One method at one length, in one dtype, forward or forward+backward."""

    method: str  # as the command line writes it; "full" is SDPA
    dtype: str
    passes: str  # "forward" or "forward+backward"
    length: int  # tokens
    status: Literal["measured", "not run"]
    reason: str | None = None  # why it was not run
    speedup: float | None = None  # median over rounds of SDPA's time / this one's; absent where SDPA was not run
    speedup_low: float | None = None
    speedup_high: float | None = None
    visits: list[float] | None = None  # the speed-up of each visit: medians of rounds that followed each other
    noise: float | None = None  # of SDPA: how far it differs from itself, timed again in each round, as a factor
    verdict: Verdict | None = None  # whether the speed-up is clear of the noise
    ms: float | None = None  # SDPA's median / the speed-up; of SDPA, and where it was not run, the median over rounds
    ms_low: float | None = None  # the same with the quartiles
    ms_high: float | None = None
    repeats: int | None = None
    us_per_token: float | None = None
    extra_bytes: int | None = None  # peak memory of a call, above what its inputs take
    memory: str | None = None  # how memory was counted, or why it was not
    bytes_per_token: float | None = None
    growth: float | None = None  # exponent of the time from the next shorter length to this one


@dataclass(frozen=True)
class Crossover:
    """From where on a method is clearly faster than SDPA, at every longer length at which both were run."""

    method: str
    dtype: str
    passes: str
    state: Literal["at", "at or below", "below the shortest", "not reached", "unknown"]
    tokens: float | None  # "at": between two lengths, interpolated; "at or below": a length that was run
    shortest: int | None = None  # the lengths with a speed-up
    longest: int | None = None
    ties: list[int] | None = None  # the lengths at which the speed-up is within the noise


@dataclass(frozen=True)
class Change:
    """A cell against the same cell of an earlier run. Ratios above 1 are faster now, or take more memory now."""

    method: str
    dtype: str
    passes: str
    length: int
    verdict: Literal["faster", "slower", "within the noise", "no speed-up to compare"]
    speedups: list[float | None]  # then, now
    speedup_ratio: float | None
    time_ratio: float | None  # time then / time now
    memory_ratio: float | None  # memory now / then


@dataclass(frozen=True)
class Changes:
    """The results of `--compare`."""

    old: str
    created: str  # when the earlier run was
    tolerance: float  # a change of the speed-up by less is none
    cells: list[Change]
    only_old: list[str]
    only_new: list[str]
    notes: list[str]  # what else differs


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """All of `bench.json`."""

    kind: str = KIND
    schema: int = SCHEMA
    created: str  # ISO 8601, UTC
    command: str
    versions: dict[str, str]
    hardware: dict[str, str]
    backend: str  # the one that ran
    backends: dict[str, str]  # all, with "available" or the reason against
    settings: dict[str, Any]
    methods: dict[str, dict[str, Any]]  # name -> its settings
    cells: list[BenchCell]
    crossovers: list[Crossover]
    notes: list[str]
    noise: Noise | None = None
    changes: Changes | None = None
    asked: dict[str, Any] | None = None  # the settings that the command was given
