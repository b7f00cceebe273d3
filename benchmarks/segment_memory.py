"""Is a memory of earlier tokens better than longer pieces without one, in a small language model?

    python benchmarks/segment_memory.py [--data FOLDER] [--steps 800] [--seeds "0 1"] [--out FILE.md]

FOLDER holds wikitext-2/; the default is the environment variable SUBQUAD_DATA. `subquad train lm` trains each model in
a process of its own (the extra `train`).
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import sheet

LENGTH, LIMIT = 129, 50_000  # tokens of a window; bytes of the test text
SIZES = ((32, 32), (32, 0), (96, 0))  # of the piece and of the memory
ABOUT = """\
Language models of bytes with two layers of width 64 and learned terms of the distance (`full:positions=relative`), \
trained on the same {steps} batches of 8 windows of WikiText-2 and tested on {limit:,} bytes.
A piece of s tokens with a memory of m costs as much attention per token as pieces of s + 2m tokens without one.
The processor time includes the test."""


def keys_per_query(piece: int, memory: int) -> float:
    """The number of keys that a query of a window sees, mean of its queries."""
    inside = [token % piece for token in range(LENGTH - 1)]
    return statistics.mean(here + 1 + min(memory, token - here) for token, here in enumerate(inside))


def trained(piece: int, memory: int, seed: int, steps: int, data: str) -> tuple[dict[str, float], float]:
    """The figures on the test text, and seconds of the processor."""
    settings = {
        "model.positions": "relative", "model.piece": piece, "model.memory": memory, "model.layers": 2,
        "model.width": 64, "task.length": LENGTH, "task.limit": LIMIT, "training.batch": 8, "training.steps": steps,
        "training.seed": seed,
    }  # fmt: skip
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        command = [sys.executable, "-m", "subquad", "train", "lm", *words, "--data-dir", data, "--json", "--quiet"]
        done = subprocess.run([*command, "--out", f"{folder}/run"], check=True, stdout=subprocess.PIPE, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return json.loads(done.stdout)["test"], seconds


def main(
    data: str = os.environ.get("SUBQUAD_DATA", "data"),
    steps: int = 800,
    seeds: tuple[int, ...] = (0, 1),
    threads: int = 1,
    out: Path | None = None,
) -> None:
    os.environ["OMP_NUM_THREADS"] = str(threads)
    rows = []
    for piece, memory in SIZES:
        for seed in seeds:
            test, seconds = trained(piece, memory, seed, steps, data)
            rows.append([
                f"{piece}", f"{memory}", f"{keys_per_query(piece, memory):.1f}", f"{seed}",
                f"{test['bits_per_byte']:.3f}", f"{test['byte_perplexity']:.2f}", f"{seconds:.0f} s",
            ])  # fmt: skip
    head = ["`model.piece`", "`model.memory`", "keys per query, mean", "seed", "bits per byte", "perplexity of a byte"]
    about = ABOUT.format(steps=steps, limit=LIMIT)
    sheet.publish("A memory of earlier tokens", [about, sheet.table([*head, "processor time"], rows)], out)


if __name__ == "__main__":
    sheet.run(main)
