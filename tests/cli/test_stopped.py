"""A command that is told to stop ends in one line that says how to resume."""

import os
import signal

import pytest
import typer

from subquad.cli.common import user_errors
from subquad.cli.stopped import terminable


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
