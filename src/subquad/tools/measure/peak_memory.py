"""Peak memory of a call, above what was allocated before it."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from subquad.tools.measure.group import ALONE, MeasuringGroup


def peak_extra_mib(
    call: Callable[[], Any], device: torch.device | None = None, group: MeasuringGroup = ALONE
) -> tuple[float, Any]:
    """MiB that torch's allocator held at most during a call, less what it held before, and what the call returned.

    Results and temporaries count. Of a group it is the process that held most.

    On a CPU from the profiler's record of every allocation, kernels' own buffers included; on CUDA from the caching
    allocator's statistics.
    """
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        returned = call()
        torch.cuda.synchronize(device)
        return group.maximum((torch.cuda.max_memory_allocated(device) - before) / 2**20), returned
    with _quiet_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        returned = call()
    result = record.profiler.kineto_results if record.profiler else None
    events = [event for event in (result.events() if result else []) if event.name() == "[memory]"]
    level = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        level += event.nbytes()
        peak = max(peak, level)
    return group.maximum(peak / 2**20), returned


@contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Swallow the lines that the profiler's C++ side writes to the standard error of the process."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
