"""Times of calls on a GPU: launched from Python, replayed from a CUDA graph, and of each kernel by itself."""

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch

from subquad.tools.measure.deadline import Deadline
from subquad.tools.measure.peak_memory import peak_extra_mib

Call = Callable[[], Any]
SECONDS = 0.1  # of a measurement
MOST = 50  # calls of one
WARM_UP = 3  # calls before one, the first of which compiles


@runtime_checkable
class Timer(Protocol):
    """The timer for the sheet of a GPU. Times are medians, in milliseconds."""

    def eager(self, call: Call) -> float:
        """The time of a call whose kernels Python launches."""

    def graph(self, call: Call) -> float:
        """The time of the call as a CUDA graph. RuntimeError where it cannot be captured."""

    def peak_mib(self, call: Call) -> float:
        """The peak memory of a call in addition to its inputs."""

    def kernels(self, call: Call) -> dict[str, float]:
        """The time of each of our kernels in a call, all its launches together."""


class GpuTimer:
    """A timer of CUDA's events."""

    def __init__(self, device: str):
        self.device = torch.device(device)

    def eager(self, call: Call) -> float:
        """Median over calls for 0.1 seconds, between two events each."""
        for _ in range(WARM_UP):
            call()
        return self._median(call)

    def graph(self, call: Call) -> float:
        """Median over replays, of a call that was captured after a warm-up on another stream."""
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                call()
        torch.cuda.current_stream(self.device).wait_stream(side)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        graph.replay()
        return self._median(graph.replay)

    def peak_mib(self, call: Call) -> float:
        """The peak of torch's allocator, above what it held before."""
        return peak_extra_mib(call, self.device)[0]

    def kernels(self, call: Call) -> dict[str, float]:
        """Median over three calls, with events around each launch."""
        from subquad.kernels.triton.launch import around_launches

        call()
        times: dict[str, list[float]] = {}
        for _ in range(WARM_UP):
            events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

            @contextmanager
            def around(name: str, events: Any = events) -> Iterator[None]:
                start, end = _event(), _event()
                start.record()
                yield
                end.record()
                events.append((name, start, end))

            with around_launches(around):
                call()
            torch.cuda.synchronize(self.device)
            of_call: dict[str, float] = {}
            for name, start, end in events:
                of_call[name] = of_call.get(name, 0.0) + start.elapsed_time(end)
            for name, ms in of_call.items():
                times.setdefault(name, []).append(ms)
        return {name: statistics.median(ms) for name, ms in times.items()}

    def _median(self, call: Call) -> float:
        torch.cuda.synchronize(self.device)
        times: list[float] = []
        for _ in Deadline(SECONDS).within(range(MOST), least=3):
            start, end = _event(), _event()
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return statistics.median(times)


def reason_of(error: Exception) -> str:
    """An error in one line that fits into a table."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
