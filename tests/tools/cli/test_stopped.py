"""A command that is told to stop ends in one line that says how to resume."""

import json
import os
import signal

import pytest
import typer

from subquad.tools.cli.common import user_errors
from subquad.tools.cli.stopped import terminable
from tests.forks import output_of


def stopped_by(number, capsys):
    """The exit code of a command that gets this signal, and what it says."""
    with pytest.raises(typer.Exit) as ended, user_errors("the same command resumes from here"):
        os.kill(os.getpid(), number)
    return ended.value.exit_code, capsys.readouterr().err


@pytest.fixture
def alone(monkeypatch):
    """Not under torchrun, and in a process that does not ignore Ctrl-C, as those in the background of a script do."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("number", "code", "said"), [(signal.SIGTERM, 143, "terminated"), (signal.SIGINT, 130, "interrupted")]
)
def test_each_signal_has_its_word_and_exit_code(number, code, said, alone, capsys):
    before = signal.getsignal(signal.SIGTERM)
    with terminable():
        assert stopped_by(number, capsys) == (code, f"{said}; the same command resumes from here\n")
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_sigterm_does_not_disturb_the_end(alone):
    with terminable():
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # is ignored


def test_under_torchrun_sigterm_is_left_to_training(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    before = signal.getsignal(signal.SIGTERM)
    with terminable():
        assert signal.getsignal(signal.SIGTERM) is before


POINTS = [
    ("parsing", "never"),
    ("working", "never"),
    ("working", "cleaning up"),  # an error in place of the interruption
    ("working", "saying so"),
    ("working", "leaving"),
    ("working+cleaning up", "never"),  # Ctrl-C twice
    ("working+saying so", "never"),
    ("working+leaving", "never"),
    ("working+saying so+leaving", "cleaning up"),
    ("leaving", "never"),
]


@pytest.mark.slow
def test_a_stop_at_any_point_ends_with_its_exit_code(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    calls = [(signal.SIGINT, *points) for points in POINTS]
    # After a command, SIGTERM ends a process as by default.
    calls += [(signal.SIGTERM, *points) for points in POINTS if "leaving" not in "+".join(points)]
    found = ends([*calls, (signal.SIGINT, "never", "cleaning up")])
    for (number, sent, fails), (code, said) in zip(calls, found, strict=False):
        assert code == 128 + number, (number, sent, fails, said)
        assert "Traceback" not in said, (number, sent, fails, said)
        if (sent, fails) == ("working", "cleaning up"):
            word = "interrupted" if number == signal.SIGINT else "terminated"
            assert said.splitlines() == [
                "while the command ended: RuntimeError: no more",
                f"{word}; the same command resumes from here",
            ]
    code, said = found[-1]  # without a stop it stays an error
    assert code == 1
    assert said.splitlines()[-1] == "RuntimeError: no more"


def ends(calls):
    """The exit code and the words of each command."""
    return [json.loads(line) for line in output_of("tests.tools.cli.ending", stdin=json.dumps(calls)).splitlines()]
