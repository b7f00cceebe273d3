"""`subquad bench --gpu-sheet`: what one GPU does, in ten minutes: methods against SDPA, and the tiles of kernels.

The most informative lengths come first, so that the least important measurements are skipped if time runs out. Each
time is printed next to the prediction of the cost model (`measure.gpu_model`) for this GPU.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from subquad.core.environment import gpu_architecture
from subquad.core.errors import InputError, as_input_error, check_device
from subquad.kernels import triton
from subquad.methods import parse_method
from subquad.methods.full import EXACT
from subquad.tools.bench.calls import DTYPES, Calls, Load
from subquad.tools.bench.gpu_tiles import TriedTiles, fastest, try_tiles
from subquad.tools.bench.gpu_timer import Call, GpuTimer, Timer, reason_of
from subquad.tools.bench.settings import PASSES, BenchSettings
from subquad.tools.measure import gpu_model as model
from subquad.tools.measure.fidelity import cosine
from subquad.tools.measure.gpu_chips import Gpu, gpu_named
from subquad.tools.runs import machine
from subquad.tools.runs.jobs import Progress, silent

METHODS = (
    *("clustered-tail", "i-clustered", "clustered", "lsh", "smyrf", "reformer"),
    *("performer", "linear", "linformer", "nystrom", "local"),
)
CAUSAL_METHODS = "clustered-tail", "i-clustered", "performer", "linear", "local"
LENGTHS = 16384, 4096, 65536, 131072, 32768, 8192, 2048  # in this order
TAKEN = "methods", "lengths", "device", "seed"  # settings of `subquad bench` that the sheet takes
OF_CELLS = 0.7  # of the sheet's time, after which no further cell is begun; the rest is for tiles
NO_TIME = "no time was left"  # a reason
CUDNN = "cudnn"  # SDPA by cuDNN's kernel, a second baseline
FLASH = "FlashAttention-2"  # the algorithm of torch's flash kernel
COMPARED_HEADS = 4  # of whose outputs the fidelity is


@dataclass(frozen=True)
class SheetPlan:
    """The measurements of the sheet, in about `minutes`: no further measurement is begun after them."""

    methods: tuple[str, ...] = METHODS
    causal_methods: tuple[str, ...] = CAUSAL_METHODS
    lengths: tuple[int, ...] = LENGTHS
    widths: tuple[int, ...] = (64, 128)
    heads: int = 32
    dtype: str = "bfloat16"
    device: str = "cuda"
    seed: int = 0
    minutes: float = 9.5

    def load(self, length: int, width: int, passes: str, causal: bool = False) -> Load:
        """One load of the plan."""
        return Load(length, self.dtype, passes, 1, self.heads, width, self.device, self.seed, causal)

    def loads(self) -> Iterator[Load]:
        """All loads, the most informative first: forward passes at all lengths, then those with a backward pass.

        Causal attention is measured in the forward pass alone.
        """
        forward, backward = PASSES
        for width in self.widths:
            for length in self.lengths:
                yield self.load(length, width, forward)
                if self.causal_methods:
                    yield self.load(length, width, forward, causal=True)
            for length in self.lengths:
                yield self.load(length, width, backward)

    def rows(self, load: Load) -> tuple[str, ...]:
        """The methods measured on a load, the baseline first."""
        return EXACT, CUDNN, *(self.causal_methods if load.causal else self.methods)


@dataclass
class SheetCell:
    """One method on one load; what is None was not measured, for the `reason` if there is one."""

    method: str
    length: int
    width: int
    passes: str
    causal: bool = False
    eager_ms: float | None = None
    graph_ms: float | None = None
    eager_speedup: float | None = None  # over SDPA, its own time taken the same way
    graph_speedup: float | None = None
    peak_mib: float | None = None
    fidelity: float | None = None
    predicted_eager_ms: float | None = None
    predicted_graph_ms: float | None = None
    reason: str | None = None


@dataclass
class Sheet:
    """All that was measured."""

    plan: SheetPlan
    gpu: str
    architecture: str
    cells: list[SheetCell] = field(default_factory=list)
    tiles: list[TriedTiles] = field(default_factory=list)
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    hardware: dict[str, str] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """The sheet as plain data, with the fastest tiles."""
        return asdict(self) | {"fastest": [asdict(each) for each in fastest(self.tiles)]}


Store = Callable[[Sheet], Any]  # receives what was measured so far


def plan_of(settings: BenchSettings) -> SheetPlan:
    """The plan of a sheet; InputError for settings that the sheet does not take, and where there is no GPU for it."""
    standard = BenchSettings()
    for each in fields(settings):
        if each.name not in TAKEN and getattr(settings, each.name) != getattr(standard, each.name):
            raise InputError(f"--gpu-sheet sets everything but --{', --'.join(TAKEN)} itself, and {each.name} is given")
    if settings.device.partition(":")[0] != "cuda":
        raise InputError(f"--gpu-sheet needs --device cuda, and the device is {settings.device}")
    check_device(settings.device)
    if (reason := triton.refusal()) is not None:
        raise InputError(f"--gpu-sheet measures the Triton kernels, which cannot run here: {reason}")
    with as_input_error():
        for method in settings.methods:
            parse_method(method)
    plan = SheetPlan(device=settings.device, seed=settings.seed)
    if settings.methods != standard.methods:
        causal = tuple(m for m in settings.methods if parse_method(m).traits.causal != "no")
        plan = replace(plan, methods=settings.methods, causal_methods=causal)
    return plan if settings.lengths == standard.lengths else replace(plan, lengths=settings.lengths)


def measure(plan: SheetPlan, progress: Progress = silent, store: Store | None = None) -> Sheet:
    """Measure the sheet on the GPU of the plan; `store` gets it after each load, so that a run cut short leaves it."""
    with torch.cuda.device(plan.device):  # events and graphs are those of the current device
        sheet = Sheet(plan, torch.cuda.get_device_name(plan.device), gpu_architecture())
        sheet.versions, sheet.hardware = machine.versions(), machine.hardware(plan.device)
        return fill(sheet, GpuTimer(plan.device), progress, store=store)


def fill(
    sheet: Sheet,
    timer: Timer,
    progress: Progress,
    clock: Callable[[], float] = time.monotonic,
    store: Store | None = None,
) -> Sheet:
    """Measure cells and then tiles, each until its time is up."""
    began, plan, loads = clock(), sheet.plan, list(sheet.plan.loads())
    total = sum(len(plan.rows(load)) for load in loads)
    for load in loads:
        if clock() - began > 60 * OF_CELLS * plan.minutes:
            sheet.cells += [_cell(name, load, reason=NO_TIME) for name in plan.rows(load)]
            continue
        for cell in _cells(load, plan.rows(load), timer, gpu_named(sheet.gpu)):
            progress(f"{cell.method} at {load.length:,} tokens, {load.passes}", len(sheet.cells), total)
            sheet.cells.append(cell)
        sheet.seconds = clock() - began
        if store is not None:
            store(sheet)
    for width in plan.widths:
        load = plan.load(max(plan.lengths[:2]), width, PASSES[1])
        sheet.tiles += try_tiles(load, timer, lambda: clock() - began < 60 * plan.minutes, progress)
    sheet.seconds = clock() - began
    if store is not None:
        store(sheet)
    return sheet


def _cells(load: Load, names: Sequence[str], timer: Timer, gpu: Gpu | None) -> Iterator[SheetCell]:
    """The cells of a load, all on the same inputs."""
    try:
        calls = Calls(load)
    except (RuntimeError, MemoryError) as error:  # the inputs alone do not fit into memory
        yield from [_cell(name, load, reason=reason_of(error)) for name in names]
        return
    first: SheetCell | None = None
    exact: torch.Tensor | None = None
    for name in names:
        cell, out = measured(name, calls, timer, exact)
        first = cell if first is None else first
        exact = out if exact is None and name in (EXACT, CUDNN) else exact
        _compare(cell, first)
        if gpu is not None and not load.causal:
            predict(cell, load, gpu)
        yield cell


def _compare(cell: SheetCell, exact: SheetCell | None) -> None:
    """Set the speed-ups over SDPA, where both were measured."""
    if exact is not None and exact.eager_ms and cell.eager_ms:
        cell.eager_speedup = exact.eager_ms / cell.eager_ms
    if exact is not None and exact.graph_ms and cell.graph_ms:
        cell.graph_speedup = exact.graph_ms / cell.graph_ms


def _cell(name: str, load: Load, **known: Any) -> SheetCell:
    return SheetCell(name, load.length, load.head_dim, load.passes, load.causal, **known)


def measured(
    name: str, calls: Calls, timer: Timer, exact: torch.Tensor | None = None
) -> tuple[SheetCell, torch.Tensor | None]:
    """One cell, and some heads of the method's output; what goes wrong is the cell's reason."""
    cell, out = _cell(name, calls.load), None
    try:
        kernel = {EXACT: SDPBackend.FLASH_ATTENTION, CUDNN: SDPBackend.CUDNN_ATTENTION}.get(name)
        call = calls.call_of(name) if kernel is None else _only(kernel, calls.call_of(EXACT))
        call = partial(_cleared, calls, call)
        out = call().detach()[:, :COMPARED_HEADS].clone()
        if exact is not None:
            cell.fidelity = float(cosine(*(x.float().flatten(0, 2) for x in (out, exact))).mean())
        cell.eager_ms = timer.eager(call)
        calls.clear()  # gradients of the last call: freed inside of the measured call they would lower its peak
        cell.peak_mib = timer.peak_mib(call)
        cell.graph_ms = timer.graph(call)
    except Exception as error:  # also of Triton's compiler: a method that does not run is a result of the sheet
        cell.reason = reason_of(error)
    return cell, out


def _cleared(calls: Calls, call: Call) -> torch.Tensor:
    calls.clear()
    result: torch.Tensor = call()
    return result


def _only(kernel: SDPBackend, call: Call) -> Call:
    """A call of SDPA by one of its kernels alone, where there is a GPU."""

    def run() -> Any:
        with sdpa_kernel(kernel) if torch.cuda.is_available() else nullcontext():
            return call()

    return run


def predict(cell: SheetCell, load: Load, gpu: Gpu) -> None:
    """Add the cost model's times to the measured ones."""
    asked = model.GpuLoad(load.length, load.heads, load.head_dim, DTYPES[load.dtype])
    if cell.method == CUDNN:
        return
    if cell.method == EXACT:
        flash = FLASH if FLASH in gpu.exact else None
        cell.predicted_eager_ms = cell.predicted_graph_ms = 1e3 * model.exact(gpu, asked, load.passes, flash)
        return
    try:
        steps = model.record(parse_method(cell.method), asked).steps(load.passes)
    except (ValueError, RuntimeError, NotImplementedError):  # an op without a kernel: nothing is predicted
        return
    cell.predicted_eager_ms = 1e3 * model.eager(steps, gpu)
    cell.predicted_graph_ms = 1e3 * model.captured(steps, gpu)
