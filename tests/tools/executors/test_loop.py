"""The loop that executors with workers share, with workers that are none: order, retries, failures."""

import pytest

from subquad.core.errors import InputError
from subquad.tools.runs.executors import LocalExecutor, WorkerError
from subquad.tools.runs.executors.attempt import JobFailure
from subquad.tools.runs.executors.executor import RETRIES, LostWorker, WorkerExecutor
from subquad.tools.runs.jobs import Job
from tests.tools.executors.jobs import Recorder, squares


def call(progress):
    return None


class Fake(WorkerExecutor):
    """Ends what runs in the order in which it began; `ends` has how jobs end, in turn."""

    description = "nobody"

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

    def start(self, job):
        self.together.append({job.key, *self.running})

    def ended(self):
        key = next(iter(self.running))
        ends = self.ends.get(key)
        return [(key, ends.pop(0) if ends else f"result of {key}")]

    def drop(self):
        self.dropped += list(self.running)

    def close(self):
        pass


def jobs(*keys, **more):
    return [Job(key, call, **more) for key in keys]


def run(executor, given):
    recorder = Recorder()
    return {job.key: result for job, result in executor.run(given, recorder)}, recorder


def test_every_job_runs_once_and_no_more_than_there_is_room_for():
    fake = Fake(width=3)
    found, recorder = run(fake, jobs(*"abcdefg"))
    assert found == {key: f"result of {key}" for key in "abcdefg"}
    assert recorder.begun == list("abcdefg")
    assert max(map(len, fake.together)) == 3


def test_a_job_waits_for_those_before_it():
    found, recorder = run(Fake(width=4), [*jobs("late", after=("a", "b")), *jobs("a", "b", "c")])
    assert recorder.begun == ["a", "b", "c", "late"]
    assert len(found) == 4


@pytest.mark.parametrize(("machines", "most"), [(1, 1), (2, 2)])
def test_jobs_that_measure_time_run_apart_one_on_a_machine(machines, most):
    fake = Fake(width=4, machines=machines)
    run(fake, [*jobs("a", "b"), *jobs("t1", "t2", "t3", timed=True), *jobs("c")])
    timed = [running for running in fake.together if running & {"t1", "t2", "t3"}]
    assert len(timed) == 3
    assert not any(running & {"a", "b", "c"} for running in timed)
    assert max(map(len, timed)) == most


def test_jobs_are_read_as_room_comes_up_and_after_results_were_given():
    given = []

    def source():
        for i in range(4):
            given.append(("asked", i))
            yield Job(f"{i}", call)

    for job, _ in Fake(width=2).run(source(), Recorder()):
        given.append(("done", int(job.key)))
    assert given[:4] == [("asked", 0), ("asked", 1), ("done", 0), ("asked", 2)]


def test_a_lost_worker_is_reported_and_its_job_runs_again():
    found, recorder = run(Fake(a=[LostWorker("by signal 9")] * RETRIES), jobs("a", "b"))
    assert set(found) == {"a", "b"}
    assert recorder.begun.count("a") == RETRIES + 1
    assert recorder.messages == ["the worker of 'a' was lost (by signal 9); it runs again"] * RETRIES


def test_a_job_that_always_loses_its_worker_is_given_up_and_the_others_are_finished_first():
    fake, done = Fake(a=[LostWorker("by signal 9")] * 9), []
    with pytest.raises(InputError, match=r"the worker of 'a' was lost 4 times, the last time by signal 9; what is fin"):
        done.extend(job.key for job, _ in fake.run(jobs("a", "b"), Recorder()))
    assert done == ["b"]


@pytest.mark.parametrize(
    ("is_input_error", "error", "message"),
    [(True, InputError, "no data"), (False, WorkerError, "'a' failed in a worker: KeyError: no data")],
)
def test_a_failure_ends_the_run_once_what_runs_is_finished(is_input_error, error, message):
    fake, done, recorder = Fake(a=[JobFailure("KeyError", "no data", "the traceback", is_input_error)]), [], Recorder()
    with pytest.raises(error, match=f"^{message}(\n|$)") as raised:
        done.extend(job.key for job, _ in fake.run(jobs("a", "b", "c"), recorder))
    assert done == ["b"]  # c never began
    assert recorder.messages == ["'a' failed; the run ends after what still runs (1)"]
    assert is_input_error or raised.value.__notes__ == ["the traceback"]


def test_what_runs_is_dropped_where_the_caller_stops():
    fake = Fake(width=2)
    for _ in fake.run(jobs("a", "b", "c"), Recorder()):
        break
    assert fake.dropped == ["b"]


def test_here_runs_one_after_another_and_relays_progress():
    recorder = Recorder()
    found = [result for _, result in LocalExecutor().run(squares(3), recorder)]
    assert found == [0, 1, 4]
    assert recorder.most == 1
    assert recorder.lines[0] == "square 0: half 1/2"
