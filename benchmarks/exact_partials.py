"""Exact attention with its log-sum-exp beside SDPA, which returns none, and beside plain PyTorch.

python benchmarks/exact_partials.py --out benchmarks/results/exact-partials.md
"""

import statistics
from collections.abc import Callable
from unittest import mock

import sheet
import torch
import torch.nn.functional as F
from torch import Tensor

import subquad as sq

HEADS, KEY_HEADS, WIDTH = 9, 3, 64  # of SmolLM2-135M
FULL = sq.Full()


def main() -> None:
    given = sheet.arguments(__doc__, (1024, 2048, 4096), seconds=4.0).parse_args()
    torch.set_num_threads(given.threads)
    rows = []
    for length in given.lengths:
        for causal in (True, False):
            for backward in (False, True):
                calls = calls_of(length, causal, backward)
                ms = {name: statistics.median(own) for name, own in sheet.milliseconds(calls, given.seconds).items()}
                rows.append(
                    [
                        f"{length:,}",
                        "causal" if causal else "all keys",
                        "forward and backward" if backward else "forward",
                        f"{ms['lse'] / ms['sdpa']:.2f}",
                        f"{ms['plain'] / ms['sdpa']:.1f}",
                    ]
                )
    about = (
        f"Time of `full` with `return_lse`, in times of SDPA's, which returns no log-sum-exp: {HEADS} heads of {WIDTH} "
        f"that share {KEY_HEADS} key heads, one item. Plain PyTorch is what runs with a bias, with dropout and on "
        "other devices."
    )
    heads = ["tokens", "mask", "pass", "with lse / SDPA", "plain PyTorch / SDPA"]
    sheet.publish("Exact attention with its log-sum-exp", [about, sheet.table(heads, rows)], given.out)


def calls_of(length: int, causal: bool, backward: bool) -> dict[str, Callable[[], None]]:
    """The three calls on the same inputs."""
    inputs = [torch.randn(1, heads, length, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    inputs = [x.requires_grad_(backward) for x in inputs]
    options = {"is_causal": causal, "enable_gqa": True}

    def sdpa() -> tuple[Tensor, ...]:
        return (F.scaled_dot_product_attention(*inputs, **options),)

    def lse() -> tuple[Tensor, ...]:
        return sq.attention(*inputs, method=FULL, return_lse=True, **options)

    def plain() -> tuple[Tensor, ...]:
        with mock.patch("subquad.methods.core.exact.is_fused", return_value=False):
            return lse()

    def timed(call: Callable[[], tuple[Tensor, ...]]) -> Callable[[], None]:
        def run() -> None:
            with torch.set_grad_enabled(backward):
                results = call()
                if backward:
                    torch.autograd.backward(results, [torch.ones_like(x) for x in results])

        return run

    return {call.__name__: timed(call) for call in (sdpa, lse, plain)}


if __name__ == "__main__":
    main()
