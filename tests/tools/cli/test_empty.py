"""Empty words, which variables of a shell that are not set leave behind, are refused by every command."""

from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from subquad.core.errors import InputError
from subquad.research.papers.overrides import read_changes
from subquad.research.training.settings import read_overrides
from subquad.tools.bench.settings import BenchSettings
from subquad.tools.cli.main import app
from subquad.tools.plan.settings import PlanSettings
from subquad.tools.runs.executors.job_resources import read_resources

run = CliRunner().invoke
COMMANDS: Any = get_command(app)


def parameters() -> list:
    """Every option and argument that takes a value, of every command."""
    return [
        pytest.param(name, parameter, id=f"{name} {parameter.name}")
        for name, command in COMMANDS.commands.items()
        for parameter in command.params
        if not getattr(parameter, "is_flag", False)
    ]


@pytest.mark.parametrize("word", ["", " ", "\t\n"])
@pytest.mark.parametrize(("command", "parameter"), parameters())
def test_an_empty_word_is_refused_in_one_line(
    command: str, parameter: Any, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("A text that `--text ''` must not read.")
    for flag in parameter.opts if parameter.param_type_name == "option" else ["--"]:
        done = run(app, [command, flag, word])
        assert done.exit_code == 2, (done.output, done.exception)
        (line,) = done.stderr.splitlines()
        name = max(parameter.opts, key=len) if flag != "--" else parameter.name.upper()
        assert line.startswith(f"error: {name} is empty, "), line
        assert line.endswith("give a value or leave it out")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_one_empty_word_of_several_is_refused(tmp_path: Path):
    (tmp_path / "a.txt").write_text("A text.")
    done = run(app, ["compare", "--text", str(tmp_path / "a.txt"), "--text", "", "--out", str(tmp_path / "out")])
    assert done.exit_code == 2
    assert done.stderr.startswith("error: --text is empty, ")


@pytest.mark.parametrize("word", ["--resume", "--resume=x"])
@pytest.mark.parametrize(
    "command", [name for name, each in COMMANDS.commands.items() if "out" in {p.name for p in each.params}]
)
def test_resume_is_no_option_because_every_command_resumes(command: str, word: str):
    done = run(app, [command, word])
    assert (done.exit_code, done.stderr) == (
        2,
        "error: no option --resume; the same command without it resumes an interrupted run\n",
    )


@pytest.mark.parametrize("words", [["--text", "--resume"], ["--", "--resume"]])
def test_a_value_that_reads_resume_is_a_value(words: list[str], tmp_path: Path):
    done = run(app, ["compare", "--out", str(tmp_path / "out"), *words])
    (line,) = done.stderr.splitlines()
    assert "--resume" in line
    assert "no option" not in line


def test_the_current_folder_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    done = run(app, ["compare", "--text", ".", "--out", "out"])
    assert done.exit_code == 2
    assert "is empty, as a variable" not in done.stderr


@pytest.mark.parametrize("words", [["--lengths", "16,"], ["--lengths", ",16"], ["--passes", "forward,,forward"]])
def test_an_empty_place_of_a_list_is_refused(words: list[str], tmp_path: Path):
    done = run(app, ["bench", "--quick", *words, "--out", str(tmp_path / "out")])
    assert done.exit_code == 2, done.output
    assert done.stderr == f"error: {words[1]!r} has an empty place between its commas; give a value or leave it out\n"


def test_a_list_may_have_spaces():
    from subquad.tools.runs.options import options

    for settings in (BenchSettings, PlanSettings):
        assert options(settings)["lengths"].value(" 16, 32 64 ") == (16, 32, 64)


@pytest.mark.parametrize("text", ["model.method=", "model.plan= ", "task.name="])
def test_an_empty_setting_is_refused(text: str):
    with pytest.raises(InputError, match=r"has no value; .*''"):
        read_overrides([text])
    assert read_overrides([text + "''"]) != {}  # an empty text that is meant


def test_empty_settings_of_experiments_and_resources_are_refused():
    with pytest.raises(InputError, match="has no value"):
        read_changes(["steps="])
    with pytest.raises(InputError, match="cpus"):
        read_resources("cpus=", "cpu")
