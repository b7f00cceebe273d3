"""A program of tests runs as if it was started anew, and its failure is told."""

import multiprocessing

import pytest

from tests import forks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("forkserver" not in multiprocessing.get_all_start_methods(), reason="nothing is forked here"),
]
PROGRAM = "tests.forked_program"


def test_a_program_gets_its_words_its_input_and_the_variables_of_now(monkeypatch):
    for value in ("first", "second"):
        monkeypatch.setenv("SUBQUAD_TESTED", value)
        written = forks.output_of(PROGRAM, "a", "b c", stdin="line\n").splitlines()
        assert written == ["a|b c", "line", value, "1 thread", "has not imported tests.test_forks"]


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("raise", r"tests\.forked_program ended with exit code 1: (.|\n)*ValueError: no more"),
        ("exit", r"tests\.forked_program ended with exit code 3: so long"),
        ("abort", r"tests\.forked_program ended with exit code -6: "),
    ],
)
def test_a_program_that_fails_is_told_with_its_words(word, told):
    with pytest.raises(AssertionError, match=told):
        forks.output_of(PROGRAM, word)


def test_a_program_that_takes_too_long_is_ended(monkeypatch):
    monkeypatch.setattr(forks, "LIMIT", 2)
    with pytest.raises(AssertionError, match=r"tests\.forked_program took too long: "):
        forks.output_of(PROGRAM, "hang")
