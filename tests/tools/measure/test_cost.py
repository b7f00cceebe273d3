"""Time and memory."""

import os
import statistics
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import subquad as sq
from subquad.tools.measure.peak_memory import peak_extra_mib
from subquad.tools.measure.timing import cost, exact_cost, predicted, speedup, stopwatch


def test_stopwatch_returns_time_and_result():
    seconds, result = stopwatch(lambda: time.sleep(0.02) or 5)
    assert seconds >= 0.02
    assert result == 5


def test_what_is_predicted_follows_the_growth_of_the_method():
    assert predicted(sq.Clustered(), 2.0, growth=4.0) == 8.0
    assert predicted(sq.Full(), 2.0, growth=4.0) == 32.0


def test_the_speedup_is_the_median_of_ratios_within_rounds():
    seconds, exact = [1.0, 10.0, 2.0], [2.0, 30.0, 2.0]
    figures = cost(seconds, exact, extra_mib=7.0)
    assert figures.speedup == speedup(seconds, exact) == 2.0
    assert (figures.repeats, figures.extra_mib) == (3, 7.0)
    assert figures.verdict is None  # nothing is known of the noise
    assert cost([1.0], [3.0]).ms_low == 1000.0


def test_a_time_is_exact_attentions_median_divided_by_the_speedup():
    """The median of these own times is exact attention's, 2 s, though each round but one says that it is faster."""
    figures = cost([1.0, 10.0, 2.0], [2.0, 30.0, 2.0])
    assert exact_cost([2.0, 30.0, 2.0]).ms == 2000.0
    assert figures.ms == 1000.0
    assert (figures.ms_low, figures.ms_high) == (pytest.approx(800.0), pytest.approx(2000 / 1.5))


def test_slow_moments_cannot_make_time_and_speedup_contradict_each_other():
    """Own medians say 9 times faster, most rounds say slower: `beside` has these rounds in its docstring."""
    own, exact = [1.0, 1.0, 10.0], [0.9, 11.0, 9.0]
    figures, its = cost(own, exact, noise=1.01), exact_cost(exact)
    assert statistics.median(exact) / statistics.median(own) == 9.0
    assert figures.speedup == pytest.approx(0.9)
    assert figures.ms > its.ms


ROUNDS = st.lists(st.tuples(*[st.floats(1e-4, 1e3)] * 3), min_size=1, max_size=9)


@settings(max_examples=200, deadline=None)
@given(ROUNDS, st.floats(1.0, 3.0))
def test_no_timings_make_a_row_contradict_itself_or_another_row(rounds, noise):
    first, second, exact = (list(seconds) for seconds in zip(*rounds, strict=True))
    its = exact_cost(exact)
    rows = [cost(own, exact, noise=noise) for own in (first, second)]
    for row in rows:
        assert its.ms / row.ms == pytest.approx(row.speedup)
        assert row.ms_low <= row.ms * (1 + 1e-9)
        assert row.ms <= row.ms_high * (1 + 1e-9)
        if row.verdict != "within the noise":
            assert (row.verdict == "faster") == (row.ms < its.ms)
    times, speeds = ([getattr(row, figure) for row in rows] for figure in ("ms", "speedup"))
    assert (times[0] - times[1]) * (speeds[0] - speeds[1]) <= 0


def test_the_noise_makes_a_verdict():
    own, exact = [1.0, 1.0, 1.0], [1.1, 1.1, 1.1]
    assert [cost(own, exact, noise=noise).verdict for noise in (1.05, 1.2)] == ["faster", "within the noise"]
    assert cost(exact, own, noise=1.05).verdict == "slower"


@pytest.mark.parametrize("mib", [1, 8])
def test_peak_memory_counts_temporaries_at_their_highest(mib):
    numbers = mib * 2**20 // 4

    def call():
        first = torch.ones(numbers) * 2  # two at once
        del first
        return torch.ones(numbers)

    peak, returned = peak_extra_mib(call)
    assert peak == pytest.approx(2 * mib, rel=0.01)
    assert returned.shape == (numbers,)


def test_what_was_there_before_does_not_count():
    before = torch.ones(2**20)
    assert peak_extra_mib(lambda: before.sum())[0] < 0.1


def test_standard_error_works_again_afterwards(capfd):
    peak_extra_mib(lambda: torch.ones(3))
    os.write(2, b"still here")
    assert capfd.readouterr().err == "still here"
