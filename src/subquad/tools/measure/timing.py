"""Run calls in rounds, in each of which every call runs once, so that all are exposed to the same noise; time them."""

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from subquad.methods import Method
from subquad.tools.measure.deadline import Deadline
from subquad.tools.measure.group import ALONE, MeasuringGroup
from subquad.tools.measure.noise import Verdict, verdict

Run = TypeVar("Run")
C = TypeVar("C")  # what a run costs
R = TypeVar("R")  # what it returns


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Time and memory of one method at one length, relative to exact attention in the same run; NaN is unknown."""

    ms: float = math.nan  # exact attention's median divided by the speed-up, see `beside`; its own: the median
    ms_low: float = math.nan  # the same with the quartiles
    ms_high: float = math.nan
    repeats: int = 0
    speedup: float = math.nan  # median of exact's time / this one's, run by run, so > 1 is faster than exact
    extra_mib: float | None = math.nan  # peak of memory allocated on top of what was there before; None: not counted
    verdict: Verdict | None = None  # whether the speed-up is clear of the noise; exact attention has none
    speedup_fp32: float | None = None  # of a row in 16 bits, over exact attention in fp32; `speedup` is in its dtype
    verdict_fp32: Verdict | None = None

    @property
    def over_fp32(self) -> tuple[float, Verdict | None]:
        """The speed-up over exact attention in fp32, with its verdict."""
        if self.speedup_fp32 is None:
            return self.speedup, self.verdict
        return self.speedup_fp32, self.verdict_fp32


def one_round(
    runs: Mapping[str, Run], measure: Callable[[Run], tuple[C, R] | None], draw: random.Random | None = None
) -> tuple[dict[str, C], dict[str, R]]:
    """Measure every run once, in a random order if `draw` is given: what each costs and returns, in that order.

    `measure` returns both, as a `stopwatch` does, or None for a run that is refused, which is left out.
    """
    costs, outputs = dict[str, C](), dict[str, R]()
    for name, run in (runs if draw is None else shuffled(runs, draw)).items():
        if (measured := measure(run)) is not None:
            costs[name], outputs[name] = measured
    return costs, outputs


def shuffled(runs: Mapping[str, Run], draw: random.Random) -> dict[str, Run]:
    """The runs in random order.

    With one order for all rounds, a call may always come when the system takes the processor away: on a machine with
    many processes, rounds of some milliseconds keep step with its time slices, and one call of 1 ms is seen to take 20.
    In an order that is random in each round, what hits one call hits exact attention's two timings as often.
    """
    return {name: runs[name] for name in draw.sample(list(runs), len(runs))}


def timed_rounds(
    calls: Mapping[str, Callable[[], Any]],
    count: int,
    draw: random.Random | None = None,
    device: torch.device | None = None,
    between: Callable[[], Any] = lambda: None,
    group: MeasuringGroup = ALONE,
) -> dict[str, list[float]]:
    """Seconds of each call in each of `count` rounds, in random orders if `draw` is given. No warm-up.

    Before each call `between` runs, outside the stopwatch. What the calls return is not kept.
    """

    def timed(call: Callable[[], Any]) -> tuple[float, None]:
        between()
        return stopwatch(call, device, group)[0], None

    rounds = [one_round(calls, timed, draw)[0] for _ in range(count)]
    return {name: [seconds[name] for seconds in rounds] for name in calls}


@dataclass(frozen=True)
class Effort:
    """The time budget of a measurement, and its stopping rule."""

    seconds: float  # a call's share: the rounds of three calls may take three times as long
    least: int = 3  # rounds, however long they take
    enough: int = 9  # rounds, if the medians are stable
    most: int = 500
    precision: float = 0.01  # a median is stable when its quartiles' distance / √rounds is below this share of it

    def suffices(self, seconds: Sequence[float]) -> bool:
        """True if the median of a call's seconds, round by round, is stable."""
        if len(seconds) < self.enough:
            return False
        low, median, high = spread(seconds)
        return high - low <= self.precision * median * len(seconds) ** 0.5


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
    deadline = Deadline(effort.seconds * len(calls), group)
    a_round = partial(timed_rounds, calls, 1, random.Random(0), device, between, group)
    for _ in range(3):
        a_round()
        if deadline.left <= 0.9 * deadline.seconds:
            break
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for done in deadline.within(range(max(effort.least, effort.most)), effort.least):
        if done >= effort.least and all(map(effort.suffices, seconds.values())):
            break
        for name, taken in a_round().items():
            seconds[name] += taken
    return seconds


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

    There is a verdict if `noise` is given: how far exact attention differs from itself (`noise.against_itself`).
    """
    times, faster = beside(seconds, exact)
    result = _cost(times, faster.median, len(seconds), extra_mib)
    if noise is None:
        return result
    return replace(result, verdict=verdict(faster.median, ratios(seconds, exact), noise))


def exact_cost(seconds: Sequence[float], extra_mib: float | None = None) -> Cost:
    """The cost of exact attention itself, whose speed-up is 1."""
    return _cost(spread(seconds), 1.0, len(seconds), extra_mib)


def _cost(times: "Spread", faster: float, repeats: int, extra_mib: float | None) -> Cost:
    low, median, high = (1e3 * seconds for seconds in times)
    return Cost(ms=median, ms_low=low, ms_high=high, repeats=repeats, speedup=faster, extra_mib=extra_mib)


def beside(seconds: Sequence[float], exact: Sequence[float]) -> tuple["Spread", "Spread"]:
    """Quartiles of a call's seconds, and of its speed-up over exact attention, from the same pairs.

    The speed-up is the median over rounds of exact / seconds: a slow moment of the machine hits both sides of a ratio.
    The median of `seconds` alone may contradict it: in rounds of (seconds, exact) = (1, 0.9), (1, 11), (10, 9) it is
    9 times below exact attention's, though this call is the slower one in most rounds. So the time is told as exact
    attention's median divided by the speed-up.
    """
    faster, base = spread(ratios(seconds, exact)), spread(exact).median
    return Spread(base / faster.high, base / faster.median, base / faster.low), faster


def speedup(seconds: Sequence[float], exact: Sequence[float]) -> float:
    """The median over rounds of exact attention's time / this one's."""
    return statistics.median(ratios(seconds, exact))


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
