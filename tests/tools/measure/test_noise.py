"""The noise of made-up timings."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from subquad.tools.measure.intervals import interval_of_mean
from subquad.tools.measure.noise import (
    TIE,
    MachineLoad,
    against_itself,
    at_least_typical,
    between_rounds,
    interval,
    noise_of,
    verdict,
)

QUIET = MachineLoad(0.01, 0.1, 4)


@pytest.mark.parametrize(
    ("count", "places"), [(1, (0, 0)), (2, (0, 1)), (3, (0, 2)), (5, (0, 4)), (8, (0, 7)), (9, (1, 7)), (20, (5, 14))]
)
def test_the_interval_of_the_median_is_that_of_the_sign_test(count, places):
    assert interval([float(i) for i in range(count)][::-1]) == places
    low = places[0]
    if count >= 6:  # as many as that lie outside with at most 2.5 %, one more would be too many
        below = [math.comb(count, d) / 2**count for d in range(count)]
        assert sum(below[: low + 1]) <= 0.025 < sum(below[: low + 2])


def test_one_outlier_does_not_move_the_interval_of_nine():
    assert interval([1.0] * 8 + [50.0]) == (1.0, 1.0)


def test_exact_attention_against_itself_is_a_factor_to_either_side():
    assert against_itself([1.0, 1.0, 1.0]) == 1.0
    assert against_itself([0.8, 1.0, 1.1]) == pytest.approx(1.25)
    assert against_itself([0.9, 1.0, 1.3]) == pytest.approx(1.3)


def test_a_whole_model_whose_noise_hides_a_small_gain_is_from_a_busy_machine():
    """At one length of many, too, where the median over the lengths is small."""
    factors = [1.02] * 6
    assert not noise_of(QUIET, [*factors, 1.4]).busy  # one layer's attention
    assert noise_of(QUIET, [*factors, 1.4], [1.02, 1.4]).busy
    assert not noise_of(QUIET, [*factors, 1.1], [1.02, 1.1]).busy


def test_the_noise_between_rounds_is_students_interval_of_the_mean_of_logarithms():
    row = [1.2, 1.5, 0.9, 1.1]
    low, high = interval_of_mean([math.log(ratio) for ratio in row])
    assert between_rounds([row]) == pytest.approx(math.exp((high - low) / 2))
    assert between_rounds([row, row]) < between_rounds([row])  # twice as many degrees of freedom
    assert between_rounds([[3.0, 3.0], [0.5, 0.5]]) == 1.0


def test_more_rounds_find_a_gain_and_no_number_of_them_finds_one_in_a_tie():
    draw = np.random.default_rng(0)

    def found(gain: float, rounds: int) -> float:
        """The share of 400 runs in which the first of two methods is called faster or slower."""
        times = np.exp(0.15 * draw.standard_normal((400, 3, rounds)))  # of exact attention, and of two methods
        runs = [[list(gain * exact / method) for method in methods] for exact, *methods in times]
        verdicts = [verdict(float(np.median(rows[0])), rows[0], between_rounds(rows)) for rows in runs]
        return sum(each != "within the noise" for each in verdicts) / len(verdicts)

    assert max(found(1.0, rounds) for rounds in (2, 3, 5)) < 0.1
    assert found(1.5, 2) < 0.5 < found(1.5, 3) < 0.75 < found(1.5, 5)


def test_rounds_that_agree_by_chance_take_the_noise_of_the_other_lengths():
    assert at_least_typical({512: 1.04, 2048: 1.001, 4096: 1.2}) == {512: 1.04, 2048: 1.04, 4096: 1.2}
    assert at_least_typical({}) == {}


@pytest.mark.parametrize(
    ("samples", "noise", "says"),
    [
        ([1.3, 1.31, 1.29], 1.05, "faster"),
        ([0.7, 0.71, 0.69], 1.05, "slower"),
        ([1.3, 1.31, 1.29], 1.4, "within the noise"),  # exact attention differs as much from itself
        ([0.8, 0.81, 0.79], 1.4, "within the noise"),
        ([0.95, 1.3, 1.31], 1.05, "within the noise"),  # one of three rounds says the opposite
        ([1.05, 0.7, 0.71], 1.02, "within the noise"),
        ([1.015, 1.015, 1.015], 1.001, "within the noise"),  # however steady
        ([0.985, 0.985, 0.985], 1.001, "within the noise"),
        ([1.0, 1.0, 1.0], 1.0, "within the noise"),
    ],
)
def test_verdict(samples, noise, says):
    assert verdict(sorted(samples)[len(samples) // 2], samples, noise) == says


@pytest.mark.parametrize("kind", ["normal", "heavy tails", "spikes"])
def test_a_tie_is_rarely_taken_for_a_gain_and_a_gain_is_mostly_seen(kind):
    """1,200 ties, in the rounds that compare has: 9, 4 and 3 of them."""
    draw = np.random.default_rng(0)

    def noise(shape):
        if kind == "normal":
            return draw.normal(0, 0.03, shape)
        if kind == "heavy tails":
            return 0.02 * draw.standard_t(2, shape)
        return draw.normal(0, 0.01, shape) + (draw.random(shape) < 0.1) * draw.exponential(0.4, shape)

    def clear(speedup):
        found = []
        for _ in range(400):
            turns = [np.exp(noise((3, count))) for count in (9, 4, 3)]  # of exact, a method, exact again
            itself = at_least_typical({i: against_itself(list(t[2] / t[0])) for i, t in enumerate(turns)})
            for i, (exact, own, _) in enumerate(turns):
                samples = list(speedup * exact / own)
                found.append(verdict(float(np.median(samples)), samples, itself[i]) != "within the noise")
        return np.mean(found)

    assert clear(1.0) < 0.02
    assert clear(2.0) > 0.8


def test_a_quiet_machine_is_said_to_be_so():
    noise = noise_of(QUIET, [1.01, 1.02, 1.2])
    assert not noise.busy
    assert noise.says == (
        "Noise: exact attention timed against itself differs by up to 20 % (median over the lengths: 2.0 %); other "
        "processes used 1.0 % of the processors' time; the load average before the run was 0.1 on 4 cores."
    )
    assert noise.load == QUIET


@pytest.mark.parametrize(
    ("load", "factors", "what"),
    [
        (replace(QUIET, others=0.3), [1.001], "The machine was busy: "),
        (replace(QUIET, others=0.3), [1.4], "The machine was busy: "),
        (replace(QUIET, others=0.004), [1.01, 1.08, 1.2], "The times were noisy: "),
        (MachineLoad(None, 2.0, 4), [], "The machine was busy: "),
        (MachineLoad(None, None, 4), [1.5], "The times were noisy: "),
    ],
)
def test_uncertain_times_are_named_with_the_cause_and_what_to_do(load, factors, what):
    """Other processes are the cause only if they used the processors."""
    noise = noise_of(load, factors)
    assert noise.busy
    assert noise.says.startswith(what)
    for said in ("uncertain", "quality are not affected", "Repeat the command"):
        assert said in noise.says
    assert ("because other work" in noise.says) == what.startswith("The machine")


def test_the_load_before_the_run_does_not_count_where_others_are_known():
    assert not noise_of(replace(QUIET, average=30.0), [1.001]).busy


def test_nothing_known_is_said_to_be_so():
    assert noise_of(MachineLoad(None, None, 1), []).says == "Noise: nothing is known of its load."


def test_less_than_the_least_difference_is_never_a_gain():
    steady = [[1 + i / 100] * 9 for i in range(11)]
    verdicts = [verdict(samples[0], samples, 1.0) for samples in steady]
    assert verdicts == ["within the noise" if samples[0] <= TIE else "faster" for samples in steady]
    assert all(a <= b for a, b in pairwise([v == "faster" for v in verdicts]))
