"""Time several calls in turn, so that all are exposed to the same noise."""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NotRequired, TypedDict, TypeVar

import torch

from subquad.methods import Method
from subquad.tools.measure.group import ALONE, MeasuringGroup
from subquad.tools.measure.noise import Verdict, verdict

Call = TypeVar("Call")


class Cost(TypedDict):
    """Time and memory of one method at one length, relative to exact attention in the same run."""

    ms: float  # exact attention's median divided by the speed-up, see `beside`; its own: the median
    ms_low: float  # the same with the quartiles
    ms_high: float
    repeats: int
    speedup: float  # median of exact's time / this one's, run by run, so > 1 is faster than exact
    verdict: NotRequired[Verdict]  # whether the speed-up is clear of the noise; exact attention has none
    speedup_fp32: NotRequired[float]  # of a row in 16 bits, over exact attention in fp32; `speedup` is in its dtype
    verdict_fp32: NotRequired[Verdict]
    extra_mib: float | None  # peak of memory allocated on top of what was there before


def interleaved(
    calls: Mapping[str, Callable[[], Any]], rounds: int, device: torch.device | None = None
) -> dict[str, list[float]]:
    """Seconds of each call in each round: every round runs all of them once, one after the other. No warm-up."""
    return by_name([one_round(calls, device) for _ in range(rounds)])


def one_round(
    calls: Mapping[str, Callable[[], Any]],
    device: torch.device | None = None,
    between: Callable[[], Any] = lambda: None,
    group: MeasuringGroup = ALONE,
) -> dict[str, float]:
    """Seconds of each call, one after the other; before each one `between` runs, outside the stopwatch."""
    seconds = {}
    for name, call in calls.items():
        between()
        seconds[name] = stopwatch(call, device, group)[0]
    return seconds


def shuffled(calls: Mapping[str, Call], draw: random.Random) -> dict[str, Call]:
    """The calls in random order.

    With one order for all rounds, a call may always come when the system takes the processor away: on a machine with
    many processes, rounds of some milliseconds keep step with its time slices, and one call of 1 ms is seen to take 20.
    In an order that is random in each round, what hits one call hits exact attention's two timings as often.
    """
    return {name: calls[name] for name in draw.sample(list(calls), len(calls))}


def by_name(rounds: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Rounds of seconds as the seconds of each call, round by round."""
    return {name: [seconds[name] for seconds in rounds] for name in rounds[0]} if rounds else {}


@dataclass(frozen=True)
class Effort:
    """The time budget of a measurement, and its stopping rule."""

    seconds: float  # a call's share: the rounds of three calls may take three times as long
    least: int = 3  # rounds, however long they take
    enough: int = 9  # rounds, if the medians are stable
    most: int = 500
    precision: float = 0.01  # a median is stable when its quartiles' distance / √rounds is below this share of it


def until_steady(
    calls: Mapping[str, Callable[[], Any]],
    effort: Effort,
    device: torch.device | None = None,
    between: Callable[[], Any] = lambda: None,
    group: MeasuringGroup = ALONE,
) -> dict[str, list[float]]:
    """Seconds of each call in each round, for as many rounds as the medians need or time allows.

    Every round runs all calls once, in an order of its own. One to three rounds before them warm up and do not count.
    """
    draw = random.Random(0)
    start = time.perf_counter()
    allowed = effort.seconds * len(calls)

    def left(share: float = 1.0) -> bool:
        return group.broadcast_from_main(lambda: time.perf_counter() - start < share * allowed)

    for _ in range(3):
        one_round(shuffled(calls, draw), device, between, group)
        if not left(0.1):
            break
    rounds: list[dict[str, float]] = []
    while len(rounds) < effort.least or (left() and len(rounds) < effort.most and not _steady(rounds, effort)):
        rounds.append(one_round(shuffled(calls, draw), device, between, group))
    seconds = by_name(rounds)
    return {name: seconds[name] for name in calls if name in seconds}


def _steady(rounds: Sequence[Mapping[str, float]], effort: Effort) -> bool:
    if len(rounds) < effort.enough:
        return False
    spreads = [spread(seconds) for seconds in by_name(rounds).values()]
    return all(s.high - s.low <= effort.precision * s.median * len(rounds) ** 0.5 for s in spreads)


def predicted(method: Method, seconds: float, growth: float) -> float:
    """Seconds of a call at `growth` times the length, from those at this length and how the method's work grows."""
    return seconds * growth ** (1 if method.traits.subquadratic else 2)


def stopwatch(
    call: Callable[[], Any], device: torch.device | None = None, group: MeasuringGroup = ALONE
) -> tuple[float, Any]:
    """Seconds that a call took, the device's work included, and what it returned; of a group the slowest one's."""
    group.barrier()
    _wait(device)
    start = time.perf_counter()
    result = call()
    _wait(device)
    return group.maximum(time.perf_counter() - start), result


def cost(
    seconds: Sequence[float], exact: Sequence[float], extra_mib: float | None = None, noise: float | None = None
) -> Cost:
    """Seconds by round, and exact attention's in the same rounds, as time in ms, quartiles and a speed-up.

    Args:
        seconds: of this call.
        exact: of exact attention.
        extra_mib: peak memory.
        noise: how far exact attention differs from itself, as `noise.against_itself` has it; then there is a verdict.
    """
    times, faster = beside(seconds, exact)
    result: Cost = {
        "ms": 1e3 * times.median,
        "ms_low": 1e3 * times.low,
        "ms_high": 1e3 * times.high,
        "repeats": len(seconds),
        "speedup": faster.median,
        "extra_mib": extra_mib,
    }
    if noise is not None:
        result["verdict"] = verdict(faster.median, ratios(seconds, exact), noise)
    return result


def exact_cost(seconds: Sequence[float], extra_mib: float | None = None) -> Cost:
    """The cost of exact attention itself, whose speed-up is 1."""
    times = spread([1e3 * each for each in seconds])
    return {
        "ms": times.median,
        "ms_low": times.low,
        "ms_high": times.high,
        "repeats": len(seconds),
        "speedup": 1.0,
        "extra_mib": extra_mib,
    }


def beside(seconds: Sequence[float], exact: Sequence[float]) -> tuple["Spread", "Spread"]:
    """Quartiles of a call's seconds, and of its speed-up over exact attention, from the same pairs.

    The speed-up is the median over rounds of exact / seconds: a slow moment of the machine hits both sides of a ratio.
    The median of `seconds` alone may contradict it: in rounds of (seconds, exact) = (1, 0.9), (1, 11), (10, 9) it is
    9 times below exact attention's, though this call is the slower one in most rounds. So the time is told as exact
    attention's median divided by the speed-up.
    """
    faster, base = spread(ratios(seconds, exact)), spread(exact).median
    return Spread(base / faster.high, base / faster.median, base / faster.low), faster


def ratios(seconds: Sequence[float], exact: Sequence[float]) -> list[float]:
    """Exact attention's time / this one's, round by round, so > 1 is faster than exact."""
    return [e / o for e, o in zip(exact, seconds, strict=True)]


class Spread(NamedTuple):
    """Quartiles of some numbers."""

    low: float
    median: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """25th percentile, median and 75th percentile."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    return Spread(*statistics.quantiles(values, n=4, method="inclusive"))


def _wait(device: torch.device | None) -> None:
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
