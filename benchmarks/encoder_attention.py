"""Attention of the demo encoder on a speech, alone and in the whole encoder, in fp32 and bf16, beside SDPA.

    python benchmarks/encoder_attention.py [FOLDER] --lengths "2048 4096" --threads 2 [--out FILE.md]

FOLDER holds state_union/state_union.zip; the default is the environment variable SUBQUAD_DATA. Longer inputs than a
speech are not run.
"""

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import sheet
import speeches
import torch
import torch.nn.functional as F
import typer
from torch import Tensor

import subquad as sq
from subquad.tools.bench.calls import DTYPES
from subquad.tools.measure.capture import LayerInputs
from subquad.tools.measure.fidelity import cosine, relative_error
from subquad.tools.measure.timing import one_round, speedup, stopwatch, timed_rounds
from subquad.tools.models.pretrained import Pretrained, running

SDPA = "SDPA"
METHODS = (
    "full:kernel=subquad",
    "clustered-tail",
    "clustered-tail:clusters=64,topk=96",
    "i-clustered",
    "clustered:clusters=25",
)
HEAD = ("tokens", "dtype", "what", "method", "SDPA, ms", "speed-up", "fidelity")

ABOUT = """\
Speed-up is the median of the ratios SDPA / method over {turns} turns, each of which runs SDPA and every method once \
in a new order; SDPA, or the encoder with it, has the dtype of the method.
The calls of one layer are its query, key and value: 12 heads of 32; times are sums over the six layers.
Fidelity of a layer's output is its relative error ‖out − exact‖ / ‖exact‖, the mean of the layers; of the whole \
encoder it is the cosine of the speech's embedding. Exact is SDPA in fp32, also for bf16."""


def median_ratios(calls: Mapping[str, Callable[[], object]], turns: int) -> tuple[float, dict[str, float]]:
    """SDPA's milliseconds, and the median of each call's speed-ups over it."""
    return beside_sdpa(timed_rounds(calls, turns, random.Random(0)))


def beside_sdpa(seconds: Mapping[str, Sequence[float]]) -> tuple[float, dict[str, float]]:
    """SDPA's milliseconds, and the medians of the others' speed-ups, of seconds in each turn."""
    speedups = {name: speedup(each, seconds[SDPA]) for name, each in seconds.items() if name != SDPA}
    return 1e3 * statistics.median(seconds[SDPA]), speedups


def attend(layers: Sequence[Sequence[Tensor]], method: str, gradient: bool) -> list[Tensor]:
    """The outputs of all layers, with the gradients of their inputs if these are wanted."""
    run = F.scaled_dot_product_attention if method == SDPA else partial(sq.attention, method=method)
    outs = []
    with torch.set_grad_enabled(gradient):
        for inputs in layers:
            out = run(*inputs)
            if gradient:
                torch.autograd.grad(out, inputs, torch.ones_like(out))
            outs.append(out.detach())
    return outs


def of_layers(calls: Sequence[LayerInputs], dtype: str, methods: Sequence[str], turns: int) -> list[list[str]]:
    """Rows of the attention alone: forward, and forward and backward."""
    exact = attend([(c.query, c.key, c.value) for c in calls], SDPA, False)
    rows = []
    for what, gradient in (("forward", False), ("forward and backward", True)):
        layers = [
            tuple(x.to(DTYPES[dtype], copy=True).requires_grad_(gradient) for x in (c.query, c.key, c.value))
            for c in calls
        ]
        runs = {name: partial(attend, layers, name, gradient) for name in (SDPA, *methods)}
        outs = {name: run() for name, run in runs.items()}
        time, speedups = median_ratios(runs, turns)
        for name, speed in speedups.items():
            pairs = zip(outs[name], exact, strict=True)
            error = statistics.mean(relative_error(out.float(), wanted) for out, wanted in pairs)
            rows.append([what, f"`{name}`", f"{time:,.1f}", f"{speed:.2f}×", f"error {error:.4f}"])
    return rows


def of_encoder(fp32: Pretrained, item: list[int], dtype: str, methods: Sequence[str], turns: int) -> list[list[str]]:
    """Rows of the whole encoder."""
    model = fp32 if dtype == "float32" else fp32.in_dtype(DTYPES[dtype])

    def timed(name: str) -> tuple[float, Tensor]:
        with running(model.model, None if name == SDPA else name):  # putting it in and out is not timed
            return stopwatch(partial(model.embed, [item]))

    exact, runs, draw = fp32.embed([item]), {name: name for name in (SDPA, *methods)}, random.Random(0)
    cosines = {name: float(cosine(out, exact).mean()) for name, out in one_round(runs, timed)[1].items()}
    rounds = [one_round(runs, timed, draw)[0] for _ in range(turns)]
    time, speedups = beside_sdpa({name: [seconds[name] for seconds in rounds] for name in runs})
    return [
        ["whole encoder", f"`{name}`", f"{time:,.1f}", f"{speed:.2f}×", f"cosine {cosines[name]:.4f}"]
        for name, speed in speedups.items()
    ]


def main(
    folder: Annotated[Path, typer.Argument()] = sheet.DATA,
    lengths: tuple[int, ...] = (2048, 4096),
    dtypes: tuple[str, ...] = ("float32", "bfloat16"),
    methods: tuple[str, ...] = METHODS,
    turns: int = 7,
    out: Path | None = None,
) -> None:
    """Measure, and print or write the table."""
    rows = []
    for length in lengths:
        passages = speeches.passages(folder, length, 1)
        calls = passages.inputs()
        for dtype in dtypes:
            arguments = dtype, methods, turns
            found = of_layers(calls, *arguments) + of_encoder(passages.model, passages.items[0], *arguments)
            rows += [[f"{length:,}", dtype, *row] for row in found]
    about = ABOUT.format(turns=turns)
    sheet.publish("Attention of the demo encoder", [about, sheet.table(HEAD, rows)], out, "fp32 and bf16")


if __name__ == "__main__":
    sheet.run(main)
