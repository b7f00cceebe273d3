"""The time of steps that read some cells of the cached keys exactly, and what it takes to make the cells.

    python benchmarks/step_cells_time.py [--lengths "8192 16384 32768"] [--batches "1 8"] [--cells 64] [--together 108]
        [--segments "1 16"] [--out FILE.md]

The inputs are those of a layer of SmolLM2-135M, at random. What the cells are, and how close they come, is in
`step_cells.py`. All but the op of exact steps is plain PyTorch; so "in place" has what a kernel could reach.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import sheet
import torch
import torch.nn.functional as F
from step_cells import LAST, SIZE, Cells, labels_of
from torch import Tensor

from subquad.kernels.attention.steps.op import attend_few

WEIGHTS = 576 * (2 * 576 + 2 * 192 + 3 * 1536) + 576 * 49152 // 30  # of a layer, and a thirtieth of the head's
COUNTED = 8192  # tokens, after which `step_cells.py` counted the cells that three heads choose

ABOUT = """\
One step of one layer, 9 heads of 64 on 3 key heads, medians, all in turn: exact steps on all keys; with cells, the \
logits of the means, the choice of {cells} cells, the gathering of 16 keys and values for each, and exact steps on \
these, and on the last 256 and the means; and as the rest of the step, a product with the weights of a layer of \
SmolLM2-135M and a thirtieth of those of its head.
These cells are equally large; all but the exact steps is plain PyTorch.
The speed-ups of a step include the rest.
Of a step in place, attention takes the share of the exact time that it reads of the keys, which no kernel can \
undercut where the memory is the limit: {cells} cells for the heads of a key head together, or by head.
With {cells} cells for each head, the heads of a key head chose {together} different ones after {counted:,} tokens; \
the same number is assumed at other lengths.
Each call reads the same keys, which the processor's last cache may hold; those of a model's layers come from memory."""

MAKING = """\
K-means of the keys of one layer of one item in fp32, in the whole prompt or in segments of it, a few calls each; in \
brackets, the steps in bf16 by head, in place, after which the cells of a batch of {batch} have saved the time that \
they took in plain PyTorch; a smaller batch saves less in a step."""


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds of a step of one layer: exact attention, attention with cells in PyTorch, the rest of the step."""

    exact: float
    cells: float
    rest: float

    @property
    def whole(self) -> float:
        """The exact step with the rest."""
        return self.exact + self.rest

    def in_place(self, share: float) -> float:
        """The step with the rest if attention takes its share of the exact time."""
        return share * self.exact + self.rest


def timed(length: int, cells: int, dtype: torch.dtype, batch: int, seconds: float) -> StepTimes:
    """The times at a length, with so many cells read exactly."""
    count = length // SIZE
    query = torch.randn(batch, 9, 1, 64, dtype=dtype)
    key, value = (torch.randn(batch, 3, length, 64, dtype=dtype) for _ in range(2))
    means, values = (x.unflatten(2, (count, SIZE)).mean(3) for x in (key, value))
    by_cell = [x.view(batch * 3 * count, SIZE * 64) for x in (key, value)]
    first = torch.arange(batch * 3)[:, None] * count
    rest = [torch.cat([x[:, :, -LAST:], y], 2) for x, y in ((key, means), (value, values))]

    def steps(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return attend_few(query, key, value, None, causal=False, offset=0, scale=0.125)

    def by_cells() -> Tensor:
        logits = query.view(batch * 3, 3, 64) @ means.view(batch * 3, count, 64).mT
        chosen = logits.float().softmax(-1).sum(1).topk(cells, -1, sorted=False).indices
        at = (chosen + first).flatten()
        few = [x.index_select(0, at).view(batch, 3, cells * SIZE, 64) for x in by_cell]
        (out, lse), (other, other_lse) = steps(*few), steps(*rest)
        return torch.lerp(out, other, (other_lse - lse).sigmoid().to(dtype)[..., None])

    weights, inputs = torch.randn(WEIGHTS // 576, 576, dtype=dtype), torch.randn(batch, 1, 576, dtype=dtype)
    calls: dict[str, Callable[[], object]] = {
        "exact": lambda: steps(key, value),
        "cells": by_cells,
        "rest": lambda: F.linear(inputs, weights),
    }
    with torch.inference_mode():
        return StepTimes(**{name: statistics.median(own) for name, own in sheet.milliseconds(calls, seconds).items()})


def made(length: int, segments: int, seconds: float) -> float:
    """Milliseconds of the k-means of one layer."""
    keys, cells = torch.randn(1, 3, length, 64), Cells(0, segments=segments)
    factor = torch.eye(64).expand(3, 64, 64)
    with torch.inference_mode():
        return statistics.median(sheet.milliseconds({"made": lambda: labels_of(keys, factor, cells)}, seconds)["made"])


def share_of(length: int, cells: int) -> float:
    """The share of the keys that a step reads, with the last ones and one for each mean."""
    return (cells * SIZE + LAST + length // SIZE) / length


def main(
    lengths: tuple[int, ...] = (8192, 16384, 32768),
    batches: tuple[int, ...] = (1, 8),
    cells: int = 64,
    together: int = 108,
    segments: tuple[int, ...] = (1, 16),
    seconds: float = 2.0,
    out: Path | None = None,
) -> None:
    """Print the tables, and write them to a file where one is named."""
    times = {
        (dtype, length, batch): timed(length, cells, dtype, batch, seconds)
        for dtype in (torch.bfloat16, torch.float32)
        for length in lengths
        for batch in batches
    }
    lines = []
    for (dtype, length, batch), ms in times.items():
        steps = [ms.cells + ms.rest, *(ms.in_place(share_of(length, count)) for count in (cells, together))]
        ratios = [f"{ms.whole / step:.2f}×" for step in steps]
        name = str(dtype).removeprefix("torch.")
        lines.append([f"{length:,}", name, str(batch), *(f"{x:.2f}" for x in (ms.exact, ms.cells, ms.rest)), *ratios])
    head = ["keys", "dtype", "batch", "exact, ms", "cells, ms", "rest, ms", "step", "in place", "in place, by head"]
    parts = [
        ABOUT.format(cells=cells, together=together, counted=COUNTED),
        sheet.table(head, lines),
        "## Making the cells",
        MAKING.format(batch=batches[-1]),
    ]
    lines = []
    for length in lengths:
        ms, texts = times[torch.bfloat16, length, batches[-1]], []
        saved = ms.whole - ms.in_place(share_of(length, together))
        for count in segments:
            making = made(length, count, seconds)
            texts.append(f"{making:,.0f} ({batches[-1] * making / saved:,.0f})")
        lines.append([f"{length:,}", *texts])
    head = ["keys", *("whole, ms" if count == 1 else f"{count} segments, ms" for count in segments)]
    sheet.publish("The time of cells of keys in steps", [*parts, sheet.table(head, lines)], out, "bf16 and fp32")


if __name__ == "__main__":
    sheet.run(main)
