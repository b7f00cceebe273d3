"""The output of commands and where it goes: --quiet, --verbose, --log-file, --json, and the width of results."""

import json
import logging
import os
import re
import subprocess
import sys
import warnings

import pytest
from typer.testing import CliRunner

import subquad as sq
from subquad.core.errors import InputError
from subquad.research.papers.catalogue import NAMES
from subquad.tools.cli.common import as_command
from subquad.tools.cli.main import app
from subquad.tools.cli.output import MOST_COLUMNS, Log, Logged, manner, results_console, speaking

run = CliRunner().invoke
COMMANDS = [command.callback.__name__ for command in app.registered_commands]
LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \S.*")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_the_options_of_output(command):
    shown = run(app, [command, "--help"], env={"COLUMNS": "200"}).stdout
    for option in ("--quiet", "--verbose", "--log-file", "--json"):
        assert option in shown


def test_an_encoding_without_some_characters_ends_no_command():
    words = [sys.executable, "-m", "subquad", "methods", "clustered-tail"]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "0: ?(2n), rounded up" in " ".join(done.stdout.split())


def test_quiet_prints_results_and_errors_only(brief):
    loud, quiet = run(app, brief), run(app, [*brief, "--again", "--quiet"])
    assert "done" in loud.stderr
    assert (quiet.exit_code, quiet.stderr) == (0, "")
    assert "SDPA" in quiet.stdout
    assert run(app, [*brief, "-q"]).stderr == ""  # which would say that it is finished
    refused = run(app, ["methods", "fulll", "--quiet"])
    assert refused.exit_code == 2
    assert refused.stderr.startswith("error: no method 'fulll'")


def test_quiet_hides_warnings_and_what_libraries_log():
    def command() -> None:
        warnings.warn("careful", stacklevel=1)
        logging.getLogger("of a library").warning("careless")

    told = as_command(command)
    before = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        for quiet in (True, False):
            stream, sys.stderr = sys.stderr, (said := CliRunnerStream())
            try:
                told(quiet=quiet, verbose=False, log_file=None)
            finally:
                sys.stderr = stream
            assert ("warning: careful\n" in said.text) == (not quiet)
    assert logging.root.manager.disable == before


class CliRunnerStream:
    """A stream that keeps its text."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text
        return len(text)

    def flush(self):
        pass

    def isatty(self):
        return False


def test_verbose_prints_what_each_unit_took_and_tracebacks(brief):
    quick = run(app, [*brief, "--verbose"])
    units = [
        line
        for line in quick.stderr.splitlines()
        if re.fullmatch(r"timing each method at 16 tokens \(forward, float32\), round \d of 3: \d+\.\d\d s", line)
    ]
    assert len(units) == 3
    for verbose in (False, True):
        refused = run(app, ["methods", "fulll", *["--verbose"] * verbose])
        assert ("Traceback" in refused.stderr) == verbose
        assert refused.stderr.splitlines()[-1].startswith("error: no method 'fulll'")
    both = run(app, ["methods", "--verbose", "--quiet"])
    assert (both.exit_code, both.stderr) == (
        2,
        "error: --quiet and --verbose contradict each other; give one of them\n",
    )


@pytest.mark.parametrize("quiet", [[], ["--quiet"]])
def test_a_log_has_the_lines_of_standard_error_with_times(quiet, brief, tmp_path):
    log = tmp_path / "log.txt"
    done = run(app, [*brief, "--log-file", str(log), *quiet])
    lines = log.read_text().splitlines()
    assert all(LINE.fullmatch(line) for line in lines)
    said = [line[20:] for line in lines]
    assert "3/3 done" in said
    if not quiet:
        assert said == [line for line in done.stderr.splitlines() if line.strip()]
    run(app, ["methods", "fulll", "--log-file", str(log), *quiet])
    assert "error: no method 'fulll'" in log.read_text().splitlines()[-1]
    assert log.read_text().splitlines()[: len(lines)] == lines  # it is appended to


def test_a_log_keeps_the_traceback_of_a_mistake_of_ours(tmp_path):
    def command() -> None:
        raise ZeroDivisionError("ours")

    stream = sys.stderr
    with pytest.raises(ZeroDivisionError):
        as_command(command)(quiet=False, verbose=False, log_file=tmp_path / "log.txt")
    assert "ZeroDivisionError: ours" in (tmp_path / "log.txt").read_text()
    assert sys.stderr is stream
    assert manner().log is None


def test_a_log_that_cannot_be_written_is_one_line(tmp_path):
    done = run(app, ["methods", "--log-file", str(tmp_path / "none" / "log.txt")])
    assert done.exit_code == 2
    assert "error: cannot write to the log file" in done.stderr
    with pytest.raises(InputError, match="cannot write to the log file"), speaking(False, False, tmp_path):
        pass


def test_a_log_has_neither_colours_nor_what_a_bar_drew(tmp_path):
    log = Log(tmp_path / "log.txt")
    stream = Logged(CliRunnerStream(), log)
    stream.write("\r\x1b[2Kloading ━━━ 1/3\r\x1b[2K\x1b[31merror:\x1b[0m it ")
    stream.write("failed\n\r\x1b[2K")
    log.close()
    assert [line[20:] for line in (tmp_path / "log.txt").read_text().splitlines()] == ["error: it failed"]


def test_results_are_as_wide_as_the_terminal_and_wider_in_a_file(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert results_console().width == MOST_COLUMNS
    monkeypatch.setenv("COLUMNS", "66")
    assert results_console().width == 66


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_benchmarks_are_printed_at_the_width_of_columns(brief, columns):
    done = run(app, brief, env={"COLUMNS": str(columns)})
    table = [line for line in done.stdout.splitlines() if not line.startswith("Results:")]
    assert max(map(len, table)) <= columns
    assert "…" not in done.stdout


# ---------------------------------------------------------------------- JSON, methods, names


def test_doctor_and_reproduce_print_json():
    found = json.loads(run(app, ["doctor", "--json"]).stdout)
    assert {"torch", "cores", "backend reference"} <= found.keys()
    listed = json.loads(run(app, ["reproduce", "--json"]).stdout)
    assert list(listed) == list(NAMES)
    assert all(one["title"] and one["source"] for one in listed.values())


def test_methods_are_listed_in_a_line_each_and_one_is_described():
    lines = run(app, ["methods"]).stdout.splitlines()
    rows = {line.split()[0]: line for line in lines if line.split()[0] in sq.list_methods()}
    assert list(rows) == sq.list_methods()
    assert re.match(r"lha +of values +yes +Attention inside the buckets of learned", rows["lha"])
    assert re.match(r"clustered +of values +no +Clustered attention: ", rows["clustered"])
    assert re.match(r"local +yes +no +Window attention", rows["local"])
    described = run(app, ["methods", "i-clustered"]).stdout
    for said in (
        "i-clustered",
        "settings",
        "topk=32",
        "supports",
        "causal masks",
        "refuses",
        "windows",
        "source",
        "Vyas",
    ):
        assert said in described
    assert "performer" not in described


@pytest.mark.parametrize("name", sq.list_methods())
def test_methods_are_listed_whole_at_60_columns(name):
    described = run(app, ["methods", name], env={"COLUMNS": "60"}).stdout
    settings = [f"{key}=" for key in sq.methods.METHODS[name].defaults()]
    assert [key for key in settings if key not in described] == []
    assert "…" not in described


def test_the_names_of_the_package_are_public():
    shown = dir(sq)
    assert set(sq.__all__) <= set(shown)
    assert {"hf", "nn", "methods", "distributed", "__version__"} <= set(shown)
    assert not {"importlib", "Any", "TYPE_CHECKING", "core", "masks", "_ELSEWHERE"} & set(shown)
    for name in shown:
        assert getattr(sq, name) is not None


def test_a_method_with_settings_is_described_with_them():
    assert "clusters=25 " in run(app, ["methods", "i-clustered:clusters=25"]).stdout
