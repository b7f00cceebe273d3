"""The peaks of GPUs, and what exact attention reaches on them, as published: the figures of the cost model.

Peaks are those of the makers' data sheets, dense: "NVIDIA A100 Tensor Core GPU", SXM 80 GB; "NVIDIA H100 Tensor Core
GPU", SXM; "NVIDIA H200 Tensor Core GPU", SXM; "AMD Instinct MI300X Accelerator". Throughputs of exact attention:

    FlashAttention-3, H100, D=64     figure 5 of Shah et al. 2024 (fp16, forward, without a causal mask)
    FlashAttention-3, H100, D=128    pytorch/benchmark pull request 2391 (bf16, 16 heads; Triton reaches 477 there)
    FlashAttention-2, H100           figure 5 of Shah et al. 2024
    FlashAttention-2, A100           the 190 to 225 TFLOP/s of Dao 2023, the lower figure at D=64
    MI300X                           assumed: 35% of the peak at D=64, 45% at D=128
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

Curve = Mapping[int, float]  # length -> TFLOP/s of a forward pass


@dataclass(frozen=True)
class Gpu:
    """A GPU.

    Attributes:
        name: its usual name.
        peak: TFLOP/s of products of 16-bit numbers.
        slower: how many times as long products of fp32 take: ours, "tf32x3", which are three in TF32 at half the rate,
            or fp32 as it is on AMD's matrix cores; and torch's, "fp32", which leave the tensor cores alone.
        lanes: 10¹² operations a second on single fp32 numbers: half of the TFLOP/s of the data sheet outside of tensor
            cores, which counts a multiply-add as two.
        bandwidth: GB/s of the memory.
        multiprocessors: number of multiprocessors.
        keys: 10⁹ keys a second that a sort of torch is assumed to reach: some 2 on an A100, by bandwidth elsewhere.
        exact: implementations of exact attention, the fastest first: width of a head -> throughput by length.
    """

    name: str
    peak: float
    slower: Mapping[str, float]
    lanes: float
    bandwidth: float
    multiprocessors: int
    keys: float
    exact: Mapping[str, Mapping[int, Curve]]

    def exact_throughput(self, named: str, width: int, length: int) -> float:
        """TFLOP/s of a forward pass, linear between the published lengths and constant outside of them.

        Of the next wider heads where those of this width were not published.
        """
        curves = self.exact[named]
        return between(curves[min((each for each in curves if each >= width), default=max(curves))], length)


def between(curve: Curve, length: int) -> float:
    """The curve's value at a length."""
    known = sorted(curve)
    right = bisect_left(known, length)
    if right in (0, len(known)):
        return curve[known[min(right, len(known) - 1)]]
    low, high = known[right - 1], known[right]
    share = (length - low) / (high - low)
    return curve[low] * (1 - share) + curve[high] * share


LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)


def _curve(*throughputs: float) -> Curve:
    return dict(zip(LENGTHS, throughputs, strict=True))


FLASH_3 = {
    64: _curve(333.0, 392.0, 460.0, 476.0, 496.0, 497.0),
    128: _curve(430.0, 517.0, 566.0, 590.0, 614.0, 621.0),
}
FLASH_2_ON_H100 = {
    64: _curve(282.0, 306.0, 318.0, 321.0, 322.0, 324.0),
    128: _curve(309.0, 350.0, 362.0, 368.0, 370.0, 370.0),
}
HOPPER = {"FlashAttention-3": FLASH_3, "FlashAttention-2": FLASH_2_ON_H100}
FLASH_2_ON_A100 = {"FlashAttention-2": {64: {4096: 190.0}, 128: {4096: 225.0}}}
ON_MI300X = {"fused attention (assumed)": {64: {4096: 0.35 * 1307.4}, 128: {4096: 0.45 * 1307.4}}}

_OF_HOPPER = {"tf32x3": 6.0, "fp32": 989.4 / 66.9}
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("A100", 312.0, {"tf32x3": 6.0, "fp32": 16.0}, 9.7, 2039.0, 108, 2.0, FLASH_2_ON_A100),
        Gpu("H100", 989.4, _OF_HOPPER, 33.5, 3350.0, 132, 3.3, HOPPER),
        Gpu("H200", 989.4, _OF_HOPPER, 33.5, 4800.0, 132, 4.7, HOPPER),
        Gpu("MI300X", 1307.4, {"tf32x3": 8.0, "fp32": 8.0}, 81.7, 5300.0, 304, 5.2, ON_MI300X),
    )
}


def gpu_named(device: str) -> Gpu | None:
    """The GPU of a device's full name, such as "NVIDIA H100 80GB HBM3"; None where no figures are known."""
    return next((gpu for name, gpu in GPUS.items() if name in device), None)
