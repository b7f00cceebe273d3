"""Other packages' attention side by side with subquad's and with exact attention (SDPA), in one run.

    python benchmarks/peers.py [--lengths 512,1024] [--repeats 15] [--peers linformer] [--threads 2] [--out peers.md]

Attention alone: batch 1, 6 heads of width 64, fp32, no padding, no dropout. Every round runs all of them once, one
after the other, so that they meet the same noise. Peers that are not installed are named with the command that installs
them; one that fails is listed with the reason, and the others go on. How to install them: benchmarks/README.md.
"""

import shlex
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from contenders import (
    BATCH,
    BITS,
    CLUSTERS,
    HEADS,
    ITERATIONS,
    MODULES,
    OURS,
    SEEDS,
    TOPICS,
    TOPK,
    WIDTH,
    Contender,
    Inputs,
    inputs_of,
    installed,
    present,
    reason,
    seed_global_generators,
)
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import subquad as sq
from subquad.core.files import write
from subquad.kernels.dispatch import chosen_backend
from subquad.tools.measure.fidelity import relative_error
from subquad.tools.measure.timing import Cost, cost, exact_cost, timed_rounds
from subquad.tools.report import cells
from subquad.tools.runs import machine

Call = Callable[[], object]


class Timing(NamedTuple):
    """One direction, beside SDPA and relative to subquad's method of the same name."""

    cost: Cost
    like: float | None  # subquad's time / this one's


class Row(NamedTuple):
    contender: Contender
    error: float | None = None
    forward: Timing | None = None
    both: Timing | None = None  # forward and backward
    failure: str = ""


# ---------------------------------------------------------------------- measuring


def measure(contenders: Sequence[Contender], length: int, repeats: int) -> list[Row]:
    """A row for each contender at one length. SDPA must be among them."""
    inputs = inputs_of(length)
    truth = sdpa(*inputs)
    forward, both, errors, failures = {}, {}, {}, {}
    for one in contenders:
        say(f"{length:,} tokens: warming up {one.name}")
        try:
            forward[one.name], both[one.name], errors[one.name] = warmed_up(one, inputs, truth)
        except Exception as error:  # what a peer cannot do at this length must not stop the others
            failures[one.name] = reason(error)
    seconds = timed(f"{length:,} tokens, forward", forward, repeats, failures)
    seconds_both = timed(f"{length:,} tokens, forward+backward", both, repeats, failures)
    return [
        Row(one, failure=failures[one.name])
        if one.name in failures
        else Row(one, errors[one.name], timing(one, seconds), timing(one, seconds_both))
        for one in contenders
    ]


def warmed_up(one: Contender, inputs: Inputs, truth: Tensor) -> tuple[Call, Call, float | None]:
    """Forward, forward+backward, both of which have run, and the mean error over the seeds."""
    errors = []
    for seed in reversed(SEEDS):
        seed_global_generators(seed)
        core = one.make(inputs, seed)
        out = core.forward()
        if core.unpack(out).shape != truth.shape:
            raise ValueError(f"its output has shape {tuple(core.unpack(out).shape)}, not {tuple(truth.shape)}")
        errors.append(relative_error(core.unpack(out), truth))
    gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(SEEDS[0]))
    both = partial(core.forward_backward, gradient)
    for call in (core.forward, both, both):
        call()
    return core.forward, both, statistics.mean(errors) if one.approximates else None


def timed(what: str, calls: dict[str, Call], repeats: int, failures: dict[str, str]) -> dict[str, list[float]]:
    """Seconds of each call in each round. A call that fails takes no further part; its reason goes to `failures`."""

    def caught(name: str) -> None:
        try:
            calls[name]()
        except Exception as error:  # a peer that draws anew in every call may fail in any
            failures[name] = reason(error)

    seed_global_generators(SEEDS[0])
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for done in range(repeats):
        say(f"{what}: round {done + 1} of {repeats}")
        running = {name: partial(caught, name) for name in calls if name not in failures}
        for name, took in timed_rounds(running, 1).items():
            seconds[name] += took
    return {name: took for name, took in seconds.items() if name not in failures}


def timing(one: Contender, seconds: dict[str, list[float]]) -> Timing:
    own, like = seconds[one.name], seconds.get(one.like)
    beside_exact = exact_cost(own) if one.name == "SDPA" else cost(own, seconds["SDPA"])
    return Timing(beside_exact, cost(own, like).speedup if like else None)


def say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


# ---------------------------------------------------------------------- report

HEAD = (
    "method",
    "version",
    *(
        f"{direction}{what}"
        for direction in ("fwd", "fwd+bwd")
        for what in (" ms", " quartiles", " vs SDPA", " vs ours")
    ),
    "error",
)
NAME = 12  # characters of a method's name on a line in the terminal: with the figures beside it, 80 columns
LEGEND = (
    "fwd: forward; bwd: backward; ms: SDPA's median divided by the speed relative to it, then the same with the "
    "quartiles; of SDPA its own median and quartiles.",
    "vs SDPA: speed relative to exact attention's, the median over rounds of SDPA's time / this one's; ↓ is slower.",
    "vs ours: speed relative to subquad's method of the same name, likewise.",
    "error: ‖out − exact‖ / ‖exact‖, the mean over 3 seeds; – where the method is not meant to be close to exact "
    "attention of these q, k, v. It compares implementations on these inputs, not methods in a model.",
)


def lines_of(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Rows as text, by the columns of HEAD."""
    return [
        (
            row.contender.name,
            installed(row.contender.package) or "",
            *figures(row.forward),
            *figures(row.both),
            "failed" if row.failure else cells.number(row.error).text,
        )
        for row in rows
    ]


def figures(timing: Timing | None) -> tuple[str, ...]:
    if timing is None:
        return (cells.MISSING,) * 4
    median, low, high = (cells.size(getattr(timing.cost, key)).text for key in ("ms", "ms_low", "ms_high"))
    return median, f"{low}–{high}", cells.speedup(timing.cost.speedup).text, cells.speedup(timing.like).text


def failures_of(rows: Sequence[Row]) -> list[str]:
    return [f"{row.contender.name} failed: {row.failure}" for row in rows if row.failure]


def conditions(repeats: int) -> list[str]:
    """The conditions of the runs, one fact a line."""
    return [
        f"batch {BATCH}, {HEADS} heads, width {WIDTH}, fp32, no padding, no dropout; {CLUSTERS} clusters, {BITS} bits, "
        f"{ITERATIONS} iterations, top-{TOPK}",
        f"inputs: queries and keys scattered (0.5·N(0, 1)) around {TOPICS} topics from N(0, 1), values from N(0, 1): "
        "peaked attention, which is hard for random features; each peer gets them contiguous in its own layout, "
        "and putting them there is not timed",
        f"{repeats} rounds, each of which runs all rows once, in turn; forward without gradients; backward to what is "
        "read of q, k and v, and to parameters",
        "the global generators, which peers draw from, are seeded before each warm-up and each measurement; clusters "
        "of pytorch-fast-transformers that run empty restart from the system's entropy all the same",
        "; ".join(f"{what} {found}" for what, found in (machine.versions() | machine.hardware()).items()),
        f"subquad {sq.__version__} on its backend {chosen_backend()!r}",
    ]


def show(console: Console, length: int, rows: Sequence[Row]) -> None:
    """One length's table in the terminal, as narrow as it goes: versions are below it, quartiles under their median."""
    table = Table(
        title=f"{length:,} tokens", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False
    )
    table.padding = (0, 1, 0, 0)
    table.add_column("method", min_width=NAME)
    for column in ("fwd ms", "vs SDPA", "vs ours", "fwd+bwd ms", "vs SDPA", "vs ours", "error"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, _, ms, quartiles, sdpa_, like, both, both_quartiles, both_sdpa, both_like, error in lines_of(rows):
        pair, both_pair = f"{ms}\n{quartiles}", f"{both}\n{both_quartiles}"
        table.add_row(textwrap.fill(name, NAME), pair, sdpa_, like, both_pair, both_sdpa, both_like, error)
    console.print(table)
    for failure in failures_of(rows):
        console.print(failure, markup=False, soft_wrap=True)


def markdown(results: dict[int, list[Row]], absent: dict[str, str], repeats: int) -> str:
    """Everything as Markdown."""
    parts = ["# Attention of other packages beside subquad's", "Written by `benchmarks/peers.py`.", bullets(LEGEND)]
    for length, rows in results.items():
        lines = [HEAD, (":---", ":---", *("---:" for _ in HEAD[2:])), *lines_of(rows)]
        parts += [f"## {length:,} tokens", "\n".join(map(markdown_row, lines)), bullets(failures_of(rows))]
    ran = [row.contender for row in next(iter(results.values()))]
    parts += ["## What is measured", bullets(f"{one.name}: {one.measured}" for one in ran)]
    parts += ["## Not measured", bullets(f"{name}: {why}" for name, why in absent.items())] if absent else []
    parts += ["## Conditions", bullets(conditions(repeats))]
    parts += ["## Command", f"```sh\npython benchmarks/peers.py {shlex.join(sys.argv[1:])}\n```"]
    return "\n\n".join(filter(None, parts)) + "\n"


def markdown_row(line: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |"


def bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


# ---------------------------------------------------------------------- command line

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def lengths_of(text: str) -> list[int]:
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError:
        lengths = []
    if not lengths or min(lengths) < 1:
        raise typer.BadParameter(f"{text!r}: give lengths in tokens, separated by commas: 512,1024")
    return lengths


def peers_of(text: str) -> list[str]:
    peers = [part for part in text.split(",") if part]
    unknown = [name for name in peers if name not in MODULES]
    if unknown:
        raise typer.BadParameter(f"no peer {', '.join(unknown)}; there are {', '.join(MODULES)}")
    return peers


@app.command(help=__doc__.partition("\n")[0])
def main(
    lengths: Annotated[str, typer.Option(help="In tokens, separated by commas.")] = "512,1024,2048,4096,16384",
    repeats: Annotated[int, typer.Option(min=1, help="Rounds at each length, in each direction.")] = 15,
    peers: Annotated[str, typer.Option(help='Packages, separated by commas; "" for none.')] = ",".join(MODULES),
    threads: Annotated[int | None, typer.Option(min=1, help="torch's threads; default: torch's own choice.")] = None,
    out: Annotated[Path | None, typer.Option(help="Markdown file to write.")] = None,
) -> None:
    chosen, asked = lengths_of(lengths), peers_of(peers)
    if out is not None and not out.parent.is_dir():
        raise typer.BadParameter(f"--out {out}: there is no folder {out.parent}")
    if threads is not None:
        torch.set_num_threads(threads)
    found, absent = present(asked)
    console = Console()
    results = {}
    for length in chosen:
        results[length] = measure([*OURS, *found], length, repeats)
        show(console, length, results[length])
        if out is not None:  # after each length: what is there stays if a later one is interrupted
            write(out, markdown(results, absent, repeats))
    versions = {one.package: installed(one.package) for one in (*OURS, *found)}
    packages = ", ".join(f"{name} {number}" for name, number in versions.items())
    below = [*LEGEND, f"{packages}; subquad's backend: {chosen_backend()}"]
    for line in (*below, *(f"{name}: {why}" for name, why in absent.items())):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    app()
