"""Input that the commands print: as it is, in one line."""

import errno
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import subquad as sq
from subquad.core.errors import InputError
from subquad.methods import METHODS, explained
from subquad.research.papers import catalogue as _with_their_tasks  # noqa: F401
from subquad.research.training.settings import read_overrides, read_toml, settings_of
from subquad.tools.bench import run as bench
from subquad.tools.calibrate import run as calibrate
from subquad.tools.cli.common import LONGEST
from subquad.tools.cli.main import app
from subquad.tools.data import texts

run = CliRunner().invoke
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", [r"\[x]", "[/bold]", "[red]", ":smile:", r"a\\[b", "[link=x]y", "{x}", "%s", "ü🙂"])
def test_paths_are_printed_as_they_are(name, tmp_path):
    for command in (["compare", "--text", name], ["inspect", "--text", name], ["bench", "--compare", name]):
        done = run(app, [*command, "--out", str(tmp_path)])
        assert done.exit_code == 2, (done.output, done.exception)
        assert f"error: no file or folder at {name}\n" in done.stderr


def test_a_folder_for_results_is_printed_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "BRIEF", replace(bench.BRIEF, seconds=0.0))
    monkeypatch.setattr("subquad.tools.bench.plots.plots", lambda report: {})
    short = ["--quick", "--lengths", "16", "--heads", "1", "--head-dim", "8", "--methods", "local:window=4"]
    for out in (r"\[a]", "[b]", ":smile:"):
        done = run(app, ["bench", *short, "--out", out])
        assert done.exit_code == 0, (done.output, done.exception)
        assert f"Results: {out}/bench.json" in done.stdout
        assert (tmp_path / out / "bench.json").exists()


@pytest.mark.parametrize(("name", "shown"), [("a\nb", r"a\nb"), ("\x1b[31m", r"\x1b[31m"), ("a\u2028b", r"a\u2028b")])
def test_what_does_not_print_is_written_out(name, shown, tmp_path):
    done = run(app, ["compare", "--text", name, "--out", str(tmp_path)])
    assert done.exit_code == 2
    assert f"error: no file or folder at {shown}\n" in done.stderr


@pytest.mark.parametrize("word", ["a\ud800", "a\0b", os.fsdecode(b"\xff")])
@pytest.mark.parametrize(
    "command", [["compare"], ["inspect", "--text"], ["bench", "--out"], ["methods"], ["train", "lm", "--set"]]
)
def test_words_that_no_report_could_hold_are_refused(command, word):
    done = run(app, [*command, word])
    assert done.exit_code == 2, (done.output, done.exception)
    by_typer = "Usage:" in done.stderr and word != os.fsdecode(b"\xff")  # of paths, what no argument of a shell has
    assert by_typer or "is not text in UTF-8 without NUL characters" in done.stderr


def test_a_long_message_is_cut_in_the_middle():
    done = run(app, ["methods", "x" * 100_000])
    assert done.exit_code == 2
    assert len(done.stderr) < LONGEST + 100
    assert " … " in done.stderr
    assert done.stderr.endswith(f"`subquad methods` lists all {len(sq.list_methods())}\n")  # the remedy is at the end


def test_a_method_with_settings_is_known():
    done = run(app, ["methods", "oracle-top:topk=31", "--json"])
    assert list(json.loads(done.stdout)) == ["oracle-top"]


@pytest.mark.parametrize("name", sq.list_methods())
def test_a_method_explains_each_of_its_settings_and_names_its_page(name):
    done = run(app, ["methods", name], env={"COLUMNS": "1000"})
    assert done.exit_code == 0, done.output
    own = METHODS[name].defaults()
    for setting, default in own.items():
        (line,) = [line for line in done.stdout.splitlines() if line.strip().startswith(f"{setting}={default} ")]
        assert len(line.split(maxsplit=1)[1]) > 10
    assert set(explained(METHODS[name])) == set(own)
    assert f"docs/methods/{name}.md" in done.stdout
    assert (ROOT / "docs" / "methods" / f"{name}.md").is_file()


def test_a_method_shows_the_settings_that_are_given_with_what_0_means():
    done = run(app, ["methods", "clustered-tail:clusters=7"], env={"COLUMNS": "1000"})
    assert re.search(r"clusters=7 +C, clusters of queries for each head\.", done.stdout)
    assert "0: √(2n), rounded up" in done.stdout


def test_the_list_of_methods_uses_the_terms_of_the_glossary():
    said = run(app, ["methods"]).stdout
    assert "Only as a bound method." in said
    assert "A bound method is one that is attached to a layer" in said
    assert "only bound" not in said
    assert " meet" not in said


@pytest.mark.parametrize(("error", "message"), [
    (OSError(errno.ENOSPC, "No space left on device", "/some/file"), "/some/file: No space left on device"),
    (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
    (MemoryError(), "out of memory"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."), "out of memory"),
])  # fmt: skip
def test_what_the_machine_lacks_is_one_line(error, message, monkeypatch, tmp_path):
    def lacks(*_):
        raise error

    monkeypatch.setattr(texts, "read_text", lacks)
    (tmp_path / "a.txt").write_text("text")
    done = run(app, ["compare", "--text", str(tmp_path / "a.txt"), "--out", str(tmp_path / "out")])
    assert done.exit_code == 2, done.exception
    assert f"error: {message}" in done.stderr


def test_other_errors_of_running_are_not_hidden(monkeypatch, tmp_path):
    def bug(*_):
        raise RuntimeError("a mistake")

    monkeypatch.setattr(texts, "read_text", bug)
    (tmp_path / "a.txt").write_text("text")
    done = run(app, ["compare", "--text", str(tmp_path / "a.txt"), "--out", str(tmp_path / "out")])
    assert isinstance(done.exception, RuntimeError)


# ---------------------------------------------------------------------- settings


@pytest.mark.parametrize(("content", "message"), [
    (b"x = " + b"[" * 100_000, "is not TOML"),
    (b"x = 1" + b"0" * 5000, "is not TOML"),
    (b"\xff", "is not TOML"),
    (b"\xef\xbb\xbf[task]", "is not TOML"),
])  # fmt: skip
def test_settings_that_are_no_toml(content, message, tmp_path):
    (tmp_path / "a.toml").write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_toml(tmp_path / "a.toml")


def test_settings_are_read_from_files_alone(tmp_path):
    os.mkfifo(tmp_path / "pipe.toml")
    with pytest.raises(InputError, match="is a pipe"):
        read_toml(tmp_path / "pipe.toml")
    with pytest.raises(InputError, match="is a folder"):
        read_toml(tmp_path)


def test_one_setting_is_one_value():
    assert read_overrides(["a.b=1"]) == {"a": {"b": 1}}
    assert read_overrides(["a.b=1\nc = 2"]) == {"a": {"b": "1\nc = 2"}}
    assert read_overrides(["a.b=" + "1" * 5000]) == {"a": {"b": "1" * 5000}}
    with pytest.raises(InputError, match="write a list as TOML does"):
        read_overrides(["a.b=" + "[" * 100_000])


@pytest.mark.parametrize(("task", "table", "message"), [
    ("lm", {"model": {"layers": 10**9}}, "layers=1000000000, but it must be at most 10,000"),
    ("listops", {"task": {"depth": 32}}, "make trees of more than 100,000 nodes"),
])  # fmt: skip
def test_sizes_that_no_machine_has_are_refused(task, table, message):
    with pytest.raises(InputError, match=message):
        settings_of(task, table)


def test_a_step_reads_no_more_passages_than_there_are(model, tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("attention key value. " * 200)
    asked = calibrate.CalibrateSettings("lha:buckets=2", (text,), model=model("bert"), batch=10**9)
    with pytest.raises(InputError, match=r"batch 1000000000 is more than the \d+ passages of the text"):
        calibrate.calibrate(asked, tmp_path / "out")
