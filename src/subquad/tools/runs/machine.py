"""The conditions of a run: versions and hardware, and what else the machine did meanwhile."""

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from subquad.core.environment import gpu_architecture, hardware, versions
from subquad.kernels import native, triton
from subquad.kernels.dispatch import backends as states
from subquad.kernels.dispatch import chosen_backend
from subquad.tools.measure.noise import MachineLoad

__all__ = ["Use", "backends", "hardware", "load", "load_average", "versions", "watch"]

# i-clustered, fp32, 512 to 4,096 tokens, 12 heads of 32, one thread of an AMD EPYC, against `use_backend("reference")`:
# 13 to 25 times with AVX-512 and VPOPCNTDQ, 8 with AVX2, 4 with the baseline.
_COST = "clustered methods run as plain PyTorch: some 10 times slower, and slower than exact attention at short lengths"


_STAT = Path("/proc/stat")


@dataclass(frozen=True)
class Use:
    """A while, and what others used of the processors in it, all in seconds; None if the system does not report it."""

    elapsed: float
    others: float | None


def watch(processes: int = 1) -> Callable[[], Use]:
    """Start a measurement; return the function that ends it, with its seconds and those of other processes.

    If several processes work together, those seconds are unknown: each would count the others as other work.
    From the system's count of busy time less this process' own; time that a hypervisor gave to other guests is busy.
    """
    start, process_seconds, busy = time.perf_counter(), time.process_time(), _busy_seconds()

    def use() -> Use:
        after, elapsed = _busy_seconds(), time.perf_counter() - start
        if processes > 1 or busy is None or after is None:
            return Use(elapsed, None)
        return Use(elapsed, after - busy - (time.process_time() - process_seconds))

    return use


def load_average() -> float | None:
    """The load average of the last minute; None if the system has none."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def load(average: float | None, uses: Iterable[Use]) -> MachineLoad:
    """The other work of the machine in these whiles, after a minute with this load average.

    The share is None below a second in all: the system counts in hundredths of one.
    """
    known = [(use.elapsed, use.others) for use in uses if use.others is not None]
    elapsed, others = sum(seconds for seconds, _ in known), sum(other for _, other in known)
    cores = os.cpu_count() or 1
    share = min(max(others / (elapsed * cores), 0.0), 1.0) if elapsed >= 1.0 else None
    return MachineLoad(share, average, cores)


def _busy_seconds() -> float | None:
    """Seconds that all processors together have worked since the start of the system."""
    try:
        name, *ticks = _STAT.read_text().split("\n", 1)[0].split()
        user, nice, system, _idle, _waiting, interrupts, soft, stolen = map(int, ticks[:8])
    except (OSError, ValueError):
        return None
    total = user + nice + system + interrupts + soft + stolen
    return total / os.sysconf("SC_CLK_TCK") if name == "cpu" and total else None


def backends() -> dict[str, str]:
    """For each backend, as "backend NAME": what runs, or what is missing, what that costs and the remedy."""
    described = states() | {"reference": "plain PyTorch", "cpu": _cpu_backend(), "triton": _triton_backend()}
    in_use = chosen_backend()
    return {f"backend {name}": f"{'in use: ' * (name == in_use)}{what}" for name, what in described.items()}


def _cpu_backend() -> str:
    reason = native.refusal()
    if reason is not None:
        return f"{reason}. Until then {_COST}"
    others = [name for name in native.variants() if name != native.variant()]
    threads = "several threads" if native.has_threads() else "built without OpenMP: on one thread"
    return f"variant {native.variant()} ({', '.join(others) or 'no other'} could run here too), {threads}"


def _triton_backend() -> str:
    """The version of Triton, its GPU, and whether its tiles were measured there; or why Triton cannot run."""
    reason = triton.refusal()
    if not triton.usable():
        return str(reason)
    have, want = triton.installed_version() or "of an unknown version", triton.wanted_version()
    version = f"triton {have}" + (f", but this torch was built with {want}" if have != want else "")
    if reason is not None:
        return f"{version}; {reason}"
    if triton.INTERPRETED:
        return f"{version}, in its interpreter, on CPU tensors (TRITON_INTERPRET=1)"
    return f"{version}, for {gpu_architecture()}, {_tiles()}"


def _tiles() -> str:
    from subquad.kernels.triton.tiles import MEASURED

    if gpu_architecture() in MEASURED:
        return "with tiles measured there"
    return "whose tiles nobody has measured: `subquad bench --device cuda --gpu-sheet` does"
