"""Rounds of calls: their order, how many there are, and what they cost and return."""

import itertools
import random
import time

import pytest

from subquad.tools.measure import timing
from subquad.tools.measure.deadline import Deadline
from subquad.tools.measure.noise import verdict
from subquad.tools.measure.timing import Effort, one_round, ratios, timed_rounds, until_steady

NAMES = "abcd"


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the calls move, which take the seconds that they return."""
    now = [0.0]

    def stopwatch(call, device=None, group=None):
        seconds = call()
        now[0] += seconds
        return seconds, None

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(timing, "stopwatch", stopwatch)


def measured(name):
    """Costs and returns something that depends on the name."""
    return NAMES.index(name) + 0.5, name.upper()


def test_a_round_measures_every_run_once_and_keeps_what_it_returns():
    costs, outputs = one_round(dict(zip(NAMES, NAMES, strict=True)), measured)
    assert list(costs.items()) == [("a", 0.5), ("b", 1.5), ("c", 2.5), ("d", 3.5)]
    assert outputs == {"a": "A", "b": "B", "c": "C", "d": "D"}


def test_the_order_of_a_round_follows_from_its_seed_and_that_of_the_next_one_is_another():
    runs = dict(zip(NAMES, NAMES, strict=True))

    def orders(seed):
        draw, log = random.Random(seed), []
        for _ in range(9):
            costs, outputs = one_round(runs, lambda name: log.append(name) or (0.0, name), draw)
            assert list(costs) == list(outputs) == log[-4:]
        return ["".join(log[at : at + 4]) for at in range(0, len(log), 4)]

    assert orders(5) == orders(5) != orders(6)
    assert len(set(orders(5))) > 4
    expected = random.Random(5)  # unfinished runs resume with the orders that they began with
    assert orders(5) == ["".join(expected.sample(NAMES, 4)) for _ in range(9)]


def test_a_refused_run_is_left_out_and_does_not_change_the_order_of_the_others():
    runs = dict(zip(NAMES, NAMES, strict=True))
    whole, _ = one_round(runs, measured, random.Random(1))
    some, outputs = one_round(runs, lambda name: None if name == "b" else measured(name), random.Random(1))
    assert list(some) == list(outputs) == [name for name in whole if name != "b"]


def test_an_error_ends_the_round():
    ran = []

    def failing(name):
        ran.append(name)
        if name == "b":
            raise ValueError("b does not run")
        return measured(name)

    with pytest.raises(ValueError, match="b does not run"):
        one_round(dict(zip(NAMES, NAMES, strict=True)), failing)
    assert ran == ["a", "b"]


@pytest.mark.parametrize("count", [0, 1, 5])
def test_a_fixed_number_of_rounds_has_no_warm_up(count):
    log = []
    seconds = timed_rounds({name: lambda name=name: log.append(name) for name in NAMES}, count, random.Random(0))
    assert sorted(log) == sorted(NAMES * count)
    assert list(seconds) == list(NAMES)
    assert {len(each) for each in seconds.values()} == {count}


@pytest.mark.parametrize(("seconds", "count"), [(10.0, 4), (9.0, 3), (2.0, 2), (0.0, 2), (100.0, 6)])
def test_within_a_deadline_rounds_begin_as_long_as_time_is_left_and_the_least_in_any_case(monkeypatch, seconds, count):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    begun = []
    for number in Deadline(seconds).within(range(6), least=2):
        begun.append(number)
        now[0] += 3.0  # the last one may end after the limit, because a part of a round cannot be compared
    assert begun == list(range(count))


def test_without_a_draw_rounds_have_the_order_of_the_calls():
    calls = []
    seconds = timed_rounds({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 3)
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
    assert timed_rounds(fair, 9)["own"] == [21e-3] * 9
    seconds = until_steady(fair, Effort(seconds=1e9, enough=40, most=40))
    assert verdict(1.0, ratios(seconds["own"], seconds["exact"]), 1.0) == "within the noise"
    assert 5 < sum(each > 2e-3 for each in seconds["own"]) < 20


def test_between_calls_something_else_runs_outside_the_stopwatch(monkeypatch):
    log, now = [], [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def between():
        log.append("between")
        now[0] += 1.0

    seconds = timed_rounds({"a": lambda: log.append("a"), "b": lambda: log.append("b")}, 1, between=between)
    assert log == ["between", "a", "between", "b"]
    assert seconds == {"a": [0.0], "b": [0.0]}


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
