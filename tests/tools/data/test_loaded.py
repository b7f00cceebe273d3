"""Methods in workers of a DataLoader compute what they compute in the main process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_compute_what_the_main_process_does(start: str):
    done = subprocess.run(
        [sys.executable, "-m", "tests.tools.data.loaded", start],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == []
