"""Texts that arrive one by one, run in batches of similar length."""

import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

SHORT = 32  # tokens; texts up to here share a batch whatever their lengths are
SPREAD = 1.5  # longest divided by shortest text of a batch: at most a third of a batch is padding


@dataclass(frozen=True)
class Job:
    """A text that waits for its embedding."""

    text: str
    tokens: int
    result: Future[np.ndarray] = field(default_factory=Future)


def in_batches(jobs: Iterable[Job], most_tokens: int) -> list[list[Job]]:
    """Jobs sorted by length and cut into batches, each with at most `most_tokens` tokens, padding included.

    A text that is longer than that is a batch of its own.
    """
    batches: list[list[Job]] = []
    for job in sorted(jobs, key=lambda job: job.tokens):
        batch = batches[-1] if batches else []
        fits = job.tokens * (len(batch) + 1) <= most_tokens
        if batch and fits and job.tokens <= max(SHORT, SPREAD * batch[0].tokens):
            batch.append(job)
        else:
            batches.append([job])
    return batches


class Batcher:
    """One thread that runs a model; whoever submits a text gets a future.

    The thread collects texts for `wait` seconds after the first one, or takes what has queued up while it worked.
    """

    def __init__(self, run: Callable[[list[str]], Iterable[np.ndarray]], most_tokens: int, wait: float, most_jobs: int):
        self._run, self._most_tokens, self._wait = run, most_tokens, wait
        self._jobs: queue.Queue[Job | None] = queue.Queue(most_jobs)
        self._thread = threading.Thread(target=self._work, name="batcher", daemon=True)
        self._thread.start()

    def submit(self, text: str, tokens: int) -> Future[np.ndarray]:
        """Queue a text; raises queue.Full if too many are waiting."""
        job = Job(text, tokens)
        self._jobs.put_nowait(job)
        return job.result

    def alive(self) -> bool:
        """Tell whether the thread runs."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Finish what is queued, and end the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            jobs, end = [job], time.monotonic() + self._wait
            with suppress(queue.Empty):
                while (more := self._jobs.get(timeout=max(end - time.monotonic(), 0))) is not None:
                    jobs.append(more)
                self._jobs.put(None)  # the end is for the loop outside
            for batch in in_batches(jobs, self._most_tokens):
                self._answer(batch)

    def _answer(self, batch: list[Job]) -> None:
        batch = [job for job in batch if job.result.set_running_or_notify_cancel()]  # a client may have hung up
        if not batch:
            return
        try:
            results = self._run([job.text for job in batch])
        except Exception as error:  # of one batch; the next one may work
            for job in batch:
                job.result.set_exception(error)
        else:
            for job, result in zip(batch, results, strict=True):
                job.result.set_result(result)
