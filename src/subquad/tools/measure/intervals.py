"""95 % confidence intervals of means and of shares."""

import math
import statistics
from collections.abc import Sequence

from scipy.special import ndtri, stdtrit

from subquad.tools.measure.noise import Interval

CONFIDENCE = 0.95
OUTSIDE = (1 - CONFIDENCE) / 2  # on either side


def interval_of_mean(values: Sequence[float]) -> Interval | None:
    """The interval of the expected value of independent numbers, by Student's t: mean ± t·s/√n; None of fewer than two.

    It assumes that their mean is about normally distributed.

    >>> low, high = interval_of_mean([1.0, 2.0, 3.0])  # 2 ± 4.303·1/√3
    >>> round(low, 3), round(high, 3)
    (-0.484, 4.484)
    """
    n = len(values)
    if n < 2:
        return None
    mean = statistics.fmean(values)
    half = float(stdtrit(n - 1, 1 - OUTSIDE)) * statistics.stdev(values, mean) / math.sqrt(n)
    return Interval(mean - half, mean + half)


def interval_of_share(share: float, count: int) -> Interval:
    """The interval of Wilson (1927) of a probability, from the share of `count` independent trials that succeeded.

        all p with |share − p| ≤ z·√(p(1 − p)/count),  where z is the normal quantile

    For other numbers from 0 to 1, `share` is their mean, and the interval is wider than it has to be, because numbers
    of the same mean vary most if they are all 0 or 1.

    >>> [round(end, 3) for end in interval_of_share(1.0, 20)]
    [0.839, 1.0]
    """
    z = float(ndtri(1 - OUTSIDE))
    middle, scale = share + z * z / (2 * count), 1 + z * z / count
    half = z * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    return Interval(max((middle - half) / scale, 0.0), min((middle + half) / scale, 1.0))
