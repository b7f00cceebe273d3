"""A module of tests, run by torchrun on a few processes."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

ROOT = Path(__file__).parents[2]


@cache
def found(module: str, ranks: int) -> list[dict[str, Any]]:
    """What each rank found, by the name of the case; the module writes RANK.json into the folder that it is given."""
    folder = Path(mkdtemp())
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*launcher, "-m", module, str(folder)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    files = [folder / f"{rank}.json" for rank in range(ranks)]
    assert all(file.exists() for file in files), done.stderr[-3000:]
    return [json.loads(file.read_text()) for file in files]
