"""Bounds and the test of drift against scipy, formulas and simulations with known answers."""

import math
import random
from collections import Counter

import numpy as np
import pytest
from scipy.stats import beta, binomtest

from subquad.audits.statistics import Betting, RunningMoments, mean_interval, mean_upper, share_upper, usual

ROWS = 32


@pytest.mark.parametrize(("above", "rows"), [(0, 32), (1, 32), (7, 40), (31, 32), (250, 3200)])
def test_the_bound_of_a_share_is_clopper_and_pearsons(above, rows):
    bound = share_upper(above, rows, 0.05)
    assert bound == pytest.approx(binomtest(above, rows).proportion_ci(0.9, "exact").high)
    assert bound == pytest.approx(beta.ppf(0.95, above + 1, rows - above))


def test_without_a_row_above_the_bound_is_the_closed_form_and_with_all_it_is_1():
    assert share_upper(0, 32, 0.05) == pytest.approx(1 - 0.05 ** (1 / 32))
    assert share_upper(32, 32, 0.05) == 1.0


def test_the_bound_of_a_mean_is_the_formula():
    want = 0.1 + math.sqrt(2 * 0.04 * math.log(40) / 100) + 7 * 2 * math.log(40) / (3 * 99)
    assert mean_upper(0.1, 0.04, 100, 0.05, 2.0) == pytest.approx(want)
    assert mean_upper(0.1, 0.0, 1, 0.05, 1.0) is None


def test_moments_are_numpys_and_join():
    numbers = np.random.default_rng(0).exponential(size=50)
    one, other, empty = RunningMoments(), RunningMoments(), RunningMoments()
    for number in numbers[:20]:
        one.add(number)
    for number in numbers[20:]:
        other.add(number)
    assert one.variance == pytest.approx(numbers[:20].var(ddof=1))
    for part in (other, empty):
        one.join(part)
    assert (one.count, one.largest) == (50, numbers.max())
    assert (one.mean, one.variance) == pytest.approx((numbers.mean(), numbers.var(ddof=1)))


def test_moments_stay_infinite_after_an_infinite_number():
    one, other = RunningMoments(), RunningMoments()
    for number in (0.5, math.inf, 1.0):
        one.add(number)
    other.add(2.0)
    for moments in (one, other):
        moments.join(one)
        assert (moments.mean, moments.variance, moments.largest) == (math.inf,) * 3


def stream(share: float, spread: float, chance: random.Random) -> float:
    """The share of one call's rows: calls differ, and the rows of one call share its probability."""
    own = min(1.0, max(0.0, share + spread * chance.choice((-1, 1))))
    return sum(chance.random() < own for _ in range(ROWS)) / ROWS


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_false_alarms_stay_below_their_rate_although_rows_of_a_call_are_alike(share):
    chance, alarms = random.Random(0), 0
    for _ in range(80):
        test = Betting(share, share)
        for _ in range(60):
            test.add(stream(share, 0.05, chance))
        alarms += test.peak >= 4
    assert alarms <= 0.25 * 80


@pytest.mark.parametrize("now", [0.25, 0.75])
def test_a_change_to_either_side_is_found(now):
    chance, test = random.Random(0), Betting(0.45, 0.55)
    for _ in range(50):
        test.add(stream(now, 0.05, chance))
    assert test.peak >= 1000


def test_the_peak_is_kept_when_evidence_falls_again():
    test = Betting(0.5, 0.5)
    assert test.peak == test.evidence == 1.0
    for number in [1.0] * 10 + [0.0] * 10:
        test.add(number)
    assert test.evidence < 1 < test.peak


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.0), (1.0, 1.0), (0.0, 1.0)])
def test_ends_of_the_interval_neither_divide_by_zero_nor_overflow(low, high):
    test = Betting(low, high)
    for _ in range(1200):
        test.add(0.5)
    assert math.isfinite(test.peak)
    assert (test.peak > 1000) == (low == high)


@pytest.mark.parametrize("share", [0.02, 0.5, 0.9])
def test_the_interval_of_a_mean_covers_it_as_often_as_it_says(share):
    chance, covered = random.Random(1), 0
    for _ in range(40):
        numbers = [stream(share, 0.02, chance) for _ in range(30)]
        low, high = mean_interval(Counter(round(each * ROWS) for each in numbers), ROWS, 0.1)
        covered += low <= share <= high
        assert low <= sum(numbers) / 30 <= high
    assert covered >= 0.9 * 40


def test_more_numbers_make_a_shorter_interval_and_none_the_whole():
    few, many = (mean_interval({15: n, 17: n}, ROWS, 0.05) for n in (10, 1000))
    assert few[0] < many[0] < 0.5 < many[1] < few[1]
    assert many[1] - many[0] < 0.05
    assert mean_interval({}, ROWS, 0.05) == (0.0, 1.0)


def test_the_usual_error_is_the_level_that_half_of_the_rows_exceed():
    beyond = {0.01: {32: 100}, 0.1: {15: 50, 17: 50}, 1.0: {0: 100}}
    found = usual(beyond, ROWS, 0.05)
    assert found["error"] == 0.1
    assert (found["low"], found["high"]) == mean_interval(beyond[0.1], ROWS, 0.05 / 3)
