"""Find the fastest tiles of each kernel on a GPU: a few candidates, each in a whole forward and backward pass."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from subquad.tools.bench.calls import DTYPES, Calls, Load
from subquad.tools.bench.gpu_timer import Timer, reason_of
from subquad.tools.measure.fidelity import relative_error
from subquad.tools.runs.jobs import Progress

# Methods, and whether causal: these launch every kernel of the table.
METHODS = (
    *(("clustered-tail", False), ("i-clustered", False), ("clustered", False)),
    *(("lsh", False), ("performer", False), ("performer", True)),
)
EQUAL = 2e-2  # how far outputs with other tiles may be apart, relative, in 16 bits


@dataclass(frozen=True)
class TriedTiles:
    """A candidate of a kernel: its time in a pass, or why there is none. The first of a kernel are the tiles in use."""

    kernel: str
    width: int
    bytes: int  # bytes of a number
    tiles: tuple[int, ...]  # rows, keys, warps, stages
    ms: float | None
    reason: str | None = None


def try_tiles(load: Load, timer: Timer, is_time_left: Callable[[], bool], progress: Progress) -> list[TriedTiles]:
    """Try the candidates of each kernel that has a table, the kernel that takes most time first."""
    from subquad.kernels.triton.tiles import TABLE

    tried: list[TriedTiles] = []
    done: set[str] = set()
    for method, causal in METHODS:
        if not is_time_left():
            break
        try:
            calls = Calls(replace(load, causal=causal))
            call = calls.call_of(method)
            times = timer.kernels(call)
        except Exception as error:  # that the method does not run is in the sheet's table, too
            tried.append(
                TriedTiles(f"all of {method}", load.head_dim, DTYPES[load.dtype].itemsize, (), None, reason_of(error))
            )
            continue
        for kernel in sorted((name for name in times if name in TABLE and name not in done), key=lambda k: -times[k]):
            progress(f"tiles of {kernel}, D={load.head_dim}", len(done), len(TABLE))
            tried += _candidates(kernel, calls, call, timer, is_time_left)
            done.add(kernel)
    return tried


def _candidates(
    kernel: str, calls: Calls, call: Callable[[], torch.Tensor], timer: Timer, is_time_left: Callable[[], bool]
) -> list[TriedTiles]:
    from subquad.kernels.triton.tiles import candidates, overridden

    load, dtype = calls.load, DTYPES[calls.load.dtype]
    tried: list[TriedTiles] = []
    first: list[torch.Tensor] | None = None
    for tiles in candidates(kernel, dtype, load.head_dim):
        if not is_time_left():
            break
        ms, reason = None, None
        try:
            with overridden(kernel, dtype, load.head_dim, tiles):
                results = _results(calls, call)
                first = results if first is None else first
                if not all(relative_error(x, its) <= EQUAL for x, its in zip(results, first, strict=True)):  # NaN: no
                    reason = "its results differ"
                else:
                    ms = timer.kernels(call).get(kernel)
        except Exception as error:  # out of shared memory, or what a compiler does not take: it is not a candidate here
            reason = reason_of(error)
        tried.append(TriedTiles(kernel, load.head_dim, dtype.itemsize, tuple(tiles), ms, reason))
    return tried


def _results(calls: Calls, call: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    """The output of a call, and its gradients."""
    calls.clear()
    out = call().detach()
    gradients = [x.grad for x in (*calls.inputs, *calls.learned) if x.grad is not None]
    calls.clear()  # so that later calls do not add to these
    return [out, *gradients]


def fastest(tried: Sequence[TriedTiles]) -> list[TriedTiles]:
    """The best candidate of each kernel and width."""
    best: dict[tuple[str, int, int], TriedTiles] = {}
    for each in tried:
        at = each.kernel, each.bytes, each.width
        if each.ms is not None and (at not in best or each.ms < (best[at].ms or 0.0)):
            best[at] = each
    return list(best.values())
