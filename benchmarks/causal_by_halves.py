"""Prefill of a causal language model by halves: its time, and its next tokens beside those of exact attention.

    python benchmarks/causal_by_halves.py demo-decoder book.txt --lengths "2048 4096 8192"

Each turn runs exact attention and every method once, in a new order; a speed-up is the median of the ratios within a
turn. With several passages, next tokens are those of all of them, and times and memory those of the first one. In
another dtype than fp32, both exact attention and the methods run in it, and a second KL is the one of each of them to
exact attention in fp32.
"""

import random
from functools import partial
from pathlib import Path
from typing import Annotated

import sheet
import torch
import typer

from subquad import hf
from subquad.tools.bench.calls import DTYPES
from subquad.tools.measure.peak_memory import peak_extra_mib
from subquad.tools.measure.timing import one_round, speedup, stopwatch
from subquad.tools.models.next_tokens import NextTokens, Prefill, prefill, summed
from subquad.tools.models.passages import read
from subquad.tools.models.pretrained import Pretrained, load, running
from subquad.tools.runs import machine

METHODS = (
    "clustered-tail",
    "clustered-tail:queries=block",
    "clustered-tail:clusters=32,topk=96,queries=block",
    "i-clustered:clusters=64,topk=128",
)
EXACT, FP32 = "exact", "exact, fp32"


def timing_round(
    pretrained: Pretrained, item: list[int], methods: list[str], seed: int
) -> tuple[dict[str, float], dict[str, Prefill]]:
    """Seconds and results of a prefill with exact attention and with every method, in random order."""

    def timed(method: str | None) -> tuple[float, Prefill]:
        with running(pretrained.model, method):
            return stopwatch(partial(pretrained.prefill, [item]))

    return one_round({EXACT: None} | {method: method for method in methods}, timed, random.Random(seed))


def next_tokens(
    pretrained: Pretrained, item: list[int], runs: dict[str, Prefill], fp32: Pretrained | None
) -> tuple[dict[str, NextTokens], dict[str, NextTokens]]:
    """Next tokens of each run against exact attention in the same dtype, and, if a model is given for it, in fp32."""
    same_dtype = pretrained.next_tokens([item], runs, EXACT)
    if fp32 is None:
        return same_dtype, {}
    with torch.inference_mode():
        logits = prefill(fp32.model, fp32.batch([item]), all_logits=True)
    return same_dtype, pretrained.next_tokens([item], {FP32: logits, **runs}, FP32)


def memory_of(pretrained: Pretrained, item: list[int], method: str) -> float:
    """Peak MiB of a prefill above the loaded model."""
    with running(pretrained.model, None if method == EXACT else method):
        return peak_extra_mib(partial(pretrained.prefill, [item]))[0]


def rows_of(
    pretrained: Pretrained,
    items: list[list[int]],
    methods: list[str],
    count: int,
    memory: bool,
    fp32: Pretrained | None,
) -> list[str]:
    """A row of Markdown for exact attention and one for each method, from some timing rounds on the first item."""
    rounds = [timing_round(pretrained, items[0], methods, seed) for seed in range(count)]
    seconds = {name: [taken[name] for taken, _ in rounds] for name in (EXACT, *methods)}
    results = [rounds[-1], *(timing_round(pretrained, item, methods, 0) for item in items[1:])]
    tokens = [next_tokens(pretrained, item, runs, fp32) for item, (_, runs) in zip(items, results, strict=True)]
    lines = []
    for name in (EXACT, *methods):
        total = summed([same_dtype[name] for same_dtype, _ in tokens])
        speed = speedup(seconds[name], seconds[EXACT])
        cells = [f"{len(items[0]):,}", f"`{name}`", f"{total.perplexity:.3f}", f"{total.mean_kl:.5f}"]
        cells += [f"{max(total.last_kl / total.last_count, 0.0):.5f}", f"{total.agreement:.4f}", f"{speed:.2f}×"]
        if fp32 is not None:
            cells.append(f"{summed([beside_fp32[name] for _, beside_fp32 in tokens]).mean_kl:.5f}")
        if memory:
            cells.append(f"{memory_of(pretrained, items[0], name):,.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main(
    model: str,
    text: Path,
    lengths: tuple[int, ...] = (2048, 4096, 8192),
    methods: tuple[str, ...] = METHODS,
    turns: int = 3,
    dtype: str = "float32",
    passages: Annotated[int, typer.Option(help="evenly spaced in the text; one is at its middle")] = 1,
    memory: Annotated[bool, typer.Option("--memory", help="measure the peak memory of a prefill, too")] = False,
) -> None:
    """Print a table."""
    sheet.check_known("--dtype", (dtype,), DTYPES)
    pretrained, fp32 = load(model), None
    documents = read(pretrained, [text.read_text("utf-8")], 512, 1, 0)
    if dtype != "float32":
        pretrained, fp32 = pretrained.in_dtype(DTYPES[dtype]), pretrained
    for method in methods:  # what the first swap of a method does is not timed
        with running(pretrained.model, method):
            pass
    counted = "one passage" if passages == 1 else f"{passages} passages"
    about = f"{pretrained.name}, {dtype}, {counted}, {torch.get_num_threads()} threads"
    print(f"{about}, {machine.hardware('cpu')}\n")
    head = ["tokens", "method", "perplexity", "KL", "KL, last quarter", "same top token", "prefill"]
    head += ["KL to exact fp32"] * (fp32 is not None) + ["memory, MiB"] * memory
    print(f"| {' | '.join(head)} |\n| {' | '.join(['---'] * len(head))} |")
    for length in lengths:
        items = documents.sequences(pretrained, length, passages + 2)[1:-1]  # without the preface and the licence
        rows = rows_of(pretrained, items, list(methods), turns, memory, fp32)
        print("\n".join(rows), flush=True)
    hf.restore(pretrained.model)


if __name__ == "__main__":
    sheet.run(main)
