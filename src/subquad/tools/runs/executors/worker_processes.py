"""Works in worker processes of this machine."""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from subquad.core.errors import InputError
from subquad.tools.runs.executors.attempt import WorkerEnvironment, attempt
from subquad.tools.runs.executors.executor import LostWorker, WorkerExecutor
from subquad.tools.runs.jobs import Job

SPAWN = mp.get_context("spawn")  # a fork of a process with threads, such as torch's, may hang


@dataclass
class _Worker:
    """A process, the pipe to it, and what it runs."""

    process: BaseProcess
    pipe: Connection
    gpu: str | None
    key: str = ""


class ProcessExecutor(WorkerExecutor):
    """Worker processes that share this machine's threads, each with a GPU of its own where the device is one.

    A worker starts when it is needed and stays for the jobs that follow. A job that measures time runs alone, with
    all threads.
    """

    def __init__(self, workers: int | None, device: str = "cpu"):
        super().__init__()
        self.device, self.threads = device, torch.get_num_threads()
        gpus = _gpus() if device != "cpu" else []
        self._width = workers or len(gpus) or os.cpu_count() or 1
        if gpus and self._width > len(gpus):
            raise InputError(f"{self._width} workers need a GPU each, but there are {len(gpus)}: give fewer --workers")
        self._free: list[str | None] = [*gpus[: self._width]] if gpus else [None] * self._width
        self._workers: list[_Worker] = []

    @property
    def description(self) -> str:
        """The description in reports."""
        return f"{self._width} process{'es' * (self._width > 1)}"

    @property
    def width(self) -> int:
        """The number of jobs that run at once."""
        return self._width

    machines = 1

    def start(self, job: Job[Any]) -> None:
        """Have an idle worker run this, or a new one."""
        threads = self.threads if job.timed else max(self.threads // self._width, 1)
        environment = WorkerEnvironment.current(self.device, threads, job.timed)
        call = pickled(job, pickle.dumps)
        worker = next((worker for worker in self._workers if not worker.key), None) or self._new()
        worker.key = job.key
        with suppress(OSError):  # it went while it was idle: `ended` finds that
            worker.pipe.send((call, environment))

    def ended(self) -> list[tuple[str, Any]]:
        """Wait until something ends."""
        busy: dict[Any, _Worker] = {worker.pipe: worker for worker in self._workers if worker.key}
        return [self._outcome(busy[pipe]) for pipe in wait(list(busy))]

    def drop(self) -> None:
        """Stop what runs."""
        for worker in [worker for worker in self._workers if worker.key]:
            self._end(worker)

    def close(self) -> None:
        """End all workers."""
        for worker in list(self._workers):
            self._end(worker)

    def _new(self) -> _Worker:
        """Start a worker."""
        gpu, (local_end, worker_end) = self._free.pop(0), SPAWN.Pipe()
        process = SPAWN.Process(target=_serve, args=(worker_end,))
        shared = str(max(self.threads // self._width, 1))
        with environment_variables(
            {"OMP_NUM_THREADS": shared} | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})
        ):
            process.start()
        worker_end.close()
        self._workers.append(_Worker(process, local_end, gpu))
        return self._workers[-1]

    def _outcome(self, worker: _Worker) -> tuple[str, Any]:
        """The outcome that a worker sent, or how its process ended."""
        key = worker.key
        try:
            outcome = worker.pipe.recv()
        except (EOFError, OSError):
            worker.process.join()
            outcome = LostWorker(_exit_reason(worker.process.exitcode or 0))
            self._end(worker)
        worker.key = ""
        return key, outcome

    def _end(self, worker: _Worker) -> None:
        """End a worker, whatever it does."""
        self._workers.remove(worker)
        self._free.append(worker.gpu)
        worker.process.kill()
        worker.process.join()
        worker.pipe.close()


def pickled(job: Job[Any], dumps: Any) -> bytes:
    """The call of a job as bytes; InputError where it is not one that a worker can be sent."""
    try:
        return bytes(dumps(job.run))
    except Exception as error:  # PicklingError, AttributeError or TypeError, by what is in the way
        raise InputError(
            f"{job.key!r} cannot be sent to a worker ({error}): write it as functools.partial of a function at the "
            "top of a module, with plain arguments, or run it without --executor"
        ) from error


@contextmanager
def environment_variables(values: dict[str, str]) -> Iterator[None]:
    """In the block, these environment variables are set: a process that starts there keeps them."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _serve(pipe: Connection) -> None:
    """Serve as a worker process until it is killed: run what comes through the pipe, and send back the results."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started the workers; it kills them
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.dup2(2, 1)  # results on standard output are that process' own
    while True:
        try:
            call, environment = pipe.recv()
        except EOFError:
            return
        pipe.send(attempt(call, environment))


def _end_with_parent() -> None:
    """End this worker once the process that started it is gone: a resumed run must not find it at work."""
    parent = mp.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _exit_reason(code: int) -> str:
    """The end of a process, in words."""
    return f"by signal {-code}" if code < 0 else f"with exit code {code}"


def _gpus() -> list[str]:
    """The GPUs that this process sees, as CUDA_VISIBLE_DEVICES names them."""
    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [name.strip() for name in named.split(",")][:count] if named else [str(i) for i in range(count)]
