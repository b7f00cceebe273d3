"""Works in processes of this machine: they start, are killed, and end with what started them."""

import os
import subprocess
import sys
import time
from functools import partial

import pytest
import torch

from subquad.core.errors import InputError
from subquad.tools.runs.executors import ProcessExecutor, WorkerError
from subquad.tools.runs.jobs import Job
from tests.tools.executors.jobs import Recorder, dies, raises, squares, where

pytestmark = pytest.mark.slow
DRIVER = """
import sys
from functools import partial
from pathlib import Path
from subquad.tools.runs.executors import ProcessExecutor
from subquad.tools.runs.jobs import Job
from tests.tools.executors.jobs import Recorder, waits
if __name__ == "__main__":
    with ProcessExecutor(1) as executor:
        list(executor.run([Job("waits", partial(waits, Path(sys.argv[1])))], Recorder()))
"""


@pytest.fixture(scope="module")
def executor():
    with ProcessExecutor(2) as executor:
        yield executor


def results(executor, works, recorder=None):
    return {work.key: result for work, result in executor.run(works, recorder or Recorder())}


def test_results_come_back_and_workers_stay_where_this_process_is(executor):
    recorder = Recorder()
    assert results(executor, squares(4), recorder) == {f"square {n}": n**2 for n in range(4)}
    assert recorder.most == 2
    one, other = (results(executor, [Job("where", where)])["where"] for _ in range(2))
    assert one == other
    assert one[0] != os.getpid()
    assert one[1] == os.getcwd()
    assert one[2] == max(torch.get_num_threads() // 2, 1)


def test_a_killed_worker_is_replaced_and_its_work_runs_again(executor, tmp_path):
    recorder = Recorder()
    found = results(executor, [Job("dies", partial(dies, tmp_path, 2)), *squares(2)], recorder)
    assert found == {"dies": 2, "square 0": 0, "square 1": 1}
    assert recorder.messages == ["the worker of 'dies' was lost (by signal 9); it runs again"] * 2


def test_errors_keep_their_kind(executor):
    with pytest.raises(InputError, match=r"^no such thing$"):
        results(executor, [Job("raises", partial(raises, InputError("no such thing")))])
    with pytest.raises(WorkerError, match=r"^'raises' failed in a worker: KeyError: 'x'") as raised:
        results(executor, [Job("raises", partial(raises, KeyError("x")))])
    assert "in raises" in raised.value.__notes__[0]


def test_what_cannot_be_sent_is_named(executor):
    with pytest.raises(InputError, match=r"^'local' cannot be sent to a worker \(.*\): write it as functools\.partial"):
        results(executor, [Job("local", lambda progress: 1)])


def test_a_worker_with_another_version_or_machine_is_refused(executor, monkeypatch):
    from subquad.tools.runs.executors import attempt

    monkeypatch.setattr(attempt, "versions", lambda: {"torch": "1.0"})
    with pytest.raises(InputError, match=r"has torch \S+, but the run began with 1\.0: all"):
        results(executor, squares(1))
    monkeypatch.undo()
    monkeypatch.setattr(attempt, "hardware", lambda device: {"processor": "abacus"})
    assert results(executor, squares(1)) == {"square 0": 0}  # it measures no time
    with pytest.raises(InputError, match=r", but the run began with abacus: all machines of a run must have the same"):
        results(executor, squares(1, timed=True))


def test_a_worker_ends_with_the_process_that_started_it(tmp_path):
    (tmp_path / "driver.py").write_text(DRIVER)
    paths = os.pathsep.join([os.getcwd(), *sys.path])
    driver = subprocess.Popen(
        [sys.executable, tmp_path / "driver.py", tmp_path], env={**os.environ, "PYTHONPATH": paths}
    )
    pid = tmp_path / "pid"
    try:
        _wait_until(lambda: pid.exists() or driver.poll() is not None)
        assert driver.poll() is None, "the driver ended before its worker began"
        worker = int(_wait_until(pid.read_text))
    finally:
        driver.kill()
        driver.wait()
    _wait_until(lambda: not _runs(worker))


def _wait_until(true, seconds=400):
    end = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return found


def _runs(pid):
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as stat:  # a zombie that nobody waits for has ended
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
