"""Causal attention by prefix sums against the masked quadratic form of the same thing, and against causal SDPA.

    python benchmarks/prefix_sums.py [--lengths "512 … 16384"] [--methods "linear performer"] [--gib 8] [--out FILE.md]

The quadratic form of linear attention is (tril(φ(Q) φ(K)ᵀ) V), each row divided by its sum, with φ = elu + 1. It gives
the same outputs as `linear`; the script checks that. It is left out where its matrices take more than --gib.
"""

import statistics
from collections.abc import Callable
from pathlib import Path

import sheet
import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.tools.bench.calls import Calls, Load

QUADRATIC = "masked quadratic"


def masked(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Linear attention with the N×N matrix of weights formed, and what lies ahead set to 0."""
    weights = (F.elu(query) + 1) @ (F.elu(key) + 1).mT
    weights = weights.tril_()
    return weights @ value / weights.sum(-1, keepdim=True)


def quadratic(load: Load) -> Callable[[], Tensor]:
    """A call of it."""
    inputs = Calls(load).inputs

    def call() -> Tensor:
        with torch.inference_mode():
            return masked(*inputs)

    return call


def main(
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384),
    methods: tuple[str, ...] = ("linear", "performer"),
    gib: float = 8.0,
    seconds: float = 2.0,
    out: Path | None = None,
) -> None:
    methods = tuple(dict.fromkeys(["linear", *methods]))
    names, rows, found = ["full", QUADRATIC, *methods], [], {}
    for length in sorted(lengths):
        load = sheet.load_of(length, causal=True)
        calls = {name: Calls(load).call_of(name) for name in names if name != QUADRATIC}
        if 2 * 4 * load.heads * length**2 <= gib * 2**30:
            calls[QUADRATIC] = quadratic(load)
            torch.testing.assert_close(calls[QUADRATIC](), calls["linear"](), rtol=1e-3, atol=1e-4)
        ms = {name: statistics.median(own) for name, own in sheet.milliseconds(calls, seconds).items()}
        found[length] = ms
        ratios = [
            f"{ms[over] / ms[name]:.1f}×" if over in ms else sheet.MISSING for name in methods for over in names[:2]
        ]
        rows.append([f"{length:,}", *(f"{ms[n]:,.1f}" if n in ms else sheet.MISSING for n in names), *ratios])
    exponents = []
    for name in names:
        upper = [n for n in found if name in found[n]][-3:]
        exponents.append(
            f"{sheet.slope(upper, [found[n][name] for n in upper]):.2f}" if len(upper) > 1 else sheet.MISSING
        )
    rows.append(["exponent", *exponents, *[""] * (2 * len(methods))])
    shown = {"full": "SDPA"}
    head = ["tokens", *(f"{shown.get(name, name)}, ms" for name in names)]
    head += [f"{name} against {shown.get(over, over)}" for name in methods for over in names[:2]]
    about = (
        "Causal forward calls, batch 1, 6 heads of 64, all in turn at each length; medians. The masked quadratic form "
        "computes what `linear` does. The last line: p of time ∝ nᵖ over each one's three longest lengths."
    )
    sheet.publish("Causal attention: prefix sums against a masked matrix", [about, sheet.table(head, rows)], out)


if __name__ == "__main__":
    sheet.run(main)
