"""The time that a method takes on a GPU, predicted from its launches. No GPU is needed.

    time of a launch = max(2 · multiply-adds / (peak · 0.4), bytes / (bandwidth · 0.75), what a sort takes,
                           operations / (those of the multiprocessors' own lanes · 0.4)) / share
    share            = programs / multiprocessors, where there are fewer programs, else 1
    captured         = Σ (time + 1.3 µs)              kernels of a CUDA graph follow each other by themselves
    eager            = max(captured, host)            host = 4 µs per call of torch, 10 µs per launch of Triton

The launches are recorded on the meta device (`kernels.triton.recording`). So these are our kernels' own grids,
multiply-adds and bytes; what is assumed is how much of a GPU's peaks they reach.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from subquad.attention import attention
from subquad.kernels.triton.recording import Launch, OtherCall, recording
from subquad.methods import Method, list_methods
from subquad.tools.measure.gpu_chips import Gpu

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

# Of the peaks: FlashAttention-2 written in Triton reaches 0.46 of an H100's, and our kernels also gather their rows.
OF_PEAK = 0.4
OF_BANDWIDTH = 0.75  # what copies reach is 0.85 to 0.9; rows of 128 bytes that are gathered reach less
GAP = 1.3e-6  # seconds from one kernel of a CUDA graph to the next
TORCH_CALL = 4e-6  # seconds of the host
TRITON_LAUNCH = 10e-6  # seconds of the host: Triton's launcher is Python
KERNELS = {"sort": 10, "topk": 4, "linalg_cholesky_ex": 8, "cumsum": 2}  # of one call; of others: 1
TOPK = 10  # how many times as fast as a sort a choice of the largest is: it reads the numbers 16 times, from caches
BACKWARD = 2.5  # operations of exact attention's backward pass, in those of the forward pass
OF_FORWARD = 0.8  # of its forward throughput that exact attention's backward pass reaches
# Methods that are quadratic, or made of others.
LEFT_OUT = "full", "shared-full", "oracle-top", "synthesizer", "by-length", "mixed-heads", "sum"
# Kernels that multiply centred vectors, which are fp32.
FP32_KERNELS = ("directions_of_means", "products_of_run")


@dataclass(frozen=True)
class GpuStep:
    """Something that a GPU is asked for: a launch of ours, or a call of torch.

    Attributes:
        name: the kernel's or the operator's.
        products: multiply-adds.
        bytes: bytes that pass between the chip and its memory.
        programs: programs of the launch; None for a call of torch, which is taken to fill the GPU.
        kind: the kind of products: "16 bits", or one of `Gpu.slower`.
        keys: numbers that it sorts.
        operations: operations on single numbers.
        kernels: number of kernels that follow each other on the device.
    """

    name: str
    products: int = 0
    bytes: int = 0
    programs: int | None = None
    kind: str = "16 bits"
    keys: float = 0.0
    operations: int = 0
    kernels: int = 1

    @property
    def host(self) -> float:
        """Seconds until Python has asked for it."""
        return TORCH_CALL if self.programs is None else TRITON_LAUNCH

    def device(self, gpu: Gpu) -> float:
        """Seconds on the device, the gaps between kernels included."""
        of_products = 2 * self.products * gpu.slower.get(self.kind, 1) / (gpu.peak * 1e12 * OF_PEAK)
        of_bytes = self.bytes / (gpu.bandwidth * 1e9 * OF_BANDWIDTH)
        share = 1.0 if self.programs is None else min(1.0, self.programs / gpu.multiprocessors)
        of_lanes = self.operations / (gpu.lanes * 1e12 * OF_PEAK)
        return max(of_products, of_bytes, of_lanes, self.keys / (gpu.keys * 1e9)) / share + GAP * self.kernels


@dataclass(frozen=True)
class GpuLoad:
    """The shape of a call of attention. Its heads are those of all items of the batch together, B·H."""

    length: int
    heads: int = 32
    width: int = 64
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class Recorded:
    """The steps on a GPU of a forward pass and of its backward pass."""

    forward: list[GpuStep]
    backward: list[GpuStep]

    def steps(self, passes: str) -> list[GpuStep]:
        """The steps of "forward" or of "forward+backward"."""
        return self.forward if passes == "forward" else self.forward + self.backward


def captured(steps: Sequence[GpuStep], gpu: Gpu) -> float:
    """Seconds of these steps in a CUDA graph."""
    return sum(step.device(gpu) for step in steps)


def eager(steps: Sequence[GpuStep], gpu: Gpu) -> float:
    """Seconds of these steps where Python asks for each: the device waits where the host is slower."""
    return max(captured(steps, gpu), sum(step.host for step in steps))


def holding(steps: Sequence[GpuStep], gpu: Gpu) -> list[tuple[str, float]]:
    """The kernels and operators by their share of the device's time, the largest first."""
    by_name: dict[str, float] = {}
    for step in steps:
        by_name[step.name] = by_name.get(step.name, 0.0) + step.device(gpu)
    total = sum(by_name.values())
    return sorted(((name, seconds / total) for name, seconds in by_name.items()), key=lambda item: -item[1])


def exact(gpu: Gpu, load: GpuLoad, passes: str, named: str | None = None) -> float:
    """Seconds of exact attention by the published throughput of an implementation, by default the fastest."""
    forward = 4 * load.heads * load.length**2 * load.width
    rate = gpu.exact_throughput(named or next(iter(gpu.exact)), load.width, load.length) * 1e12
    return forward / rate * (1.0 if passes == "forward" else 1 + BACKWARD / OF_FORWARD)


def record(method: Method, load: GpuLoad) -> Recorded:
    """Record what a method asks for, forward alone and then backward.

    Raises:
        ValueError: an op of the method has no kernel.
        RuntimeError: Triton is not installed, or something is read back from the device.
    """
    call = call_of(method, load)
    query, key, value = (
        torch.empty(1, load.heads, load.length, load.width, dtype=load.dtype, device="meta") for _ in range(3)
    )
    forward: tuple[list[Launch], list[OtherCall]] = [], []
    with torch.no_grad(), recording(forward[1]) as launches:
        call(query, key, value)
        forward[0].extend(launches)
    others: list[OtherCall] = []
    inputs = [x.requires_grad_() for x in (query, key, value)]
    with recording(others) as launches:
        out = call(*inputs)
        before = len(launches), len(others)
        out.backward(torch.empty_like(out))
        return Recorded(_steps(*forward), _steps(launches[before[0] :], others[before[1] :]))


def methods() -> list[str]:
    """The names of the methods with kernels of their own."""
    return [name for name in list_methods() if name not in LEFT_OUT]


def launches_of(method: Method, load: GpuLoad, causal: bool = False) -> list[Launch]:
    """The launches of our own kernels in a forward and backward pass.

    Raises:
        ValueError: an op of the method has no kernel, or the method is not causal.
        RuntimeError: Triton is not installed, or something is read back from the device.
    """
    call = call_of(method, load)
    shape = 1, load.heads, load.length, load.width
    inputs = [torch.empty(shape, dtype=load.dtype, device="meta", requires_grad=True) for _ in range(3)]
    with recording() as launches:
        out = call(*inputs, is_causal=causal)
        out.backward(torch.empty_like(out))
    return launches


def launches_of_passes(method: Method, loads: Sequence[GpuLoad]) -> list[Launch]:
    """The launches of both passes at each of these loads, causal too where the method can be."""
    ways = (False, True) if method.traits.causal == "strict" else (False,)
    return [launch for load in loads for causal in ways for launch in launches_of(method, load, causal)]


def call_of(method: Method, load: GpuLoad) -> "Callable[..., Tensor]":
    """The method as a function of q, k and v; with the parameters that it starts with, where it has some."""
    if method.traits.learned:
        return method.bind(heads=load.heads, head_dim=load.width, max_length=load.length).eval().to("meta")
    return partial(attention, method=method)


def is_exact(method: Method) -> bool:
    """True if this is SDPA itself, whose time is not made up of recorded launches."""
    return method.is_exact


def _steps(launches: Sequence[Launch], others: Sequence[OtherCall]) -> list[GpuStep]:
    return [*map(_of_launch, launches), *map(_of_call, others)]


def _of_launch(launch: Launch) -> GpuStep:
    programs = 1
    for extent in launch.grid:
        programs *= extent
    of_16_bits = any(kind in ("*bf16", "*fp16") for kind in launch.signature.values())
    is_fp32 = launch.name in FP32_KERNELS or not (of_16_bits or launch.name in EXACT_IN_16_BITS)
    kind = "tf32x3" if is_fp32 else "16 bits"
    counted = launch.cost
    return GpuStep(launch.name, counted.products, counted.bytes, programs, kind, operations=counted.operations)


EXACT_IN_16_BITS = ("nearest_codes", "round_of_codes", "votes_of_members")  # products of signs


def _of_call(call: OtherCall) -> GpuStep:
    keys = {"sort": 1.0, "topk": 1 / TOPK}.get(call.name, 0.0) * call.numbers
    kind = "fp32" if call.upcast else "16 bits"
    return GpuStep(call.name, call.products, call.bytes, kind=kind, keys=keys, kernels=KERNELS.get(call.name, 1))
