"""`subquad bench --steps`: exact attention of few queries over a cache, as generation runs it at each token.

Such a call reads each key and value once and computes little, so the memory sets its speed. Its measure is the
machine's own read: `torch.sum` over fp32 numbers of as many bytes, on the same threads, in the same rounds. The queries
are the last tokens of the keys, under a causal mask with their offset. As in the layers of a swapped model, which share
them, the checks of subquad's call and its mask are made once and not timed.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.core.errors import InputError
from subquad.masks import Mask
from subquad.methods import resolve
from subquad.methods.full import EXACT, FAST_EXACT
from subquad.tools.bench.benched_plans import resolved
from subquad.tools.bench.calls import DTYPES, hindrance, threads
from subquad.tools.bench.settings import BENCHED, BenchSettings
from subquad.tools.bench.size_checks import check_sizes
from subquad.tools.bench.steps_page import KIND
from subquad.tools.measure.fidelity import relative_error
from subquad.tools.measure.noise import noise_of
from subquad.tools.measure.timing import Effort, speedup, spread, until_steady
from subquad.tools.runs import machine
from subquad.tools.runs.jobs import Job, JobKind, Progress, silent
from subquad.tools.runs.options import as_command
from subquad.tools.runs.records import to_plain
from subquad.tools.runs.runner import JobRun

QUERIES = (1, 4, 16, 32)  # of each head: a token, drafts of assisted decoding, short chunks
READ = "read"  # the name of the read in a round
JOBS_VERSION = 3  # changes with what the results of jobs hold, so that a run of another version is not resumed
THOROUGH = Effort(seconds=0.6, least=3, enough=15)
BRIEF = Effort(seconds=0.15, least=3, enough=5, precision=0.03)


@dataclass
class StepCall:
    """One implementation of exact attention, for some queries over some keys.

    Attributes:
        speedup: SDPA's time / this one's, the median over rounds; None if SDPA was not run.
        gb_per_s: bytes of keys and values / the time.
        of_read: the time of the machine's own read of as many bytes / this one's, the median over rounds.
        error: ‖out − exact‖ / ‖exact‖ to fp64 on the same inputs.
        sdpa_instead: the reason why SDPA computes the call of `full:kernel=subquad`; None if the kernel does.
        reason: the reason why it was not run.
    """

    method: str
    dtype: str
    keys: int
    queries: int
    ms: float | None = None
    ms_low: float | None = None
    ms_high: float | None = None
    speedup: float | None = None
    gb_per_s: float | None = None
    of_read: float | None = None
    error: float | None = None
    sdpa_instead: str | None = None
    reason: str | None = None


@dataclass
class StepCalls:
    """All implementations for one shape, and the read."""

    calls: list[StepCall]
    read_gb_per_s: float
    use: machine.Use


CALLS: JobKind[StepCalls] = JobKind(
    "few-queries",
    StepCalls,
    lambda dtype, keys, queries: f"timing {queries} quer{'y' if queries == 1 else 'ies'} over {keys:,} keys in {dtype}",
    timed=True,
)


def check(settings: BenchSettings) -> None:
    """Raise InputError for what is wrong in the settings, or does not go with --steps."""
    for option, value in (
        ("--methods", settings.methods != BENCHED),
        ("--plan", bool(settings.plans)),
        ("--passes", settings.passes != ("forward",)),
        ("--causal", settings.causal),
        ("--call-limit", settings.call_limit != BenchSettings.call_limit),
    ):
        if value:
            raise InputError(f"{option} is given, but --steps measures forward passes of causal SDPA and {FAST_EXACT}")
    settings = resolved(settings)
    check_sizes(settings)
    assert settings.heads is not None  # `resolved`
    assert settings.kv_heads is not None
    if settings.heads % settings.kv_heads:
        raise InputError(f"--kv-heads {settings.kv_heads} does not divide the {settings.heads} query heads of --heads")
    if min(settings.lengths) < max(QUERIES):
        raise InputError(
            f"--lengths {min(settings.lengths)} is less than the {max(QUERIES)} queries, which are the last of the keys"
        )


def measure(settings: BenchSettings, out: Path, progress: Progress = silent) -> "StepsBench":
    """Measure all calls. Finished units are kept under `out`.

    Raises:
        InputError: something in the settings does not work; the message has the remedy.
    """
    check(settings)
    with threads(settings.threads):
        bench = StepsBench(settings=resolved(settings), load_average=machine.load_average())
        bench.finish(out, progress)
    return bench


@dataclass(kw_only=True)
class StepsBench(JobRun):
    """Settings, and the results of the units so far."""

    settings: BenchSettings

    def fingerprint(self) -> dict[str, Any]:
        """All that the results depend on."""
        hardware = machine.hardware(self.settings.device)
        return {"settings": asdict(self.settings), "machine": [machine.versions(), hardware], "units": JOBS_VERSION}

    @property
    def shapes(self) -> list[tuple[str, int, int]]:
        """Dtype, number of keys and number of queries of each unit."""
        s = self.settings
        return [(d, n, q) for d in dict.fromkeys(s.dtypes) for n in sorted(set(s.lengths)) for q in QUERIES]

    def jobs(self) -> Iterator[Job[Any]]:
        """The units with what makes them."""
        for shape in self.shapes:
            yield CALLS.job(*shape, run=partial(self.calls, *shape))

    def cost(self, key: str) -> float:
        """A fixed time, and more with many keys."""
        return 1.0 + int(key.split("/")[2]) / 10_000

    def calls(self, dtype: str, keys: int, queries: int) -> StepCalls:
        """SDPA, subquad's kernel and the read, in turn."""
        s = self.settings
        inputs = _inputs(s, dtype, keys, queries)
        read_bytes = sum(x.nbytes for x in inputs[1:])
        numbers = torch.ones(read_bytes // 4, device=s.device)
        made: dict[str, Callable[[], Tensor]] = {EXACT: _sdpa(*inputs), FAST_EXACT: _subquad(*inputs)}
        rows = {name: StepCall(name, dtype, keys, queries) for name in made}
        rows[FAST_EXACT].sdpa_instead = _sdpa_instead(*inputs)
        with threads(s.threads), torch.inference_mode():
            used = machine.watch()
            truth = _sdpa(*(x.double() for x in inputs))()
            for name, call in made.items():
                rows[name].reason = hindrance(call)
                if rows[name].reason is None:
                    rows[name].error = relative_error(call().double(), truth)
            able = {name: call for name, call in made.items() if rows[name].reason is None}
            effort = BRIEF if s.quick else THOROUGH
            seconds = until_steady(able | {READ: numbers.sum}, effort, torch.device(s.device))
            use = used()
        for name in able:
            row = rows[name]
            row.ms_low, row.ms, row.ms_high = spread([1e3 * each for each in seconds[name]])
            row.gb_per_s = read_bytes / row.ms / 1e6
            row.of_read = speedup(seconds[name], seconds[READ])
            if EXACT in able:
                row.speedup = speedup(seconds[name], seconds[EXACT])
        read = statistics.median(seconds[READ])
        return StepCalls(list(rows.values()), read_bytes / read / 1e9, use)

    def report(self, settings: BenchSettings) -> dict[str, Any]:
        """All calls, with what they depend on: plain data."""
        by_shape = {shape: self.results[CALLS(*shape)] for shape in self.shapes}
        return {
            "kind": KIND,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": as_command("bench", settings),
            "settings": {name: value for name, value in asdict(self.settings).items() if name not in UNUSED},
            "rows": [asdict(call) for unit in by_shape.values() for call in unit.calls],
            "reads": [
                {"dtype": dtype, "keys": keys, "queries": queries, "gb_per_s": unit.read_gb_per_s}
                for (dtype, keys, queries), unit in by_shape.items()
            ],
            "versions": machine.versions(),
            "hardware": machine.hardware(self.settings.device),
            "noise": to_plain(noise_of(machine.load(self.load_average, [unit.use for unit in by_shape.values()]), [])),
            "notes": self.resumed_note,
        }


UNUSED = ("methods", "plans", "passes", "causal", "call_limit", "steps")


def _inputs(s: BenchSettings, dtype: str, keys: int, queries: int) -> tuple[Tensor, Tensor, Tensor]:
    """Standard normal queries, keys and values, the same numbers for every dtype."""
    assert s.heads is not None  # `resolved`
    assert s.kv_heads is not None
    assert s.head_dim is not None
    generator = torch.Generator(s.device).manual_seed(s.seed)
    shapes = ((s.heads, queries), (s.kv_heads, keys), (s.kv_heads, keys))
    query, key, value = (
        torch.randn(s.batch, heads, tokens, s.head_dim, generator=generator, device=s.device).to(DTYPES[dtype])
        for heads, tokens in shapes
    )
    return query, key, value


def _sdpa(query: Tensor, key: Tensor, value: Tensor) -> Callable[[], Tensor]:
    """SDPA; several queries need a mask, because its causal one begins at the first key."""
    tokens, keys = query.shape[2], key.shape[2]
    mask = None
    if tokens > 1:
        positions = torch.arange(keys - tokens, keys, device=query.device)
        mask = torch.arange(keys, device=query.device) <= positions[:, None]
    options: dict[str, Any] = {"attn_mask": mask, "enable_gqa": query.shape[1] != key.shape[1]}
    return partial(F.scaled_dot_product_attention, query, key, value, **options)


def _subquad(query: Tensor, key: Tensor, value: Tensor) -> Callable[[], Tensor]:
    """Exact attention by subquad's kernel, prepared once for these shapes, as in the layers of a swapped model."""
    method = resolve(FAST_EXACT)
    attention = method.prepare_exact(*method.prepare(query, key, value, **_options(query, key)))
    return partial(attention, query, key, value)


def _sdpa_instead(query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """The reason why SDPA computes the call of `_subquad`; None if subquad's kernel does."""
    method = resolve(FAST_EXACT)
    return method.sdpa_instead(*method.prepare(query, key, value, **_options(query, key)))


def _options(query: Tensor, key: Tensor) -> dict[str, Any]:
    """The options of subquad's call: the queries are the last tokens of the keys."""
    mask = Mask.causal(offset=key.shape[2] - query.shape[2])
    return {"mask": mask, "enable_gqa": query.shape[1] != key.shape[1]}
