"""Intervals of means and shares."""

import math

import pytest
from scipy.stats import binomtest, ttest_1samp

from subquad.tools.measure.intervals import CONFIDENCE, interval_of_mean, interval_of_share


@pytest.mark.parametrize("values", [[0.5, -0.25], [1.0, 2.0, 4.0], [0.1 * number**2 for number in range(20)]])
def test_the_interval_of_a_mean_is_that_of_students_t(values):
    expected = ttest_1samp(values, 0.0).confidence_interval(CONFIDENCE)
    assert interval_of_mean(values) == pytest.approx((expected.low, expected.high))


def test_the_interval_of_known_numbers():
    """Of two numbers it is mean ± 12.706·|difference|/2, of equal numbers it has no width."""
    assert interval_of_mean([1.0, 3.0]) == pytest.approx((2 - 12.7062, 2 + 12.7062), abs=1e-4)
    assert interval_of_mean([0.25] * 4) == (0.25, 0.25)


@pytest.mark.parametrize("values", [[], [0.5]])
def test_fewer_than_two_numbers_have_no_interval(values):
    assert interval_of_mean(values) is None


@pytest.mark.parametrize(("right", "count"), [(0, 1), (1, 1), (0, 20), (3, 12), (10, 20), (20, 20)])
def test_the_interval_of_a_share_is_wilsons(right, count):
    expected = binomtest(right, count).proportion_ci(CONFIDENCE, method="wilson")
    assert interval_of_share(right / count, count) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_all_right_and_all_wrong_end_at_1_and_0():
    z2 = 1.959964**2
    assert interval_of_share(1.0, 20) == pytest.approx((20 / (20 + z2), 1.0))
    assert interval_of_share(0.0, 20) == pytest.approx((0.0, z2 / (20 + z2)))
    assert all(
        0 <= end <= 1 for count in range(1, 200) for share in (0.0, 1.0) for end in interval_of_share(share, count)
    )


def test_a_share_between_two_counts_has_an_interval_between_theirs():
    lower, middle, higher = (interval_of_share(right / 20, 20) for right in (7, 7.5, 8))
    assert lower.low < middle.low < higher.low
    assert lower.high < middle.high < higher.high
    assert not math.isnan(middle.low)
