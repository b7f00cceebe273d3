"""Peak memory of a call as the operating system sees it, so that memory which compiled kernels take themselves counts.

Only a process in which little else happens can tell: see `tools.bench.extra_memory`.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from subquad.tools.measure.peak_memory import peak_extra_mib

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Peak:
    """Bytes at the highest moment of a call above those before it, or None; how they were counted, or why not."""

    bytes: int | None = None
    method: str = ""


def peak_extra(call: Callable[[], Any], device: torch.device | None = None) -> Peak:
    """The memory that a call adds to the peak of this process, its result included.

    On a CPU the growth of the peak resident set: pages that were touched. On CUDA what torch's allocator held.
    """
    if device is not None and device.type == "cuda":
        return Peak(int(peak_extra_mib(call, device)[0] * 2**20), "torch's allocator on the device")
    if _forget_peak():
        return Peak(_growth(_peak_on_linux, call), "growth of the peak resident set")
    if sys.platform == "win32":
        return Peak(None, "this system does not tell a process its peak memory")
    return Peak(
        _growth(_peak_so_far, call), "growth of the peak resident set over an earlier peak, so at least this much"
    )


def _growth(peak: Callable[[], int], call: Callable[[], Any]) -> int:
    before = peak()
    returned = call()  # kept, so that it is there when the peak is read
    grown = peak() - before
    del returned
    return max(grown, 0)


def _forget_peak() -> bool:
    """Let Linux count the peak from now on; False where it cannot."""
    try:
        CLEAR.write_text("5")
        return "VmHWM" in STATUS.read_text()
    except OSError:
        return False


def _peak_on_linux() -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def _peak_so_far() -> int:
    if STATUS.exists():  # there, `getrusage` would tell the peak of the process that started this one
        return _peak_on_linux()
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
