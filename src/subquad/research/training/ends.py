"""End a run early, with one line that states why, and in which process."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch
import torch.distributed as dist

from subquad.core.errors import Ended, InputError, as_input_error
from subquad.research.training.settings import RunSettings
from subquad.tools.runs import processes
from subquad.tools.runs.launcher import Stopped, stopped_by_launcher

ROLL_CALL = 5.0  # seconds in which a process answers that has not ended and does not hang
MARKS = ("gloo", "NCCL", "in vain", "Timed out waiting", "Connection closed", "Connection reset")


@contextmanager
def clear_ends(settings: RunSettings) -> Iterator[None]:
    """Memory that runs out, another process that went, and settings that turn out wrong in the first pass."""
    try:
        with as_input_error(), stopped_by_launcher():
            yield
    except Stopped:
        _end_without_others(settings.parallel.timeout)
    except (RuntimeError, MemoryError) as error:
        training = settings.training
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error):
            raise Ended(
                f"out of memory with training.batch={training.batch} in training.accumulate={training.accumulate} "
                "passes; checkpoints are kept. Give more passes (training.accumulate, which the run resumes with), "
                "a smaller batch, or shorter inputs"
            ) from error
        if processes.joined() and (isinstance(error, dist.DistError) or any(mark in str(error) for mark in MARKS)):
            _end_without_others(settings.parallel.timeout)
        raise


def _end_without_others(timeout: float) -> NoReturn:
    """The end of a process that has lost another one; the first remaining process names it."""
    left = answering(ROLL_CALL)
    gone = sorted(set(range(processes.count())) - left)
    if processes.number() != min(left):
        raise InputError("another process reports why the run ends")
    kept = "checkpoints are kept, and the same command continues from the newest"
    if not gone:
        raise Ended(f"the launcher or another process stopped the run; {kept}")
    who = f"process {gone[0]}" if len(gone) == 1 else f"processes {', '.join(map(str, gone[:5]))}"
    raise Ended(f"{who} of {processes.count()} ended, or did not answer for {timeout:,.0f} seconds; {kept}")


def answering(seconds: float) -> set[int]:
    """The processes that call this within `seconds`, by the launcher's store; only this one without a store."""
    this, everyone = processes.number(), set(range(processes.count()))
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
        )
        store.set(_key(this), "here")
        here, end = {this}, time.monotonic() + seconds
        while here != everyone and time.monotonic() < end:
            here |= {number for number in everyone - here if store.check([_key(number)])}
            time.sleep(0.05)
        return here
    except (RuntimeError, KeyError):
        return {this}


def _key(number: int) -> str:
    return f"subquad/here/{number}"
