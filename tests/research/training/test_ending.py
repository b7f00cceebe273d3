"""A process that dies or hangs ends the run of several in one line, and its checkpoints go on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from subquad.research.training.checkpoints import newest_step
from subquad.research.training.ends import answering
from subquad.tools.cli.main import app
from tests.research.training.small import QUICK, SIZES, TRAINING

ROOT = Path(__file__).parents[3]
OPTIONS = [part for given in (*SIZES, *TRAINING, *QUICK) for part in ("--set", given)]
HOW = [
    pytest.param("die", "1,800", (), id="dies"),
    pytest.param("hang", "8", ("8",), marks=pytest.mark.long, id="hangs"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("how", "seconds", "timeout"), HOW)
def test_the_process_is_named_and_the_run_can_be_resumed(
    how: str, seconds: str, timeout: tuple[str, ...], tmp_path: Path
):
    out = tmp_path / "run"
    words = ["train", "masked-copy", "--method", "linear", *OPTIONS, "--out", str(out)]
    split = ["--set", "parallel.sequence=2", *(f"--set=parallel.timeout={each}" for each in timeout)]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, "-m", "tests.research.training.ending", how, "1", *words, *split],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert said == [
        f"error: process 0: process 1 of 2 ended, or did not answer for {seconds} seconds; checkpoints are kept, and "
        "the same command continues from the newest"
    ], done.stderr[-3000:]
    assert newest_step(out) == 8
    resumed = CliRunner().invoke(app, words)
    assert resumed.exit_code == 0, resumed.output
    assert json.loads((out / "results.json").read_text())["steps"] == 24


def test_processes_answer_through_the_launcher(monkeypatch: pytest.MonkeyPatch):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "WORLD_SIZE": 3, "RANK": 2}.items():
        monkeypatch.setenv(name, str(value))
    store.set("subquad/here/0", "here")
    assert answering(0.2) == {0, 2}
    monkeypatch.delenv("MASTER_PORT")
    assert answering(0.2) == {2}
