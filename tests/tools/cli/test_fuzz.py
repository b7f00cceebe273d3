"""Whatever a user gives: results, or one line that says what is wrong; never a traceback, never a run without end.

SUBQUAD_FUZZ=5000 tries so many commands instead of 80, SUBQUAD_FUZZ=120:121 those of these numbers.
"""

import os
import resource
import signal
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner, Result

from subquad.tools.bench import run as bench
from subquad.tools.cli.main import app
from subquad.tools.compare import run as compare
from tests.tools.cli.fuzz import FAMILIES, command_of

pytestmark = pytest.mark.slow  # whole runs of commands

FIRST, _, LAST = os.environ.get("SUBQUAD_FUZZ", "80").rpartition(":")
NUMBERS = range(int(FIRST or 0), int(LAST))
BLOCK = 10  # commands a test
SECONDS = 120  # after which a command has no end
MEMORY = 12 * 2**30  # of address space, so that what asks for more is told so


class Endless(BaseException):
    """A command that did not end in its time."""


@pytest.fixture
def quick(monkeypatch):
    """Measure as little as there can be, in little memory, and draw nothing."""
    prepare, small = compare.prepare, {"lengths": (), "op_lengths": (32,), "passages": 3}
    monkeypatch.setattr(compare, "prepare", lambda settings, *rest: prepare(replace(settings, **small), *rest))
    for module in ("compare.write", "bench.plots", "inspect.plots"):
        monkeypatch.setattr(f"subquad.tools.{module}.plots", lambda report: {})
    monkeypatch.setattr(bench, "BRIEF", replace(bench.BRIEF, seconds=0.0))
    monkeypatch.delenv("SUBQUAD_DATA", raising=False)

    def endless(*_):
        raise Endless

    limits, alarm = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGALRM, endless)
    threads = torch.get_num_threads()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)
    signal.signal(signal.SIGALRM, alarm)
    torch.set_num_threads(threads)


def invoke(words: list[str]) -> Result:
    """Run a command for at most so many seconds; its standard input says yes to everything."""
    signal.alarm(SECONDS)
    try:
        return CliRunner().invoke(app, words, input="yes\n" * 100)
    finally:
        signal.alarm(0)


def wrong(done: Result) -> str:
    """Describe what no command may do, such as printing a traceback, if this one did it; else ""."""
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        return f"{type(done.exception).__name__}: {done.exception}"
    if done.exit_code not in (0, 2):
        return f"exit code {done.exit_code}"
    if "Traceback" in done.stderr:
        return "a traceback"
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    by_typer = "Usage:" in done.stderr  # of options that it reads itself, in a box
    if done.exit_code == 2 and not by_typer and (len(lines) != 1 or not done.stderr.endswith(f"{lines[0]}\n")):
        return "not one line of an error at the end"
    return ""


@pytest.mark.parametrize("block", range(NUMBERS.start, NUMBERS.stop, BLOCK))
def test_a_command_gives_results_or_one_line(block, quick, model, tmp_path, monkeypatch):
    found = {}
    for number in range(block, min(block + BLOCK, NUMBERS.stop)):
        place = tmp_path / str(number)
        place.mkdir()
        monkeypatch.chdir(place)
        words = command_of(number, place, model)
        done = invoke(words)
        if said := wrong(done):
            found[number] = (said, FAMILIES[number % len(FAMILIES)].__name__, words, done.stderr[-500:])
    assert not found
