"""A module of tests on a few processes: forked from one that has imported everything, or started by torchrun."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
import torch.distributed as dist

from tests.forks import redirect, run, start_forked

ROOT = Path(__file__).parents[3]
LONGEST = 300  # seconds without a rank that ends, after which all are ended


@cache
def ran(module: str, ranks: int, *words: str) -> tuple[Path, str]:
    """The folder that torchrun's ranks wrote to, and their standard error; they run once, even if they fail."""
    folder = Path(mkdtemp())
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*launcher, "-m", module, str(folder), *words],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    return folder, done.stderr


@cache
def forked(module: str, ranks: int, *words: str) -> tuple[Path, str]:
    """Return what `ran` returns; the ranks are forked."""
    folder = Path(mkdtemp())
    return folder, fork(module, ranks, folder, *words)


def fork(module: str, ranks: int, folder: Path, *words: str) -> str:
    """Run a module as ranks that write to a folder, and return their standard error.

    They are forked, and all are ended if one fails.
    """
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    every = [start_forked(be_rank, module, rank, ranks, store.port, folder, *words) for rank in range(ranks)]
    running = {process.sentinel: process for process in every}
    late = ""
    while running:
        ended = [running.pop(sentinel) for sentinel in wait(list(running), LONGEST)]
        for process in ended:
            process.join()
        if not ended:
            late = f"no rank ended within {LONGEST} s, so all were ended\n"
        if not ended or any(process.exitcode for process in ended):
            for process in running.values():
                process.terminate()
    return late + "".join((folder / f"{rank}.stderr").read_text() for rank in range(ranks))


def be_rank(module: str, rank: int, ranks: int, port: int, folder: Path, *words: str) -> None:
    """Run a module as the program of a rank, with the variables that torchrun sets."""
    redirect(2, folder / f"{rank}.stderr")
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in own.items()}
    os.environ |= {"MASTER_ADDR": "localhost", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    torch.set_num_threads(1)
    run(module, str(folder), *words)


@cache
def found(
    module: str, ranks: int, *words: str, start: Callable[..., tuple[Path, str]] = forked
) -> list[dict[str, Any]]:
    """Return each rank's findings by case name; the module writes RANK.json into the folder that it is given."""
    folder, said = start(module, ranks, *words)
    files = [folder / f"{rank}.json" for rank in range(ranks)]
    assert all(file.exists() for file in files), said if len(said) < 3000 else f"{said[:300]} … {said[-2700:]}"
    return [json.loads(file.read_text()) for file in files]
