"""Code for scripts with tables: times side by side, memory in a process of its own, Markdown with its origin."""

import argparse
import math
import os
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch

from subquad.core.files import write
from subquad.tools.bench.calls import Load
from subquad.tools.bench.memory import extra_memory
from subquad.tools.measure.timing import Effort, until_steady
from subquad.tools.runs import machine

HEADS, WIDTH = 6, 64
MISSING = "–"


def arguments(text: str, lengths: Sequence[int], **others: object) -> argparse.ArgumentParser:
    """Options that all scripts have. `others`: more options with their defaults; a tuple takes several."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {
        "lengths": tuple(lengths),
        "threads": torch.get_num_threads(),
        **others,
    }.items():
        several = {"nargs": "+", "type": type(value[0])} if isinstance(value, tuple) else {"type": type(value)}
        parser.add_argument(f"--{name}", default=value, **several)
    parser.add_argument("--out", type=Path)
    return parser


def load_of(length: int, *, causal: bool = False, heads: int = HEADS) -> Load:
    """One item with standard normal q, k and v in fp32: 6 heads of 64, if nothing else is said."""
    return Load(length, "float32", "forward", 1, heads, WIDTH, "cpu", 0, causal)


def milliseconds(calls: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, list[float]]:
    """The time of each call, round by round: every round runs all of them once, so that all meet the same noise."""
    times = until_steady(calls, Effort(seconds=seconds, least=2, enough=5, precision=0.02))
    return {name: [1e3 * each for each in own] for name, own in times.items()}


def peak_alone(load: Load, method: str, threads: int) -> int | None:
    """Peak extra bytes of a call in a process of its own; None where it does not survive."""
    return extra_memory(load, method, threads).bytes


def slope(lengths: Sequence[int], values: Sequence[float]) -> float:
    """The exponent p of values ∝ lengthᵖ: least squares on logarithms."""
    x, y = ([math.log(each) for each in of] for of in (lengths, values))
    return statistics.linear_regression(x, y).slope


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown: the first column to the left, the others to the right."""
    lines = [head, [":---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def publish(title: str, parts: Sequence[str], out: Path | None, dtype: str = "fp32") -> None:
    """Print a sheet, with the command and the machine that it comes from; write it to a file where one is given."""
    about, versions = machine.hardware(), machine.versions()
    command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    load = (
        f" The machine's load was {os.getloadavg()[0]:.1f}, this run's included." if hasattr(os, "getloadavg") else ""
    )
    facts = (
        f"`{command}`: {about['processor']}, {about['threads']} threads, {about['cpu_capability']}, torch "
        f"{versions['torch']}, subquad {versions['subquad']}, {dtype}.{load}"
    )
    text = "\n\n".join([f"# {title}", *parts, facts]) + "\n"
    print(text)
    if out is not None:
        write(out, text)
