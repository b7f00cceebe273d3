"""A module of tests, run by torchrun on a few processes."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

ROOT = Path(__file__).parents[3]


@cache
def ran(module: str, ranks: int, *words: str) -> tuple[Path, str]:
    """The folder that the ranks wrote to, and their standard error; they run once, even if they fail."""
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
def found(module: str, ranks: int, *words: str) -> list[dict[str, Any]]:
    """Return each rank's findings by case name; the module writes RANK.json into the folder that it is given."""
    folder, said = ran(module, ranks, *words)
    files = [folder / f"{rank}.json" for rank in range(ranks)]
    assert all(file.exists() for file in files), said[-3000:]
    return [json.loads(file.read_text()) for file in files]
