"""Measure the noise of a run, and decide which speed-ups exceed it.

Exact attention is timed twice in each round, whose order is random. The two are the same call, so
whatever differs between them is noise, and a method that takes just as long would differ from either as they do from
each other. If a second timing takes too long, the noise is estimated from how far the ratios of a method differ
between rounds.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple, TypeVar

from scipy.special import stdtrit

Verdict = Literal["faster", "slower", "within the noise"]
Key = TypeVar("Key")

AGAIN = "full, again"  # what exact attention's second timing goes by: no method's name has a space
TIE = 1.02  # a ratio nearer to 1 is a tie however steady it is: the next run lays out memory anew
ASSUMED_NOISE = 1.25  # where exact attention was timed once only
SPREAD = 1.05  # of exact attention against itself, from which on a machine is busy
LARGE = 1.1  # the same in a whole model at any one length: as much as the smallest speed-up that is worth a change
SHARE = 0.1  # of the processors' time that other processes use, from which on a machine is busy


class Interval(NamedTuple):
    """A confidence interval."""

    low: float
    high: float


@dataclass(frozen=True)
class MachineLoad:
    """The load of the machine during a run."""

    others: float | None  # share of all processors' time that other processes used; None if not reported
    average: float | None  # the load average of the minute before the run
    cores: int


@dataclass(frozen=True)
class Noise:
    """The noise of a run, with a sentence about it."""

    load: MachineLoad
    busy: bool  # whether the times are uncertain: other processes used the machine, or exact attention varied
    says: str


def interval(values: Sequence[float]) -> Interval:
    """The 95 % confidence interval of the median, by order statistics (that of the sign test).

    It assumes nothing about the distribution and is robust against outliers: the median lies between the d-th of n
    values from below and the d-th from above with probability 1 − 2·P(Binomial(n, 1/2) < d). With fewer than six values
    even the whole range covers less: 75 % with three.
    """
    ordered, count = sorted(values), len(values)
    below = accumulate(math.comb(count, d) / 2**count for d in range((count + 1) // 2))  # P(at most d are below)
    outside = max(sum(p <= 0.025 for p in below) - 1, 0)
    return Interval(ordered[outside], ordered[-1 - outside])


def against_itself(ratios: Sequence[float]) -> float:
    """The farthest that the ratio of two timings of the same call may be from 1, as a factor ≥ 1.

    `ratios` are those of exact attention's two times in each round. The result is the farther end of their `interval`:
    1.03 means that a speed-up of 1.03× or 0.97× may be noise.
    """
    low, high = interval(ratios)
    return max(high, 1 / low)


def between_rounds(rows: Sequence[Sequence[float]]) -> float:
    """The factor ≥ 1 by which the mean of a row's ratios may differ from the true one, as they differ between rounds.

        exp(t·s/√n),  where s² = Σ over rows and rounds of (ln ratio − the row's mean)² / (rows·(n − 1))

    t is the 97.5 % quantile of Student's distribution with rows·(n − 1) degrees of freedom, for n ≥ 2 ratios in every
    row. Rows vary equally then, each about a mean of its own. The range of the ratios would grow with every round.

    >>> round(between_rounds([[1.9, 2.1], [0.95, 1.05]]), 2), round(between_rounds([[1.9, 2.1] * 2]), 2)
    (1.24, 1.1)
    """
    logs = [[math.log(ratio) for ratio in row] for row in rows]
    freedom = sum(len(row) - 1 for row in logs)
    variance = sum(statistics.variance(row) * (len(row) - 1) for row in logs) / freedom
    return math.exp(float(stdtrit(freedom, 0.975)) * math.sqrt(variance / len(logs[0])))


def at_least_typical(factors: Mapping[Key, float]) -> dict[Key, float]:
    """Factors of several lengths, each raised to the median of all: a few rounds may agree by chance."""
    if not factors:
        return {}
    typical = statistics.median(factors.values())
    return {key: max(factor, typical) for key, factor in factors.items()}


def verdict(speedup: float, samples: Sequence[float], noise: float) -> Verdict:
    """The verdict on a speed-up: faster, slower, or within the noise.

    It exceeds the noise where it is farther from 1 than exact attention differs from itself (`noise`, and never less
    than `TIE`) and the `interval` of the samples that it is the median of lies on one side of 1.
    """
    low, high = interval(samples)
    least = max(noise, TIE)
    if speedup > least and low > 1:
        return "faster"
    return "slower" if speedup < 1 / least and high < 1 else "within the noise"


def noise_of(load: MachineLoad, factors: Sequence[float], models: Sequence[float] = ()) -> Noise:
    """The noise of the times: whether they are uncertain, and one or two sentences on why and on what to do.

    They are uncertain if other processes used the machine, or if exact attention differs from itself. `factors` are
    those of `against_itself`, one for each length; `models` are those among them of whole models.
    """
    shared = (load.others or 0.0) > SHARE
    if load.others is None and load.average is not None:
        shared = load.average > SHARE * load.cores
    unsteady = (bool(factors) and statistics.median(factors) > SPREAD) or max(models, default=1.0) > LARGE
    description = "; ".join(_describe_load(load, factors)) or "nothing is known of its load"
    if not shared and not unsteady:
        return Noise(load, busy=False, says=f"Noise: {description}.")
    what = "The machine was busy" if shared else "The times were noisy"
    why = "because other work slows some methods more than others; figures" if shared else "and figures"
    remedy = "on an idle machine" if shared else "with nothing else running"
    advice = (
        f"Every time and speed-up here is uncertain, {why} of quality are not affected. Repeat the command {remedy} "
        "before you rely on a speed-up."
    )
    return Noise(load, busy=True, says=f"{what}: {description}. {advice}")


def _describe_load(load: MachineLoad, factors: Sequence[float]) -> list[str]:
    clauses = []
    if factors:
        most = f"exact attention timed against itself differs by up to {percent(max(factors) - 1)}"
        median = f" (median over the lengths: {percent(statistics.median(factors) - 1)})"
        clauses.append(most + (median if len(factors) > 1 else ""))
    if load.others is not None:
        clauses.append(f"other processes used {percent(load.others)} of the processors' time")
    if load.average is not None:
        cores = f"{load.cores} core{'' if load.cores == 1 else 's'}"
        clauses.append(f"the load average before the run was {load.average:.1f} on {cores}")
    return clauses


def percent(share: float) -> str:
    """A share as text, with one decimal if it is small."""
    return f"{100 * share:.1f} %" if share < 0.095 else f"{100 * share:,.0f} %"
