"""The speed of `adaptive-span` as its spans shrink: causal, forward, against causal SDPA.

python benchmarks/spans.py [--lengths "1024 4096 16384"] [--spans "1000 256 64 16"] [--out FILE.md]

All heads have the same span, as they have before they are trained.
"""

import statistics
from functools import partial
from pathlib import Path

import sheet
import torch
import torch.nn.functional as F

import subquad as sq

LONGEST, RAMP = 1024, 32


def main(
    lengths: tuple[int, ...] = (1024, 4096, 16384),
    spans: tuple[int, ...] = (1000, 256, 64, 16),
    seconds: float = 2.0,
    out: Path | None = None,
) -> None:
    rows = []
    for length in lengths:
        inputs = [torch.randn(1, sheet.HEADS, length, sheet.WIDTH) for _ in range(3)]
        sizes = {"heads": sheet.HEADS, "head_dim": sheet.WIDTH, "max_length": length}
        calls = {"full": partial(F.scaled_dot_product_attention, *inputs, is_causal=True)}
        for span in spans:
            bound = sq.AdaptiveSpan(span=LONGEST, ramp=RAMP, start=span).bind(**sizes).eval()
            calls[str(span)] = partial(bound, *inputs, is_causal=True)
        with torch.inference_mode():
            ms = {name: statistics.median(own) for name, own in sheet.milliseconds(calls, seconds).items()}
        rows.append([f"{length:,}", *(f"{ms['full'] / ms[str(span)]:.2g}×" for span in spans)])
    about = (
        f"Times faster than causal SDPA: `adaptive-span:span={LONGEST},ramp={RAMP}`, forward, one item, 6 heads of 64."
    )
    sheet.publish("Learned spans", [about, sheet.table(["tokens", *(f"span {n:,}" for n in spans)], rows)], out)


if __name__ == "__main__":
    sheet.run(main)
