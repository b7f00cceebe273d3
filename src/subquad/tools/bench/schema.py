"""The shape of `bench.json`, which the tables, the CSV and the plots of `subquad bench` are made from.

A figure that was not measured is absent or None, never 0.
"""

from typing import Any, Literal, NotRequired, TypedDict

from subquad.tools.measure.noise import Noise, Verdict

KIND, SCHEMA = "subquad bench", 1


class BenchCell(TypedDict):
    """One method at one length, in one dtype, forward or forward+backward."""

    method: str  # as the command line writes it; "full" is SDPA
    dtype: str
    passes: str  # "forward" or "forward+backward"
    length: int  # tokens
    status: Literal["measured", "not run"]
    reason: NotRequired[str]  # why it was not run
    ms: NotRequired[float]  # SDPA's median / the speed-up; of SDPA, and where it was not run, the median over rounds
    ms_low: NotRequired[float]  # the same with the quartiles
    ms_high: NotRequired[float]
    repeats: NotRequired[int]
    us_per_token: NotRequired[float]
    growth: NotRequired[float]  # exponent of the time from the next shorter length to this one
    speedup: NotRequired[float]  # median over rounds of SDPA's time / this one's; absent where SDPA was not run
    speedup_low: NotRequired[float]
    speedup_high: NotRequired[float]
    visits: NotRequired[list[float]]  # the speed-up of each visit: medians of rounds that followed each other
    verdict: NotRequired[Verdict]  # whether the speed-up is clear of the noise
    noise: NotRequired[float]  # of SDPA: how far it differs from itself, timed again in each round, as a factor
    extra_bytes: NotRequired[int | None]  # peak memory of a call, above what its inputs take
    bytes_per_token: NotRequired[float]
    memory: NotRequired[str]  # how memory was counted, or why it was not


class Crossover(TypedDict):
    """From where on a method is clearly faster than SDPA, at every longer length at which both were run."""

    method: str
    dtype: str
    passes: str
    state: Literal["at", "at or below", "below the shortest", "not reached", "unknown"]
    tokens: float | None  # "at": between two lengths, interpolated; "at or below": a length that was run
    shortest: NotRequired[int]  # the lengths with a speed-up
    longest: NotRequired[int]
    ties: NotRequired[list[int]]  # the lengths at which the speed-up is within the noise


class Change(TypedDict):
    """A cell against the same cell of an earlier run. Ratios above 1 are faster now, or take more memory now."""

    method: str
    dtype: str
    passes: str
    length: int
    verdict: Literal["faster", "slower", "within the noise", "no speed-up to compare"]
    speedups: list[float | None]  # then, now
    speedup_ratio: float | None
    time_ratio: float  # time then / time now
    memory_ratio: float | None  # memory now / then


class Changes(TypedDict):
    """The results of `--compare`."""

    old: str
    created: str  # when the earlier run was
    tolerance: float  # a change of the speed-up by less is none
    cells: list[Change]
    only_old: list[str]
    only_new: list[str]
    notes: list[str]  # what else differs


class BenchReport(TypedDict):
    """All of `bench.json`."""

    kind: str  # KIND
    schema: int  # SCHEMA
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
    noise: NotRequired[Noise]
    changes: NotRequired[Changes]
