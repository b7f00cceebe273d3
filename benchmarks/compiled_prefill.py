"""The prefill of a decoder compiled by `torch.compile`, with PyTorch's attention and with methods, against eager code.

    python benchmarks/compiled_prefill.py --threads 2 --out benchmarks/results/compiled-prefill.md
    python benchmarks/compiled_prefill.py --lengths 512 --rounds 1 --methods full:kernel=subquad

Each row has a process of its own, in which one program serves all lengths (`dynamic=True`).
"""

import multiprocessing
import statistics
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import sheet
import torch
import torch.nn.functional as F
from torch import Tensor

from subquad import hf
from subquad.tools.data.texts import standard_library
from subquad.tools.measure.timing import stopwatch, timed_rounds
from subquad.tools.models.passages import read
from subquad.tools.models.pretrained import load

SDPA = "sdpa"
METHODS = ("full:kernel=subquad", "clustered-tail")
COMPARED = 256  # the last positions of a prompt, whose next tokens are compared

ABOUT = """\
One prompt of {name}, a passage of the documentation of Python's standard library, as `generate` reads it: into a new \
`DynamicCache`, with the logits of the last token, without an attention mask.
The model is eager, or its `forward` is compiled (`torch.compile(model.forward, fullgraph=True, dynamic=True)`), in \
turn in the same process: medians of {rounds} rounds.
"First call" is the first compiled call at a length, with its compilation: every row runs the lengths in this order."""
HEADS = ["attention", "eager, ms", "compiled, ms", "gain by compiling", "compiled, over eager SDPA", "first call, s"]


@dataclass(frozen=True)
class Measured:
    """One length: seconds of the first compiled call, and of eager and compiled calls."""

    first: float
    eager: float
    compiled: float


@dataclass(frozen=True)
class Row:
    """The lengths of one row, and the KL of its next tokens at the shortest, eager and compiled."""

    lengths: list[Measured]
    kl: list[float]


def measure(name: str, attention: str, dtype: torch.dtype, lengths: Sequence[int], rounds: int) -> Row:
    """The figures of one row, in a process of its own."""
    exact = load(name)
    reading, model = read(exact, standard_library(), min(lengths), 1, seed=0), exact.in_dtype(dtype).model
    if attention != SDPA:
        hf.swap(model, attention)
    forms = {"eager": model.forward, "compiled": torch.compile(model.forward, fullgraph=True, dynamic=True)}
    measured = []
    for length in lengths:
        tokens = torch.tensor(reading.sequences(exact, length, 1))
        calls = {form: partial(logits, forward, tokens, 1) for form, forward in forms.items()}
        (first, _), _ = stopwatch(calls["compiled"]), calls["eager"]()
        seconds = {form: statistics.median(each) for form, each in timed_rounds(calls, rounds).items()}
        measured.append(Measured(first, seconds["eager"], seconds["compiled"]))
    shortest = torch.tensor(reading.sequences(exact, min(lengths), 1))
    wanted = logits(exact.model.forward, shortest, COMPARED)
    return Row(measured, [divergence(logits(forward, shortest, COMPARED), wanted) for forward in forms.values()])


@torch.inference_mode()
def logits(forward: Callable[..., Any], tokens: Tensor, count: int) -> Tensor:
    """A prefill of one prompt, which fills a new cache, with the logits of the last tokens."""
    of_last: Tensor = forward(input_ids=tokens, use_cache=True, logits_to_keep=count).logits
    return of_last


def divergence(mine: Tensor, wanted: Tensor) -> float:
    """The mean KL(wanted ‖ mine) of next tokens, in nats."""
    mine, wanted = (x.double().log_softmax(-1) for x in (mine, wanted))
    return float(F.kl_div(mine, wanted, reduction="none", log_target=True).sum(-1).mean())


def alone(*arguments: Any) -> Row:
    """The figures of one row, from a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, *arguments).result()


def main(
    model: str = "demo-decoder",
    lengths: tuple[int, ...] = (512, 2048, 8000),
    rounds: int = 3,
    dtype: str = "bfloat16",
    methods: tuple[str, ...] = METHODS,
    out: Path | None = None,
) -> None:
    rows: dict[str, Row] = {}
    for attention in (SDPA, *methods):
        arguments = model, attention, getattr(torch, dtype), lengths, rounds
        rows[attention] = alone(*arguments)
        print(attention, rows[attention], file=sys.stderr, flush=True)
    parts = [ABOUT.format(name=load(model).name, rounds=rounds)]
    for i, length in enumerate(lengths):
        sdpa = rows[SDPA].lengths[i].eager
        lines = [_line(attention, row.lengths[i], sdpa) for attention, row in rows.items()]
        parts += [f"## {length:,} tokens", sheet.table(HEADS, lines)]
    kl = [[_called(attention), *(f"{each:.4f}" for each in row.kl)] for attention, row in rows.items()]
    parts += [
        f"## Next tokens\n\nKL to exact attention in fp32 at the last {COMPARED} positions of {min(lengths):,} tokens.",
        sheet.table(["attention", "eager", "compiled"], kl),
    ]
    sheet.publish("Compiled prefill", parts, out, dtype)


def _called(attention: str) -> str:
    return "SDPA" if attention == SDPA else f"`{attention}`"


def _line(attention: str, row: Measured, sdpa: float) -> list[str]:
    ms = [f"{1e3 * each:,.0f}" for each in (row.eager, row.compiled)]
    return [
        _called(attention),
        *ms,
        f"{row.eager / row.compiled:.2f}×",
        f"{sdpa / row.compiled:.2f}×",
        f"{row.first:.0f}",
    ]


if __name__ == "__main__":
    sheet.run(main)
