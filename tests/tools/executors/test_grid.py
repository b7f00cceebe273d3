"""24 cells of an experiment on two workers, of which some are killed: each runs once, and the tables are the same."""

import json
import os
import signal
import threading
import time
import uuid
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner

from subquad.core.errors import InputError
from subquad.research.papers.run import reproduce
from subquad.tools.cli.main import app
from subquad.tools.runs.executors import make_executor
from subquad.tools.runs.executors.job_resources import JobResources
from tests.tools.executors.grid import GRID

pytestmark = pytest.mark.slow
needs_ray = pytest.mark.skipif(
    find_spec("ray") is None, reason="ray is not installed: pip install -c constraints.txt '.[ray]'"
)
IN_PROCESSES = pytest.param("processes", marks=pytest.mark.long)
MARK = "SUBQUAD_TEST_MARK"  # in the environment of workers that a test may kill


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The tables of one process."""
    out = tmp_path_factory.mktemp("alone") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SUBQUAD_TEST_ALONE", "1")
        _, results, cells = reproduce(GRID, "smoke", out)
    assert len(cells) == 24
    return results


@pytest.fixture
def unmarked(monkeypatch):
    monkeypatch.delenv("SUBQUAD_TEST_ALONE", raising=False)


@pytest.mark.parametrize("name", [IN_PROCESSES, pytest.param("ray", marks=needs_ray)])
def test_24_cells_of_which_one_worker_is_killed_twice(name, alone, tmp_path, unmarked, capsys):
    told = Told()
    with make_executor(name, workers=2) as executor:
        header, results, cells = reproduce(GRID, "smoke", tmp_path / "out", progress=told, executor=executor)
        assert executor.width == 2
        assert header.machine["executor"] == executor.description
        assert _ran(tmp_path / "out") == dict.fromkeys(_slugs(cells), 1)
        again = reproduce(GRID, "smoke", tmp_path / "out", executor=executor)
        if name == "ray":
            _refusals(executor, tmp_path)
    assert capsys.readouterr().out == ""  # where --json prints
    assert results == alone
    assert again[1:] == (results, cells)
    assert [line for line in told.remarks if "'first' was lost" in line] == told.remarks
    assert len(told.remarks) == 2


def _refusals(executor, tmp_path):
    """The refusals of a cluster, in one line; on the cluster that runs already."""
    executor.resources = JobResources(cpus=64.0)
    with pytest.raises(
        InputError,
        match=r"^a cell takes cpus=64, but the largest machine of the Ray cluster has cpus=2,memory=.*GB: give less",
    ):
        reproduce(GRID, "smoke", tmp_path / "other", executor=executor)


@needs_ray
def test_no_cluster_at_an_address():
    done = CliRunner().invoke(
        app, ["reproduce", "spectrum", "--scale", "smoke", "--executor", "ray", "--address", "127.0.0.1:1"]
    )
    assert done.exit_code == 2
    assert "no Ray cluster to use at --address 127.0.0.1:1" in " ".join(done.output.split())


class Told:
    """A progress that keeps remarks."""

    def __init__(self):
        self.remarks = []

    def __call__(self, what, done, total):
        pass

    def note(self, line):
        self.remarks.append(line)


def _slugs(cells):
    return [key.replace(" ", "_") for key in cells if not key.startswith("after")]


def _ran(out):
    return Counter((out / "cells" / "ran").read_text().split())


# ---------------------------------------------------------------------- cells that train


@pytest.mark.long
@pytest.mark.parametrize("name", [IN_PROCESSES, pytest.param("ray", marks=needs_ray)])
def test_24_cells_that_train_while_workers_are_killed_at_any_time(name, tmp_path, monkeypatch):
    words = ["reproduce", "copy-heatmap", "--scale", "smoke", "--set", "seeds=[0,1,2,3,4,5]", "--json"]
    mark = uuid.uuid4().hex
    wanted = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "alone")])
    monkeypatch.setenv(MARK, mark)
    killer = Killer(mark, tmp_path / "out" / "cells", times=2)
    killer.start()
    options = ["--executor", name, "--workers", "2", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, [*words, *options])
    killer.join()
    assert done.exit_code == 0, done.output
    assert killer.killed == 2
    assert done.stderr.count("was lost") == 2
    found, expected = (json.loads(one.stdout)["cells"] for one in (done, wanted))
    assert len(found) == 24
    assert {key: one["result"]["accuracy"] for key, one in found.items()} == {
        key: one["result"]["accuracy"] for key, one in expected.items()
    }


class Killer(threading.Thread):
    """Kills a worker with this mark once two cells are finished, and again after two more."""

    def __init__(self, mark, cells, times):
        super().__init__(daemon=True)
        self.mark, self.cells, self.times, self.killed = f"{MARK}={mark}", cells, times, 0

    def run(self):
        end = time.monotonic() + 500
        while self.killed < self.times and time.monotonic() < end:
            if len(list(self.cells.glob("*.json"))) >= 2 * (self.killed + 1) and (pid := self._busy()):
                os.kill(pid, signal.SIGKILL)
                self.killed += 1
            time.sleep(0.02)

    def _busy(self):
        """A worker that runs a cell: Ray names it so, and processes that were spawned are children of this one."""
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark not in (path / "environ").read_text(errors="replace") or path.name == str(os.getpid()):
                    continue
                line = (path / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
            if line.startswith("ray::attempt") or "spawn_main" in line:
                return int(path.name)
        return None
