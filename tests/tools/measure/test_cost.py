"""Time and memory."""

import itertools
import os
import statistics
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import subquad as sq
from subquad.tools.measure import timing
from subquad.tools.measure.memory import peak_extra_mib
from subquad.tools.measure.noise import verdict
from subquad.tools.measure.timing import (
    Effort,
    by_name,
    cost,
    exact_cost,
    one_round,
    predicted,
    ratios,
    stopwatch,
    until_steady,
)


def interleaved(calls, rounds):
    """Seconds of each call in each round, in the same order each time."""
    return by_name([one_round(calls) for _ in range(rounds)])


def test_interleaved_runs_every_call_once_a_round():
    calls = []
    seconds = interleaved({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=3)
    assert calls == ["a", "b"] * 3
    assert [len(seconds[name]) for name in "ab"] == [3, 3]


def test_steady_rounds_run_every_call_once_in_an_order_of_their_own():
    names, log = "abcd", []
    calls = {name: lambda name=name: log.append(name) for name in names}
    seconds = until_steady(calls, Effort(seconds=0.0, least=20))
    rounds = ["".join(log[at : at + 4]) for at in range(0, len(log), 4)]
    assert {"".join(sorted(each)) for each in rounds} == {names}
    assert len(set(rounds)) > 10
    assert {each[0] for each in rounds} == set(names)
    assert list(seconds) == list(names)
    assert {len(each) for each in seconds.values()} == {20}


@pytest.mark.usefixtures("clock")
def test_rounds_that_keep_step_with_time_slices_do_not_make_one_call_slow():
    """Each call takes 1 ms, and the system takes 20 ms after every fourth: a round of four and a half, so to speak."""
    calls = itertools.count()
    fair = {
        name: lambda: 1e-3 + (20e-3 if next(calls) % 4 == 1 else 0.0) for name in ("exact", "own", "again", "other")
    }
    assert interleaved(fair, 9)["own"] == [21e-3] * 9
    seconds = until_steady(fair, Effort(seconds=1e9, enough=40, most=40))
    assert verdict(1.0, ratios(seconds["own"], seconds["exact"]), 1.0) == "within the noise"
    assert 5 < sum(each > 2e-3 for each in seconds["own"]) < 20


def test_stopwatch_returns_time_and_result():
    seconds, result = stopwatch(lambda: time.sleep(0.02) or 5)
    assert seconds >= 0.02
    assert result == 5


def test_between_calls_something_else_runs_outside_the_stopwatch():
    log = []
    calls = {"a": lambda: log.append("a"), "b": lambda: log.append("b")}
    seconds = one_round(calls, between=lambda: log.append("between") or time.sleep(0.02))
    assert log == ["between", "a", "between", "b"]
    assert max(seconds.values()) < 0.02


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the calls move, which take the seconds that they return."""
    now = [0.0]

    def stopwatch(call, device=None, group=None):
        seconds = call()
        now[0] += seconds
        return seconds, None

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(timing, "stopwatch", stopwatch)


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(("effort", "rounds"), [
    (Effort(seconds=100.0, least=2, enough=6), 6),  # no noise: enough is enough
    (Effort(seconds=3.0, least=2, enough=50), 5),  # 6 s for both: 5 rounds of 1.1 s after one that warms up
    (Effort(seconds=0.01, least=4, enough=50), 4),  # however long they take
])  # fmt: skip
def test_rounds_without_noise(effort, rounds):
    seconds = until_steady({"short": lambda: 0.1, "long": lambda: 1.0}, effort)
    assert seconds == {"short": [0.1] * rounds, "long": [1.0] * rounds}


@pytest.mark.usefixtures("clock")
def test_noise_asks_for_more_rounds_until_the_median_stands():
    def noisy():
        while True:
            yield from (0.9, 1.0, 1.1)

    def rounds(**how):
        noise = noisy()
        return len(until_steady({"a": lambda: next(noise)}, Effort(seconds=1000.0, enough=9, **how))["a"])

    assert 9 < rounds(precision=0.04) < rounds(precision=0.02) < 110
    assert rounds(precision=0.02, most=12) == 12


@pytest.mark.usefixtures("clock")
def test_warm_up_does_not_count():
    slow_at_first = iter([9.0, 5.0, 3.0] + [1.0] * 50)
    seconds = until_steady({"a": lambda: next(slow_at_first)}, Effort(seconds=1000.0, enough=5))
    assert seconds["a"] == [1.0] * 5


def test_what_is_predicted_follows_the_growth_of_the_method():
    assert predicted(sq.Clustered(), 2.0, growth=4.0) == 8.0
    assert predicted(sq.Full(), 2.0, growth=4.0) == 32.0


def test_the_speedup_is_the_median_of_ratios_within_rounds():
    figures = cost([1.0, 10.0, 2.0], [2.0, 30.0, 2.0], extra_mib=7.0)
    assert figures["speedup"] == 2.0
    assert (figures["repeats"], figures["extra_mib"]) == (3, 7.0)
    assert "verdict" not in figures  # nothing is known of the noise
    assert cost([1.0], [3.0])["ms_low"] == 1000.0


def test_a_time_is_exact_attentions_median_divided_by_the_speedup():
    """The median of these own times is exact attention's, 2 s, though each round but one says that it is faster."""
    figures = cost([1.0, 10.0, 2.0], [2.0, 30.0, 2.0])
    assert exact_cost([2.0, 30.0, 2.0])["ms"] == 2000.0
    assert figures["ms"] == 1000.0
    assert (figures["ms_low"], figures["ms_high"]) == (pytest.approx(800.0), pytest.approx(2000 / 1.5))


def test_slow_moments_cannot_make_time_and_speedup_contradict_each_other():
    """Own medians say 9 times faster, most rounds say slower: `beside` has these rounds in its docstring."""
    own, exact = [1.0, 1.0, 10.0], [0.9, 11.0, 9.0]
    figures, its = cost(own, exact, noise=1.01), exact_cost(exact)
    assert statistics.median(exact) / statistics.median(own) == 9.0
    assert figures["speedup"] == pytest.approx(0.9)
    assert figures["ms"] > its["ms"]


ROUNDS = st.lists(st.tuples(*[st.floats(1e-4, 1e3)] * 3), min_size=1, max_size=9)


@settings(max_examples=200, deadline=None)
@given(ROUNDS, st.floats(1.0, 3.0))
def test_no_timings_make_a_row_contradict_itself_or_another_row(rounds, noise):
    first, second, exact = (list(seconds) for seconds in zip(*rounds, strict=True))
    its = exact_cost(exact)
    rows = [cost(own, exact, noise=noise) for own in (first, second)]
    for row in rows:
        assert its["ms"] / row["ms"] == pytest.approx(row["speedup"])
        assert row["ms_low"] <= row["ms"] * (1 + 1e-9)
        assert row["ms"] <= row["ms_high"] * (1 + 1e-9)
        if row["verdict"] != "within the noise":
            assert (row["verdict"] == "faster") == (row["ms"] < its["ms"])
    times, speeds = ([row[figure] for row in rows] for figure in ("ms", "speedup"))
    assert (times[0] - times[1]) * (speeds[0] - speeds[1]) <= 0


def test_the_noise_makes_a_verdict():
    own, exact = [1.0, 1.0, 1.0], [1.1, 1.1, 1.1]
    assert [cost(own, exact, noise=noise)["verdict"] for noise in (1.05, 1.2)] == ["faster", "within the noise"]
    assert cost(exact, own, noise=1.05)["verdict"] == "slower"


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
