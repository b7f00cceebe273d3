"""Time of several things in turn, so that they meet the same noise."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

import torch


class Cost(TypedDict):
    """Time and memory of one thing at one length, beside exact attention in the same run."""

    ms: float  # median
    ms_low: float  # 25th percentile
    ms_high: float  # 75th percentile
    repeats: int
    speedup: float  # median of exact's time / this one's, run by run, so > 1 is faster than exact
    extra_mib: float | None  # peak of memory allocated on top of what was there before


def interleaved(
    calls: Mapping[str, Callable[[], Any]], rounds: int, device: torch.device | None = None
) -> dict[str, list[float]]:
    """Seconds of each call in each round: every round runs all of them once, one after the other. No warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            seconds[name].append(stopwatch(call, device)[0])
    return seconds


def stopwatch(call: Callable[[], Any], device: torch.device | None = None) -> tuple[float, Any]:
    """Seconds that a call took, the device's work included, and what it returned."""
    _wait(device)
    start = time.perf_counter()
    result = call()
    _wait(device)
    return time.perf_counter() - start, result


def cost(own: Sequence[float], exact: Sequence[float], extra_mib: float | None = None) -> Cost:
    """Seconds by round, and exact attention's in the same rounds, as medians in ms, quartiles and a speed-up.

    The speed-up is the median over rounds of exact / own: a slow moment of the machine hits both sides of a ratio.
    """
    low, high = _quartiles(own)
    return {
        "ms": 1e3 * statistics.median(own),
        "ms_low": 1e3 * low,
        "ms_high": 1e3 * high,
        "repeats": len(own),
        "speedup": statistics.median(e / o for e, o in zip(exact, own, strict=True)),
        "extra_mib": extra_mib,
    }


def _quartiles(seconds: Sequence[float]) -> tuple[float, float]:
    if len(seconds) == 1:
        return seconds[0], seconds[0]
    quartiles = statistics.quantiles(seconds, n=4, method="inclusive")
    return quartiles[0], quartiles[2]


def _wait(device: torch.device | None) -> None:
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
