"""The prefill of a decoder compiled by `torch.compile`, with PyTorch's attention and with methods, against eager code.

    python benchmarks/compiled_prefill.py --threads 2 --out benchmarks/results/compiled-prefill.md
    python benchmarks/compiled_prefill.py --lengths 512 --rounds 1 --methods full:kernel=subquad

Each row has a process of its own, in which one program serves all lengths (`dynamic=True`). Half of the rows keep freed
memory (`MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=…`, variables of glibc), so that the model's intermediate results
need no fresh pages.
"""

import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

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
KEEPING = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
COMPARED = 256  # the last positions of a prompt, whose next tokens are compared

ABOUT = """\
One prompt of {name}, a passage of the documentation of Python's standard library, as `generate` reads it: into a new \
`DynamicCache`, with the logits of the last token, without an attention mask.
The model is eager, or its `forward` is compiled (`torch.compile(model.forward, fullgraph=True, dynamic=True)`), in \
turn in the same process: medians of {rounds} rounds.
"First call" is the first compiled call at a length, with its compilation: every row runs the lengths in this order.
"Kept memory" is the time with `MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_={trim}` in the environment, variables of \
glibc with which a process keeps the memory that it frees.
KL is that of the next tokens at the last {compared} positions to exact attention in fp32, eager and compiled."""
HEADS = [
    *("attention", "eager, ms", "compiled, ms", "eager, kept memory, ms", "compiled, kept memory, ms"),
    *(
        "gain by compiling",
        "by kept memory",
        "by both",
        "both over eager SDPA",
        "first call, s",
        "KL eager",
        "KL compiled",
    ),
]


@dataclass(frozen=True)
class Measured:
    """One length: seconds of the first compiled call, of eager and compiled calls, and the KL of both."""

    first: float
    eager: float
    compiled: float
    kl: tuple[float, float]


def measure(name: str, attention: str, dtype: torch.dtype, lengths: Sequence[int], rounds: int) -> list[Measured]:
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
        wanted = logits(exact.model.forward, tokens, COMPARED)
        kl = [divergence(logits(forward, tokens, COMPARED), wanted) for forward in forms.values()]
        measured.append(Measured(first, seconds["eager"], seconds["compiled"], (kl[0], kl[1])))
    return measured


@torch.inference_mode()
def logits(forward: Callable[..., Any], tokens: Tensor, count: int) -> Tensor:
    """A prefill of one prompt, which fills a new cache, with the logits of the last tokens."""
    of_last: Tensor = forward(input_ids=tokens, use_cache=True, logits_to_keep=count).logits
    return of_last


def divergence(mine: Tensor, wanted: Tensor) -> float:
    """The mean KL(wanted ‖ mine) of next tokens, in nats."""
    mine, wanted = (x.double().log_softmax(-1) for x in (mine, wanted))
    return float(F.kl_div(mine, wanted, reduction="none", log_target=True).sum(-1).mean())


def alone(keeps_memory: bool, *arguments: Any) -> list[Measured]:
    """The figures of one row, from a process that keeps the memory that it frees, or returns it as usual."""
    variables, start = KEEPING if keeps_memory else {}, multiprocessing.get_context("spawn")
    with patch.dict(os.environ, variables), ProcessPoolExecutor(1, start) as pool:
        return pool.submit(measure, *arguments).result()


def main(
    model: str = "demo-decoder",
    lengths: tuple[int, ...] = (512, 2048, 8000),
    rounds: int = 3,
    dtype: str = "bfloat16",
    methods: tuple[str, ...] = METHODS,
    out: Path | None = None,
) -> None:
    rows: dict[str, list[list[Measured]]] = {}
    for attention in (SDPA, *methods):
        arguments = model, attention, getattr(torch, dtype), lengths, rounds
        rows[attention] = [alone(keeps, *arguments) for keeps in (False, True)]
        print(attention, rows[attention], file=sys.stderr, flush=True)
    parts = [
        ABOUT.format(name=load(model).name, rounds=rounds, trim=KEEPING["MALLOC_TRIM_THRESHOLD_"], compared=COMPARED)
    ]
    for i, length in enumerate(lengths):
        lines = [
            _line(attention, usual[i], keeping[i], rows[SDPA][0][i].eager)
            for attention, (usual, keeping) in rows.items()
        ]
        parts += [f"## {length:,} tokens", sheet.table(HEADS, lines)]
    sheet.publish("Compiled prefill", parts, out, dtype)


def _line(attention: str, usual: Measured, keeping: Measured, sdpa: float) -> list[str]:
    called = "SDPA" if attention == SDPA else f"`{attention}`"
    ms = [f"{1e3 * each:,.0f}" for each in (usual.eager, usual.compiled, keeping.eager, keeping.compiled)]
    gains = [f"{usual.eager / each:.2f}×" for each in (usual.compiled, keeping.eager, keeping.compiled)]
    over = f"{sdpa / keeping.compiled:.2f}×"
    return [called, *ms, *gains, over, f"{usual.first:.0f}", *(f"{each:.4f}" for each in usual.kl)]


if __name__ == "__main__":
    sheet.run(main)
