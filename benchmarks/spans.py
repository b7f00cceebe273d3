"""How much faster `adaptive-span` becomes as its spans shrink: causal, forward, against causal SDPA.

python benchmarks/spans.py [--lengths 1024 4096 16384] [--spans 1000 256 64 16] [--out FILE.md]

All heads have the same span, as they have before they are trained.
"""

import statistics
from functools import partial

import sheet
import torch
import torch.nn.functional as F

import subquad as sq

LONGEST, RAMP = 1024, 32


def main() -> None:
    options = {"spans": (1000, 256, 64, 16), "seconds": 2.0}
    given = sheet.arguments(__doc__, (1024, 4096, 16384), **options).parse_args()
    torch.set_num_threads(given.threads)
    rows = []
    for length in given.lengths:
        inputs = [torch.randn(1, sheet.HEADS, length, sheet.WIDTH) for _ in range(3)]
        sizes = {"heads": sheet.HEADS, "head_dim": sheet.WIDTH, "max_length": length}
        calls = {"full": partial(F.scaled_dot_product_attention, *inputs, is_causal=True)}
        for span in given.spans:
            bound = sq.AdaptiveSpan(span=LONGEST, ramp=RAMP, start=span).bind(**sizes).eval()
            calls[str(span)] = partial(bound, *inputs, is_causal=True)
        with torch.inference_mode():
            ms = {name: statistics.median(own) for name, own in sheet.milliseconds(calls, given.seconds).items()}
        rows.append([f"{length:,}", *(f"{ms['full'] / ms[str(span)]:.2g}×" for span in given.spans)])
    about = (
        f"Times faster than causal SDPA: `adaptive-span:span={LONGEST},ramp={RAMP}`, forward, one item, 6 heads of 64."
    )
    sheet.publish(
        "Learned spans", [about, sheet.table(["tokens", *(f"span {n:,}" for n in given.spans)], rows)], given.out
    )


if __name__ == "__main__":
    main()
