"""`subquad bench` under torchrun: methods whose tokens are split over the ranks, beside exact attention split alike.

Every rank makes only its own tokens, so inputs may be longer than one of them holds. A time is that of the slowest
rank. All ranks make the same calls in the same order: what they decide, they decide from numbers that all of them have.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from subquad.errors import InputError, as_input_error
from subquad.functional import attention
from subquad.masks import Mask
from subquad.measure.timing import predicted, spread, stopwatch
from subquad.methods import Full, Method, parse_method
from subquad.methods.in_parallel import refusal_of_method
from subquad.parallel import MODES as ALL_MODES
from subquad.parallel import Sequence, traffic
from subquad.workflows import machine
from subquad.workflows.bench import check
from subquad.workflows.bench_calls import DTYPES, Load, out_of_memory, threads
from subquad.workflows.bench_plans import resolved
from subquad.workflows.settings import BACKWARD, BenchSettings
from subquad.workflows.store import Progress

MODES = tuple(mode for mode in ALL_MODES if mode != "auto")
ROUNDS, FEW = 9, 3  # of a length, beside the one that warms up
WAIT = timedelta(minutes=10)


@dataclass
class Row:
    """One method at one length in one mode.

    Attributes:
        bytes: that the rank that sends most sends in a call.
        exchanges: that it makes in one.
        error: ‖out − exact‖ / ‖exact‖ over the tokens of all ranks; None where exact attention was not run.
        reason: why it was not run.
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


@dataclass(frozen=True)
class Candidate:
    """A method in a mode."""

    method: Method
    mode: str


def measure(settings: BenchSettings, progress: Progress) -> dict[str, Any]:
    """All rows, with what they depend on: plain data, the same on all ranks.

    Raises:
        InputError: something in the settings does not work; the message has the remedy.
    """
    check(settings)
    settings = resolved(settings)
    with as_input_error(), threads(settings.threads):
        methods = list(dict.fromkeys([Full(), *map(parse_method, settings.methods)]))
        dist.init_process_group("nccl" if settings.device.startswith("cuda") else "gloo", timeout=WAIT)
        try:
            rows = list(_rows(settings, methods, progress))
            ranks = dist.get_world_size()
        finally:
            dist.destroy_process_group()
    return {
        "ranks": ranks,
        "settings": asdict(settings),
        "rows": [asdict(row) for row in rows],
        "versions": machine.versions(),
        "hardware": machine.hardware(settings.device),
    }


def _rows(settings: BenchSettings, methods: list[Method], progress: Progress) -> Iterator[Row]:
    heads, width = settings.heads or 0, settings.head_dim or 0  # `resolved`
    loads = [
        Load(length, dtype, passes, settings.batch, heads, width, settings.device, settings.seed, settings.causal)
        for dtype in dict.fromkeys(settings.dtypes)
        for passes in dict.fromkeys(settings.passes)
        for length in sorted(set(settings.lengths))
    ]
    if min(settings.lengths) < dist.get_world_size():
        raise InputError(f"{min(settings.lengths)} tokens do not go on {dist.get_world_size()} ranks; give more tokens")
    seconds: dict[tuple[Candidate, str, str], tuple[int, float]] = {}  # at the longest length so far
    for done, load in enumerate(loads):
        progress(f"{load.length:,} tokens ({load.passes}, {load.dtype})", done, len(loads))
        for candidate, row in _measured(settings, methods, load, seconds):
            if row.ms is not None:
                seconds[candidate, load.dtype, load.passes] = load.length, row.ms / 1e3
            yield row


def _measured(
    settings: BenchSettings,
    methods: list[Method],
    load: Load,
    seconds: dict[tuple[Candidate, str, str], tuple[int, float]],
) -> Iterator[tuple[Candidate, Row]]:
    """All candidates on one load, round by round, in an order that is random and the same on all ranks."""
    inputs = _inputs(load)
    calls: dict[Candidate, Callable[[], Tensor]] = {}
    rows = {
        Candidate(m, mode): Row(str(m), mode, load.dtype, load.passes, load.length) for m in methods for mode in MODES
    }
    for candidate, row in rows.items():
        of = Sequence.even(load.length, mode=candidate.mode)
        mask = Mask.causal() if load.causal else Mask()
        row.reason = refusal_of_method(candidate.method, mask, of, inputs[0].shape[1])
        if before := seconds.get((candidate, load.dtype, load.passes)):
            expected = predicted(candidate.method, before[1], load.length / before[0])
            if expected > settings.call_limit:
                row.reason = f"predicted {expected:,.0f} s per call"
        if row.reason is None:
            calls[candidate] = partial(_call, candidate.method, load, inputs, of)
            row.reason = _hindrance(calls[candidate])
        if row.reason is not None:
            calls.pop(candidate, None)
    _add_traffic(calls, rows)
    for candidate, times in _times(calls, load, FEW if settings.quick else ROUNDS).items():
        found = spread([1e3 * each for each in times])
        rows[candidate].ms_low, rows[candidate].ms, rows[candidate].ms_high = found.low, found.median, found.high
    yield from rows.items()


def _inputs(load: Load) -> list[Tensor]:
    """This rank's part of standard normal queries, keys, values and the gradient of the output."""
    of = Sequence.even(load.length)
    generator = torch.Generator().manual_seed(load.seed * dist.get_world_size() + of.rank)
    shape = (load.batch, load.heads, of.lengths[of.rank], load.head_dim)
    drawn = [torch.randn(shape, generator=generator).to(load.device, DTYPES[load.dtype]) for _ in range(4)]
    return [x.requires_grad_(load.passes == BACKWARD) for x in drawn[:3]] + drawn[3:]


def _call(method: Method, load: Load, inputs: list[Tensor], of: Sequence) -> Tensor:
    *parts, gradient = inputs
    with torch.set_grad_enabled(load.passes == BACKWARD):
        out = attention(*parts, method=method, is_causal=load.causal, parallel=of)
    if load.passes == BACKWARD:
        out.backward(gradient)
        for part in parts:
            part.grad = None
    return out.detach()


def _hindrance(call: Callable[[], Tensor]) -> str | None:
    """Why this call cannot run, which all ranks find alike; memory that runs out on one of them ends the run."""
    try:
        call()
    except (ValueError, TypeError) as error:
        return " ".join(str(error).split())
    except (RuntimeError, MemoryError) as error:
        raise InputError(
            f"rank {dist.get_rank()}: {out_of_memory(error)}; give shorter inputs or more ranks"
        ) from error
    return None


def _add_traffic(calls: dict[Candidate, Callable[[], Tensor]], rows: dict[Candidate, Row]) -> None:
    """What each call sends, and how far its output is from exact attention's."""
    exact = None
    for candidate, call in calls.items():
        with traffic() as sent:
            out = call().double()
        if isinstance(candidate.method, Full) and exact is None:
            exact = out
        rows[candidate].bytes = int(_over_ranks(float(sent.bytes), dist.ReduceOp.MAX))
        rows[candidate].exchanges = sent.calls
        if exact is not None:
            error, size = (_over_ranks(float(x.square().sum()), dist.ReduceOp.SUM) for x in (out - exact, exact))
            rows[candidate].error = (error / size) ** 0.5


def _times(calls: dict[Candidate, Callable[[], Tensor]], load: Load, rounds: int) -> dict[Candidate, list[float]]:
    """Seconds of the slowest rank in each round."""
    found: dict[Candidate, list[float]] = {candidate: [] for candidate in calls}
    order, shuffle = list(calls), random.Random(load.seed)
    for _ in range(rounds):
        shuffle.shuffle(order)
        for candidate in order:
            dist.barrier()
            taken, _out = stopwatch(calls[candidate], torch.device(load.device))
            found[candidate].append(_over_ranks(taken, dist.ReduceOp.MAX))
    return found


def _over_ranks(number: float, how: Any) -> float:
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    found = torch.tensor(number, dtype=torch.float64, device=device)
    dist.all_reduce(found, how)
    return float(found)
