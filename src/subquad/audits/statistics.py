"""Bounds at a stated confidence, and a test that is valid at any time, without normal approximations."""

import math
from collections.abc import Callable, Mapping

from scipy.special import betaincinv

FRACTIONS = (0.9, *(2.0**-power for power in range(1, 10)))  # of the largest stake that cannot ruin


def share_upper(above: int, rows: int, delta: float) -> float:
    """The upper bound of Clopper and Pearson (1934) on a share, at confidence 1 − δ.

        P(Binomial(rows, bound) ≤ above) = δ,  that is the 1 − δ quantile of Beta(above + 1, rows − above)

    Assumes rows drawn independently, each above the tolerance with the same probability. If the probability differs
    from row to row, the bound holds for its mean, unless nearly all rows are above (Hoeffding 1956, theorem 4: for
    counts at least one below their mean).

    >>> round(share_upper(0, 32, 0.05), 4)  # 1 − δ^(1/32)
    0.0894
    """
    return 1.0 if above >= rows else float(betaincinv(above + 1, rows - above, 1 - delta))


def mean_upper(mean: float, variance: float, count: int, delta: float, largest: float) -> float | None:
    """The empirical Bernstein bound on a mean, at confidence 1 − δ; None for fewer than 2 numbers.

        mean + √(2·variance·ln(2/δ)/n) + 7·largest·ln(2/δ)/(3·(n − 1))      Maurer and Pontil 2009, theorem 11

    Assumes independent numbers in [0, largest], which may have different distributions; `variance` is divided by n − 1.
    """
    if count < 2:
        return None
    log = math.log(2 / delta)
    return mean + math.sqrt(2 * variance * log / count) + 7 * largest * log / (3 * (count - 1))


class RunningMoments:
    """Count, mean and variance of a stream of numbers, by Welford's recursion; infinite with an infinite number."""

    def __init__(self) -> None:
        self.count, self.mean, self.largest, self._squares = 0, 0.0, 0.0, 0.0

    def add(self, number: float) -> None:
        """Add one number ≥ 0."""
        self.count += 1
        self.largest = max(self.largest, number)
        before = number - self.mean
        self.mean += before / self.count
        self._squares += before * (number - self.mean)
        self._stay_infinite()

    def join(self, other: "RunningMoments") -> None:
        """Add the numbers of another stream (Chan, Golub, LeVeque 1979)."""
        count, apart = self.count + other.count, other.mean - self.mean
        if count:
            self._squares += other._squares + apart**2 * self.count * other.count / count
            self.mean += apart * other.count / count
        self.count, self.largest = count, max(self.largest, other.largest)
        self._stay_infinite()

    def _stay_infinite(self) -> None:
        """Set the mean and the variance to infinity after an infinite number, whose differences are not a number."""
        if math.isinf(self.largest):
            self.mean = self._squares = math.inf

    @property
    def variance(self) -> float:
        """The unbiased variance; 0 for fewer than 2 numbers."""
        return self._squares / (self.count - 1) if self.count > 1 else 0.0


class Betting:
    """Evidence that numbers in [0, 1] no longer have an expected value between `low` and `high`.

        K_t = ½ mean_f Π_s (1 + f·(x_s − high)/high)  +  ½ mean_f Π_s (1 − f·(x_s − low)/(1 − low))

    The capital of a gambler who starts with 1 and stakes the same fractions f on every number. As long as the expected
    value of each number, given all before it, is between `low` and `high`, the capital is a supermartingale, so that it
    ever reaches 1/α with probability at most α, however often it is looked at (Ville 1939; Waudby-Smith and Ramdas
    2024, "Estimating means of bounded random variables by betting", section 3).
    """

    def __init__(self, low: float, high: float) -> None:
        # An interval that ends at 0 or 1 leaves nothing to divide by: the next number beyond it would ruin the test.
        self.low, self.high = min(low, 1 - 1e-6), max(high, 1e-6)
        self._up, self._down = ([0.0] * len(FRACTIONS) for _ in range(2))
        self.peak = 1.0

    def add(self, number: float) -> None:
        """Bet on one number in [0, 1]."""
        over, under = (number - self.high) / self.high, (self.low - number) / (1 - self.low)
        for at, fraction in enumerate(FRACTIONS):
            self._up[at] += math.log1p(fraction * over)
            self._down[at] += math.log1p(fraction * under)
        self.peak = max(self.peak, self.evidence)

    @property
    def evidence(self) -> float:
        """The current capital K_t, which is large if the numbers contradict the interval."""
        return (_mean_exp(self._up) + _mean_exp(self._down)) / 2


def mean_interval(counts: Mapping[int, int], rows: int, delta: float) -> tuple[float, float]:
    """An interval for the expected value of numbers k/rows, of which `counts[k]` were seen, at confidence 1 − δ.

    All m that a gambler who bets against m does not reject with a capital of 2/δ, on either side (Waudby-Smith and
    Ramdas 2024, theorem 1). Assumes independent numbers of one distribution; how often `rows` rows of one call are
    above the tolerance together does not matter. Without any number it is (0, 1).

    >>> low, high = mean_interval({1: 50, 2: 50}, 32, 0.05)
    >>> low < 1.5 / 32 < high < 0.2
    True
    """

    def rejected(mean: float, side: int) -> bool:
        room = mean if side > 0 else 1 - mean
        capital = [
            sum(n * math.log1p(side * f * (k / rows - mean) / room) for k, n in counts.items()) for f in FRACTIONS
        ]
        return _mean_exp(capital) >= 2 / delta

    total = sum(counts.values())
    if not total:
        return 0.0, 1.0
    mean = sum(k * n for k, n in counts.items()) / rows / total
    low, high = _last_rejected(0.0, mean, rejected, 1), _last_rejected(1.0, mean, rejected, -1)
    return low, high


def usual(beyond: Mapping[float, Mapping[int, int]], rows: int, delta: float) -> dict[str, float]:
    """The level that about half of all rows exceed, and the `mean_interval` of the share of a call's rows that do.

    `beyond[level][k]` counts the calls of which k rows exceed a level. The interval is one of all levels together, so
    that it holds at confidence 1 − δ for the level that was chosen by the same calls (Bonferroni).
    """
    calls = sum(next(iter(beyond.values())).values())
    off = {level: abs(sum(k * n for k, n in counts.items()) - rows * calls / 2) for level, counts in beyond.items()}
    level = min(off, key=lambda each: off[each])
    low, high = mean_interval(beyond[level], rows, delta / len(beyond))
    return {"error": level, "low": low, "high": high}


def _last_rejected(end: float, mean: float, rejected: Callable[[float, int], bool], side: int) -> float:
    """Between an end of [0, 1] and the mean: the number closest to the mean that is rejected, or the end."""
    outer, inner = end, mean
    if not rejected(end + side * 1e-9, side):
        return end
    for _ in range(40):
        middle = (outer + inner) / 2
        outer, inner = (middle, inner) if rejected(middle, side) else (outer, middle)
    return outer


def _mean_exp(logs: list[float]) -> float:
    largest = min(max(logs), 700.0)  # beyond, exp overflows
    return math.exp(largest) * sum(math.exp(min(each - largest, 0.0)) for each in logs) / len(logs)
