"""Jobs of tests: functions that a worker can import."""

import os
import signal
from functools import partial

import torch

from subquad.tools.runs.jobs import Job, JobProgress


def square(number, progress):
    progress("half", 1, 2)
    return number**2


def where(progress):
    return os.getpid(), os.getcwd(), torch.get_num_threads(), os.environ.get("CUDA_VISIBLE_DEVICES")


def raises(error, progress):
    raise error


def dies(folder, times, progress):
    """Kill the worker, this often in all; then say how often."""
    before = len(list(folder.iterdir()))
    if before < times:
        (folder / f"{before}").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return before


def waits(folder, progress):
    """Say which process this is, and wait to be killed."""
    (folder / "pid").write_text(str(os.getpid()))
    signal.pause()


def squares(count, **more):
    return [Job(f"square {n}", partial(square, n), **more) for n in range(count)]


class Recorder(JobProgress):
    """Keeps what an executor reports."""

    def __init__(self):
        super().__init__(lambda line, done, total: self.lines.append(line), total=0)
        self.begun, self.lines, self.messages, self.most = [], [], [], 0

    def started(self, job, running):
        self.begun.append(job.key)
        self.most = max(self.most, running)

    def message(self, line):
        self.messages.append(line)
