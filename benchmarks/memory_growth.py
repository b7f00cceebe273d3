"""Peak extra memory a token of the linear methods, as far as 131,072 tokens: a level line.

    python benchmarks/memory_growth.py [--lengths "8192 … 131072"] [--methods …] [--causal …] [--out FILE.md]

Each figure is of one forward call in a process of its own, above what the inputs (and learned parameters) take. The
output alone is 4·heads·D bytes a token: 1,536 with 6 heads of 64.
"""

from pathlib import Path

import sheet
import torch

METHODS = ("full", "performer", "linear", "linformer", "linformer:projection=mean-pool", "nystrom")
CAUSAL = ("full", "performer", "linear")


def main(
    lengths: tuple[int, ...] = (8192, 16384, 32768, 65536, 131072),
    methods: tuple[str, ...] = METHODS,
    causal: tuple[str, ...] = CAUSAL,
    sdpa: int = 32768,
    out: Path | None = None,
) -> None:
    rows = []
    for is_causal, names in ((False, methods), (True, causal)):
        for method in names:
            row = []
            for length in sorted(lengths):
                too_slow = method == "full" and length > sdpa
                load = sheet.load_of(length, causal=is_causal)
                peak = None if too_slow else sheet.peak_alone(load, method, torch.get_num_threads())
                row.append(sheet.MISSING if peak is None else f"{peak / length:,.0f}")
            rows.append([f"{'SDPA' if method == 'full' else method}{', causal' * is_causal}", *row])
    about = (
        "Peak extra bytes a token of one forward call, batch 1, 6 heads of 64; the output counts (1,536 bytes a "
        f"token), inputs and parameters do not. SDPA is run to {sdpa:,} tokens."
    )
    table = sheet.table(["method", *(f"{n:,}" for n in sorted(lengths))], rows)
    sheet.publish("Memory a token", [about, table], out)


if __name__ == "__main__":
    sheet.run(main)
