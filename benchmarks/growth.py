"""The table of complexities (table 1 of the Linformer paper) as measured: p where time, and work, grow as lengthᵖ.

    python benchmarks/growth.py [--lengths "2048 … 16384"] [--work "2048 4096 8192"] [--methods …] [--out FILE.md]

Time is that of a forward call, all methods in turn. Work is what torch's counter of floating-point operations sees when
the reference runs: products of matrices, without noise. It does not see sorts, comparisons, exponentials or gathers.
"""

import statistics
from pathlib import Path

import sheet
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import subquad as sq
from subquad.tools.bench.calls import NAIVE, Calls

# method -> the complexity in the length that is published for it, its other sizes fixed
PUBLISHED = {
    "full": "n²",
    "clustered": "n",
    "i-clustered": "n",
    "lha:buckets=0,bucket_size=128": "n·(B + n/B)",
    "smyrf:cluster_size=128": "n·log n",
    "local": "n",
    "reformer": "n·log n",
    "linformer": "n",
    "performer": "n",
    "linear": "n",
    "nystrom": "n",
}


def operations(method: str, length: int) -> int:
    """Floating-point operations of one head in products of matrices."""
    call = Calls(sheet.load_of(length, heads=1)).call_of(NAIVE if method == "full" else method)
    with FlopCounterMode(display=False) as counter, sq.use_backend("reference"), sdpa_kernel(SDPBackend.MATH):
        call()
    return counter.get_total_flops()


def times(methods: list[str], lengths: list[int], seconds: float) -> dict[str, list[float]]:
    """Median milliseconds at each length."""
    found: dict[str, list[float]] = {method: [] for method in methods}
    for length in lengths:
        load = sheet.load_of(length)
        own = sheet.milliseconds({method: Calls(load).call_of(method) for method in methods}, seconds)
        for method in methods:
            found[method].append(statistics.median(own[method]))
    return found


def main(
    lengths: tuple[int, ...] = (2048, 4096, 8192, 16384),
    work: tuple[int, ...] = (2048, 4096, 8192),
    methods: tuple[str, ...] = tuple(PUBLISHED),
    seconds: float = 2.0,
    out: Path | None = None,
) -> None:
    lengths = sorted(lengths)
    ms = times(methods, lengths, seconds)
    rows = []
    for method in methods:
        flops = [operations(method, length) for length in work]
        rows.append([
            method,
            PUBLISHED.get(method, sheet.MISSING),
            f"{sheet.slope(lengths, ms[method]):.2f}",
            f"{sheet.slope(work, flops):.2f}",
            f"{ms[method][-1]:,.1f}",
            f"{flops[-1] / work[-1] / 1e3:,.0f}",
        ])  # fmt: skip
    head = [
        "method", "published", "time: exponent", "work: exponent", f"ms at {lengths[-1]:,}",
        f"thousand operations a token and head at {work[-1]:,}",
    ]  # fmt: skip
    about = (
        f"Exponents p of time ∝ nᵖ over {', '.join(f'{n:,}' for n in lengths)} tokens and of work ∝ nᵖ over "
        f"{', '.join(f'{n:,}' for n in work)}, by least squares on logarithms; batch 1, 6 heads of 64, forward. "
        "Work counts products of matrices in the reference; n·log n has an exponent of about 1.1 there."
    )
    sheet.publish("Growth with the length, published and measured", [about, sheet.table(head, rows)], out)


if __name__ == "__main__":
    sheet.run(main)
