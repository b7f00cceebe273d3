"""The loop that executors with workers share, with workers that are none: order, retries, failures."""

import pytest

from subquad.core.errors import InputError
from subquad.tools.runs.executors import Here, Work, WorkFailed
from subquad.tools.runs.executors.attempt import Failed
from subquad.tools.runs.executors.base import RETRIES, Distributed, Lost
from tests.tools.executors.work import Heard, squares


def call(progress):
    return None


class Fake(Distributed):
    """Ends what runs in the order in which it began; `ends` has how works end, in turn."""

    says = "nobody"

    def __init__(self, width=2, machines=1, **ends):
        super().__init__()
        self._width, self._machines, self.ends = width, machines, {key: list(of) for key, of in ends.items()}
        self.together, self.dropped = [], []

    @property
    def width(self):
        return self._width

    @property
    def machines(self):
        return self._machines

    def start(self, work):
        self.together.append({work.key, *self.running})

    def ended(self):
        key = next(iter(self.running))
        ends = self.ends.get(key)
        return [(key, ends.pop(0) if ends else f"result of {key}")]

    def drop(self):
        self.dropped += list(self.running)

    def close(self):
        pass


def works(*keys, **more):
    return [Work(key, call, **more) for key in keys]


def run(executor, given):
    heard = Heard()
    return {work.key: result for work, result in executor.run(given, heard)}, heard


def test_every_work_runs_once_and_no_more_than_there_is_room_for():
    fake = Fake(width=3)
    found, heard = run(fake, works(*"abcdefg"))
    assert found == {key: f"result of {key}" for key in "abcdefg"}
    assert heard.begun == list("abcdefg")
    assert max(map(len, fake.together)) == 3


def test_a_work_waits_for_those_before_it():
    found, heard = run(Fake(width=4), [*works("late", after=("a", "b")), *works("a", "b", "c")])
    assert heard.begun == ["a", "b", "c", "late"]
    assert len(found) == 4


@pytest.mark.parametrize(("machines", "most"), [(1, 1), (2, 2)])
def test_works_that_measure_time_run_apart_one_on_a_machine(machines, most):
    fake = Fake(width=4, machines=machines)
    run(fake, [*works("a", "b"), *works("t1", "t2", "t3", timed=True), *works("c")])
    timed = [running for running in fake.together if running & {"t1", "t2", "t3"}]
    assert len(timed) == 3
    assert not any(running & {"a", "b", "c"} for running in timed)
    assert max(map(len, timed)) == most


def test_works_are_read_as_room_comes_up_and_after_results_were_given():
    given = []

    def source():
        for i in range(4):
            given.append(("asked", i))
            yield Work(f"{i}", call)

    for work, _ in Fake(width=2).run(source(), Heard()):
        given.append(("done", int(work.key)))
    assert given[:4] == [("asked", 0), ("asked", 1), ("done", 0), ("asked", 2)]


def test_a_lost_worker_is_told_and_its_work_runs_again():
    found, heard = run(Fake(a=[Lost("by signal 9")] * RETRIES), works("a", "b"))
    assert set(found) == {"a", "b"}
    assert heard.begun.count("a") == RETRIES + 1
    assert heard.remarks == ["the worker of 'a' was lost (by signal 9); it runs again"] * RETRIES


def test_a_work_that_always_loses_its_worker_is_given_up_and_the_others_are_finished_first():
    fake, done = Fake(a=[Lost("by signal 9")] * 9), []
    with pytest.raises(InputError, match=r"the worker of 'a' was lost 4 times, the last time by signal 9; what is fin"):
        done.extend(work.key for work, _ in fake.run(works("a", "b"), Heard()))
    assert done == ["b"]


@pytest.mark.parametrize(
    ("of_the_user", "error", "message"),
    [(True, InputError, "no data"), (False, WorkFailed, "'a' failed in a worker: KeyError: no data")],
)
def test_a_failure_ends_the_run_once_what_runs_is_finished(of_the_user, error, message):
    fake, done, heard = Fake(a=[Failed("KeyError", "no data", "the traceback", of_the_user)]), [], Heard()
    with pytest.raises(error, match=f"^{message}(\n|$)") as raised:
        done.extend(work.key for work, _ in fake.run(works("a", "b", "c"), heard))
    assert done == ["b"]  # c never began
    assert heard.remarks == ["'a' failed; the run ends after what still runs (1)"]
    assert of_the_user or raised.value.__notes__ == ["the traceback"]


def test_what_runs_is_dropped_where_the_caller_stops():
    fake = Fake(width=2)
    for _ in fake.run(works("a", "b", "c"), Heard()):
        break
    assert fake.dropped == ["b"]


def test_here_runs_one_after_another_and_relays_progress():
    heard = Heard()
    found = [result for _, result in Here().run(squares(3), heard)]
    assert found == [0, 1, 4]
    assert heard.most == 1
    assert heard.lines[0] == "square 0: half 1/2"
