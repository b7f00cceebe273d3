"""A sequence on several ranks against one process: time, peak memory of a rank, and what ranks send each other.

    python benchmarks/parallel.py [--methods …] [--lengths 131072] [--ranks 2] [--memory 1048576] [--out FILE.md]

Every process has one thread. Times are medians of some rounds, in which one process and all ranks take turns. Peaks
are of a forward pass with its inputs, in processes of their own. Times mean little with fewer cores than ranks.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sheet

METHODS = (
    "clustered",
    "i-clustered",
    "clustered-tail:clusters=256,topk=32",
    "linear",
    "performer",
    "local:window=128",
)


def ranks_say(ranks: int, *words: object) -> dict[str, Any]:
    """The output of `of_ranks.py` in so many processes."""
    script = Path(__file__).with_name("of_ranks.py")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*launcher, str(script), *map(str, words)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, words))} on {ranks} ranks:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def time_rows(methods: Sequence[str], lengths: Sequence[int], ranks: Sequence[int], rounds: int) -> list[list[str]]:
    rows = []
    for method in methods:
        for length in lengths:
            for count in ranks:
                result = ranks_say(count, "times", method, length, "--rounds", rounds)
                row = [method, f"{length:,}", str(count)]
                for alone, together in (result["forward"], result["both"]):
                    row += [f"{1e3 * alone:,.0f}", f"{1e3 * together:,.0f}", f"{alone / together:.2f}×"]
                rows.append([*row, f"{result['bytes'] / 1024:,.0f}", str(result["calls"])])
    return rows


def memory_rows(methods: Sequence[str], length: int, ranks: int) -> list[list[str]]:
    rows = []
    for method in methods:
        peaks = [ranks_say(count, "memory", method, length)["peak"] for count in (1, ranks)]
        if None in peaks:
            rows.append([method, *[sheet.MISSING] * 3])
            continue
        alone, of_rank = peaks
        rows.append([method, f"{alone / 2**20:,.0f}", f"{of_rank / 2**20:,.0f}", f"{of_rank / alone:.0%}"])
    return rows


def main(
    lengths: tuple[int, ...] = (131072,),
    methods: tuple[str, ...] = METHODS,
    ranks: tuple[int, ...] = (2,),
    rounds: int = 5,
    memory: int = 1048576,
    share: int = 4,
    out: Path | None = None,
) -> None:
    head = ["method", "tokens", "ranks", "one, ms", "ranks, ms", "forward"]
    head += ["one, ms", "ranks, ms", "forward+backward", "KiB sent by a rank", "exchanges"]
    times = sheet.table(head, time_rows(methods, lengths, ranks, rounds))
    head_of_memory = ["method", "one process, MiB", f"a rank of {share}, MiB", "share"]
    peaks = sheet.table(head_of_memory, memory_rows(methods, memory, share))
    about = "Batch 1, 6 heads of 64, one thread a process. What is sent is that of a forward and a backward pass."
    peak = f"Peak memory of a forward pass over {memory:,} tokens, inputs and output included."
    sheet.publish("Sequences on several ranks", [about, times, peak, peaks], out)


if __name__ == "__main__":
    sheet.run(main)
