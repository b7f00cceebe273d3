"""Exact attention by subquad's kernel, `full:kernel=subquad`, beside SDPA: speed-ups and the error.

    python benchmarks/exact_kernel.py --threads 2 --out benchmarks/results/exact-kernel.md
    ATEN_CPU_CAPABILITY=avx2 python benchmarks/exact_kernel.py --variant avx2 --out …

The second command measures what a processor without AVX-512 does: both kernels by its instructions.
"""

import statistics
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import sheet
import torch
import torch.nn.functional as F
from torch import Tensor

import subquad as sq
from subquad.kernels import native

HEADS = {"9 of 64 on 3": (9, 3, 64), "12 of 32": (12, 12, 32), "8 of 128": (8, 8, 128)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ABOUT = """\
Time of SDPA divided by the time of `full:kernel=subquad`, one item, medians of rounds that run both.
The error is ‖out − exact‖ / ‖exact‖ of the kernel in fp32, and SDPA's own, against fp64 at the shortest length."""


def call_of(inputs: list[Tensor], causal: bool, backward: bool, *, fast: bool) -> Callable[[], Tensor]:
    """A call on inputs, with the gradients of its sum where these are wanted."""
    options = {"is_causal": causal, "enable_gqa": inputs[0].shape[1] != inputs[1].shape[1]}

    def run() -> Tensor:
        with torch.set_grad_enabled(backward):
            if fast:
                out = sq.attention(*inputs, method="full:kernel=subquad", **options)
            else:
                out = F.scaled_dot_product_attention(*inputs, **options)
            if backward:
                torch.autograd.grad(out.sum(), inputs)
            return out.detach()

    return run


def error(out: Tensor, exact: Tensor) -> float:
    """‖out − exact‖ / ‖exact‖."""
    return float((out.double() - exact).norm() / exact.norm())


def main(
    lengths: tuple[int, ...] = (128, 512, 1024, 2048, 4096),
    seconds: float = 1.0,
    variant: str = "",
    out: Path | None = None,
) -> None:
    """Print the tables, and write them to a file where one is named."""
    rows, errors = [], []
    with native.use_variant(variant) if variant else nullcontext():
        for name, (heads, key_heads, width) in HEADS.items():
            for causal in (True, False):
                for length in lengths:
                    row = [name, "causal" if causal else "all keys", f"{length:,}"]
                    for dtype in DTYPES.values():
                        for backward in (False, True):
                            made = [torch.randn(1, length, h, width) for h in (heads, key_heads, key_heads)]
                            inputs = [x.to(dtype).transpose(1, 2).requires_grad_(backward) for x in made]
                            calls = {
                                which: call_of(inputs, causal, backward, fast=which == "fast")
                                for which in ("sdpa", "fast")
                            }
                            times = sheet.milliseconds(calls, seconds)
                            medians = {which: statistics.median(each) for which, each in times.items()}
                            row.append(f"{medians['sdpa'] / medians['fast']:.2f}×")
                            if length == min(lengths) and dtype == torch.float32 and not backward:
                                exact = call_of([x.double() for x in inputs], causal, backward, fast=False)()
                                both = [f"{error(calls[which](), exact):.1e}" for which in ("fast", "sdpa")]
                                errors.append([name, row[1], *both])
                    rows.append(row)
    passes = [f"{dtype}, {which}" for dtype in DTYPES for which in ("forward", "forward and backward")]
    tables = sheet.table(["heads", "mask", "tokens", *passes], rows)
    of_errors = sheet.table(["heads", "mask", "error", "SDPA's"], errors)
    sheet.publish("Exact attention by subquad's kernel", [ABOUT, tables, of_errors], out, "fp32 and bf16")


if __name__ == "__main__":
    sheet.run(main)
