"""Calls in turn: what is left out, and what is made of rounds."""

import pytest

from subquad.research.papers import side_by_side
from subquad.research.papers.side_by_side import all_rounds, alternating_rounds, growth, shown, speedup
from subquad.tools.bench import calls
from subquad.tools.measure.timing import Effort

EFFORT = Effort(seconds=0.0, least=2)


class Made:
    """Calls that say how often they ran, of any length."""

    def __init__(self, length, log):
        self.length, self.log = length, log

    def call_of(self, name):
        def call():
            self.log.append((name, self.length))
            if name == "naive":
                raise ValueError("no room")

        return call

    def clear(self):
        self.log.append(("clear", self.length))


def run(length, names, limit=10.0):
    log = []
    return alternating_rounds(lambda n: Made(n, log), length, names, EFFORT, limit, "cpu"), log


def test_each_call_runs_once_a_round_and_one_that_refuses_says_why():
    found, log = run(64, ["full", "linear", "naive"])
    assert set(found) == {"full", "linear", "naive"}
    assert [len(found[name]["seconds"]) for name in ("full", "linear")] == [2, 2]
    assert found["naive"] == {"reason": "no room"}
    rounds = [name for name, _ in log if name != "clear"][-4:]
    assert [sorted(rounds[:2]), sorted(rounds[2:])] == [["full", "linear"]] * 2  # each in an order of its own
    assert log.count(("naive", 64)) == 1


def test_a_long_call_is_predicted_from_a_shorter_one_and_left_out(monkeypatch):
    monkeypatch.setattr(calls, "stopwatch", lambda call, device: (1.0, call()))
    found, log = run(4 * side_by_side.PROBE, ["full", "linear"], limit=5.0)
    assert found["full"] == {"reason": "predicted 16 s per call"}
    assert "seconds" in found["linear"]
    assert ("full", 4 * side_by_side.PROBE) not in log


def test_growth_is_that_of_the_method():
    assert [growth(name) for name in ("full", "naive", "clustered", "lha:buckets=4")] == [2, 2, 1, 2]


def test_rounds_of_all_visits_are_one_after_the_other_and_none_counts_where_one_is_missing():
    visits = [
        {"full": {"seconds": [2.0, 4.0]}, "linear": {"seconds": [1.0, 1.0]}},
        {"full": {"seconds": [6.0]}, "linear": {"seconds": [1.0]}, "naive": {"reason": "no room"}},
    ]
    assert all_rounds(visits, "full") == [2.0, 4.0, 6.0]
    assert all_rounds(visits, "naive") == []
    ratio = speedup(visits, "linear", "full")
    assert ratio is not None
    assert (ratio.low, ratio.median, ratio.high) == (3.0, 4.0, 5.0)
    assert speedup(visits, "linear", "naive") is None


@pytest.mark.parametrize(("value", "text"), [(None, "–"), (4.93, "4.9×"), (151.2, "151×"), (1234.0, "1,234×")])
def test_figures_have_as_many_digits_as_they_are_worth(value, text):
    assert shown(value, "×") == text
