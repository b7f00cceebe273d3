"""Run one function on many names in a few processes, each name with a time limit, through crashes."""

import multiprocessing
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

PER_PROCESS = 80  # jobs, then a fresh process: what models leave behind is given back


@dataclass
class Worker:
    process: Any
    connection: Connection
    job: str | None = None
    started: float = 0.0
    done: int = 0


def run_all(
    function: Callable[[str], Any], jobs: list[str], processes: int, limit: float, failed: Callable[[str], Any]
) -> Iterator[tuple[str, Any]]:
    """(job, result) as they come; a job over its limit or that ends its process gives `failed(reason)`."""
    context = multiprocessing.get_context("spawn")
    waiting = list(reversed(jobs))
    workers: list[Worker] = []
    try:
        while waiting or any(w.job for w in workers):
            while waiting and len(workers) < processes:
                workers.append(_start(context, function))
            for worker in workers:
                if worker.job is None and waiting:
                    worker.job, worker.started = waiting.pop(), time.monotonic()
                    worker.connection.send(worker.job)
            ready = wait([w.connection for w in workers if w.job], timeout=1.0)
            for worker in list(workers):
                if worker.job is None:
                    continue
                job = worker.job
                if worker.connection in ready:
                    try:
                        result = worker.connection.recv()
                    except EOFError:
                        worker.process.join()
                        result = failed(f"the process ended with code {worker.process.exitcode}")
                        _stop(workers, worker)
                    yield job, result
                    worker.job, worker.done = None, worker.done + 1
                    if worker in workers and worker.done >= PER_PROCESS:
                        _stop(workers, worker)
                elif time.monotonic() - worker.started > limit:
                    _stop(workers, worker)
                    yield job, failed(f"no result after {limit:.0f} s")
    finally:
        for worker in list(workers):
            _stop(workers, worker)


def _start(context: Any, function: Callable[[str], Any]) -> Worker:
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(function, theirs), daemon=True)
    process.start()
    theirs.close()
    return Worker(process, ours)


def _work(function: Callable[[str], Any], connection: Connection) -> None:
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        connection.send(function(job))


def _stop(workers: list[Worker], worker: Worker) -> None:
    workers.remove(worker)
    worker.job = None
    worker.connection.close()
    worker.process.kill()
    worker.process.join()
