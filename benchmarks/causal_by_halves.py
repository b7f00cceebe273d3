"""Prefill of a causal language model by halves: its time, and its next tokens beside those of exact attention.

    python benchmarks/causal_by_halves.py demo-decoder book.txt --lengths 2048,4096,8192

Each turn runs exact attention and every method once, in a new order; a speed-up is the median of the ratios within a
turn.
"""

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from subquad import hf
from subquad.tools.measure.timing import shuffled
from subquad.tools.models.next_tokens import Prefill
from subquad.tools.models.passages import read
from subquad.tools.models.pretrained import Pretrained, load, running
from subquad.tools.runs import machine

METHODS = (
    "clustered-tail",
    "clustered-tail:queries=block",
    "clustered-tail:clusters=32,topk=96,queries=block",
    "i-clustered:clusters=64,topk=128",
)


def measured(pretrained: Pretrained, item: list[int], methods: list[str], turns: int) -> list[str]:
    """A row of Markdown for each method."""
    rows: dict[str, str | None] = {"exact": None, **{method: method for method in methods}}
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    runs: dict[str, Prefill] = {}
    for turn in range(turns):
        for name, method in shuffled(rows, random.Random(turn)).items():
            with running(pretrained.model, method):
                start = time.perf_counter()
                runs[name] = pretrained.prefill([item])
                seconds[name].append(time.perf_counter() - start)
    lines = []
    for name, found in pretrained.next_tokens([item], runs, "exact").items():
        speed = statistics.median(e / s for e, s in zip(seconds["exact"], seconds[name], strict=True))
        figures: list[Any] = [f"{len(item):,}", f"`{name}`", f"{found.perplexity:.3f}", f"{found.mean_kl:.5f}"]
        figures += [f"{found.last_kl / found.last_count:.5f}", f"{found.agreement:.4f}", f"{speed:.2f}×"]
        lines.append(f"| {' | '.join(figures)} |")
    return lines


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("--lengths", default="2048,4096,8192")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    pretrained = load(arguments.model)
    text = read(pretrained, [arguments.text.read_text("utf-8")], 512, 1, 0)
    for method in arguments.methods:  # what the first swap of a method does is not timed
        with running(pretrained.model, method):
            pass
    hardware = machine.hardware("cpu")
    print(f"{pretrained.name}, {torch.get_num_threads()} threads, {hardware}\n")
    print("| tokens | method | perplexity | KL | KL, last quarter | same top token | prefill |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for length in map(int, arguments.lengths.split(",")):
        item = text.sequences(pretrained, length, 3)[1]
        print("\n".join(measured(pretrained, item, list(arguments.methods), arguments.turns)), flush=True)
    hf.restore(pretrained.model)


if __name__ == "__main__":
    main()
