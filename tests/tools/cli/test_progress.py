"""Tests of the time that a run still takes: from the units of this run, from their work, or from its limit."""

import pytest

from subquad.core.messages import expect
from subquad.tools.cli import progress as module
from subquad.tools.cli.progress import Estimate, Reported, in_words, progress_bar
from subquad.tools.runs.cache import run_cache
from subquad.tools.runs.jobs import JobKind
from subquad.tools.runs.runner import JobRun, run_jobs


class Clock:
    """A clock that is moved by hand."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module.time, "monotonic", clock)
    return clock


def left(estimate, clock, *calls):
    """The messages at some times, in seconds, after some units of all."""
    said = []
    for now, done, total in calls:
        clock.now = 100.0 + now
        said.append(estimate.left(done, total))
    return said


def test_nothing_is_said_before_something_is_known(clock):
    assert left(Estimate(), clock, (0, 0, 10), (1, 1, 10), (120, 2, 10)) == ["", "", "about 8 min left"]


def test_units_that_an_earlier_run_finished_do_not_count(clock):
    # 90 of 100 were kept: two minutes each for the rest.
    assert left(Estimate(), clock, (0, 90, 100), (120, 91, 100))[1] == "about 18 min left"


def test_units_count_by_their_work(clock):
    estimate = Estimate()
    estimate.expect([1, 1, 8])
    assert left(estimate, clock, (0, 0, 3), (60, 1, 3), (120, 2, 3)) == ["", "about 9 min left", "about 8 min left"]


def test_another_part_of_a_run_is_estimated_anew(clock):
    estimate = Estimate()
    assert left(estimate, clock, (0, 0, 4), (600, 1, 4), (600, 0, 4), (660, 1, 4))[1:] == [
        "about 30 min left", "", "about 3 min left"
    ]  # fmt: skip


def test_a_run_with_a_limit_says_the_limit(clock):
    estimate = Estimate()
    estimate.expect(seconds=600.0)
    assert left(estimate, clock, (0, 0, 7), (540, 1, 3), (900, 2, 3)) == [
        "at most 10 min left", "at most 1 min left", "at most 1 min left"
    ]  # fmt: skip


def test_units_that_exceed_the_limit_are_not_counted(clock):
    """A comparison leaves most of them out, but some run though the limit is over, and then nothing is known."""
    estimate = Estimate()
    estimate.expect([1] * 20, seconds=300.0)
    assert left(estimate, clock, (0, 0, 20), (60, 1, 20), (90, 15, 20), (310, 16, 20)) == [
        "time limit in 5 min", "time limit in 4 min", "about 1 min left", ""
    ]  # fmt: skip


def test_hours_are_said_as_hours():
    assert [in_words(seconds) for seconds in (0, 61, 5399, 5401, 36000)] == [
        "1 min",
        "2 min",
        "90 min",
        "1.5 h",
        "10.0 h",
    ]


def test_a_limit_is_said_at_the_start_and_lines_say_what_is_left(clock, capsys):
    with progress_bar() as progress:
        expect(progress, seconds=600.0)
        progress("first", 0, 30)
        clock.now += 5
        progress("second", 1, 30)  # so soon after the line before that it is not printed
        clock.now += 60
        progress("third", 2, 30)
        progress("done", 30, 30)
    assert capsys.readouterr().err.splitlines() == [
        "this takes at most about 10 min",
        "0/30 first, at most 10 min left",
        "2/30 third, at most 9 min left",
        "30/30 done",
    ]


def test_a_plain_function_is_told_nothing():
    expect(lambda what, done, total: None, [1.0])


def test_jobs_from_the_cache_are_not_reported(tmp_path):
    kind, lines = JobKind("job", int), []
    jobs = [kind.job(n, run=lambda n=n: n) for n in range(4)]
    cache = run_cache(tmp_path, {})
    cache.get(jobs[0])
    cache.get(jobs[1])
    results = [cached.result for _, cached in run_jobs(jobs, cache, lambda *call: lines.append(call))]
    assert results == [0, 1, 2, 3]
    assert lines == [("job/2", 2, 4), ("job/3", 3, 4), ("done", 4, 4)]


def test_a_run_reports_the_cost_of_its_jobs(tmp_path):
    class Growing(JobRun):
        def fingerprint(self):
            return {}

        def jobs(self):
            return [JobKind("job", int).job(n, run=lambda: 0) for n in (1, 2, 4)]

        def cost(self, key):
            return float(key.partition("/")[2])

    reported = Reported(lambda *state: None)
    Growing().finish(tmp_path, reported)
    assert list(reported.estimate.costs) == [1.0, 2.0, 4.0]


def test_steps_of_a_unit_are_not_lines_of_their_own(capsys):
    progress = Reported(lambda *state: None)
    for step in range(5):
        progress(f"first: step {step}", 0, 20)
    progress("eleventh", 10, 20)
    assert capsys.readouterr().err.splitlines() == ["0/20 first: step 0", "10/20 eleventh"]
