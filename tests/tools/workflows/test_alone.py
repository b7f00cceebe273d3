"""One run at a time in a folder: the second says who is there; a killed one is not in the way."""

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from filelock import FileLock
from typer.testing import CliRunner

from subquad.core.errors import InputError
from subquad.tools.cli.main import app
from subquad.tools.runs.alone import HOLDER, LOCK, alone_in

HOLD = """
import sys
from pathlib import Path
from subquad.tools.runs.alone import alone_in
with alone_in(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def holder_of(folder):
    """A folder that another process holds, and that process."""
    with subprocess.Popen([sys.executable, "-c", HOLD, folder], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield folder, process
        process.stdin.close()


@pytest.fixture(scope="module")
def held(tmp_path_factory):
    with holder_of(tmp_path_factory.mktemp("held") / "out") as both:
        yield both


COMMANDS = {
    "compare": ["compare", "nowhere"],
    "calibrate": ["calibrate", "nowhere", "--text", "nowhere"],
    "inspect": ["inspect", "nowhere"],
    "bench": ["bench", "--quick", "--lengths", "32"],
    "train": ["train", "masked-copy"],
    "reproduce": ["reproduce", "attention-utility", "--scale", "smoke"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_second_run_says_who_is_there(held, command):
    folder, process = held
    before = sorted(folder.iterdir())
    result = CliRunner().invoke(app, [*COMMANDS[command], "--out", str(folder)])
    said = " ".join(result.stderr.split())
    assert result.exit_code == 2, said
    assert f"{folder} is in use by subquad" in said
    assert f"process {process.pid} on" in said
    assert ", since 20" in said
    assert "wait for its end, or give another folder" in said
    assert sorted(folder.iterdir()) == before


def test_a_killed_run_is_not_in_the_way(tmp_path):
    with holder_of(tmp_path / "out") as (folder, process):
        process.send_signal(signal.SIGKILL)
        process.wait()
    (folder / ".a.json.01234567.subquad-part").write_text("half of")
    assert {path.name for path in folder.iterdir()} == {LOCK, HOLDER, ".a.json.01234567.subquad-part"}
    with alone_in(folder):
        assert json.loads((folder / HOLDER).read_text())["process"] == os.getpid()
        assert {path.name for path in folder.iterdir()} == {LOCK, HOLDER}
    assert list(folder.iterdir()) == []  # it was there before


def test_an_unknown_holder_is_another_run(held):
    folder, _ = held
    holder = (folder / HOLDER).read_text()
    (folder / HOLDER).write_text("{")
    with pytest.raises(InputError, match="is in use by another run;"), alone_in(folder):
        pass
    (folder / HOLDER).write_text(holder)


def test_it_leaves_no_trace_of_a_run_that_wrote_nothing(tmp_path):
    with alone_in(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b").is_dir()
    assert list(tmp_path.iterdir()) == []
    with alone_in(tmp_path / "a" / "b"):
        (tmp_path / "a" / "mine").write_text("")
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "mine"]


def test_one_after_another_may(tmp_path):
    for _ in range(2):
        with alone_in(tmp_path / "out"):
            (tmp_path / "out" / "result").write_text("")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["result"]


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def refused(*given, **more):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(FileLock, "acquire", refused)
    says = r"cannot write to the folder .*out: No locks available"
    with pytest.raises(InputError, match=says), alone_in(tmp_path / "out"):
        pass


def test_a_folder_that_may_not_be_written_to_is_named(tmp_path, monkeypatch):
    def denied(*given, **more):
        raise PermissionError(13, "Permission denied", str(tmp_path / "out"))

    monkeypatch.setattr(Path, "mkdir", denied)
    says = r"cannot write .*out: Permission denied; make it writable"
    with pytest.raises(InputError, match=says), alone_in(tmp_path / "out"):
        pass
