"""Completion in shells, requested as the shells do."""

import sys

import pytest
from typer.testing import CliRunner

import subquad as sq
from subquad.research.papers.catalogue import NAMES
from subquad.tools.cli.main import app, main


def zsh(line):
    """The completions that zsh and fish get of a line."""
    words = {
        "_SUBQUAD_COMPLETE": "complete_fish",
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    return CliRunner().invoke(app, [], env=words, prog_name="subquad").stdout.split()


@pytest.mark.parametrize(("line", "offered"), [
    ("subquad methods line", ["linear"]),
    ("subquad methods i-clustered:top", ["i-clustered:topk="]),
    ("subquad bench --methods perf", ["performer"]),
    ("subquad compare --methods i-clustered:topk=4,i", ["i-clustered:topk=4,iterations="]),
    ("subquad train --method nyst", ["nystrom"]),
    ("subquad calibrate --method lha-", ["lha-tail"]),
    ("subquad reproduce lra-", [name for name in NAMES if name.startswith("lra-")]),
    ("subquad compare --methods nothing", []),
    ("subquad compare --methods nothing:", []),
    ("subquad compare --methods i-clustered:topk=", []),
])  # fmt: skip
def test_names_and_settings_are_completed(line, offered):
    assert zsh(line) == offered


def test_all_methods_are_offered_where_nothing_is_typed():
    assert zsh("subquad plan --methods ") == sq.list_methods()


@pytest.mark.parametrize(("words", "offered"), [
    (["subquad", "compare", "--methods", "i-clustered", ":", "cl"], ["clusters="]),
    (["subquad", "compare", "--methods", "i-clustered", ":", "clusters", "=", "2,it"], ["2,iterations="]),
    (["subquad", "compare", "--methods", "clustered-tail", ":"], [f"{name}=" for name in sq.ClusteredTail.defaults()]),
    (["subquad", "compare", "--methods", "=", "nys"], ["nystrom"]),
    (["subquad", "compare", "--methods", "=", "nystrom", ":", "landm"], ["landmarks="]),
    (["subquad", "bench", "--methods", "'local perf"], ["local performer"]),
    (["subquad", "repr"], ["reproduce"]),
])  # fmt: skip
def test_bash_gets_what_follows_its_word_breaks(words, offered, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["subquad"])
    monkeypatch.setenv("_SUBQUAD_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", " ".join(words))
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert capsys.readouterr().out.splitlines() == offered


def test_completion_can_be_installed():
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).stdout
    assert "--install-completion" in shown
    assert "--show-completion" in shown
