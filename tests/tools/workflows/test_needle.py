"""`subquad needle`: a whole run in a tiny decoder, and how it ends on bad input."""

import json

import pytest
from typer.testing import CliRunner

from subquad.tools.cli.main import app

run = CliRunner().invoke
HALVES = "clustered-tail:clusters=4,topk=4,cells=2,block=32,last=8"


@pytest.fixture
def words(model, text, tmp_path):
    """The words of a command on the tiny decoder, with a folder for its results."""

    def command(*more, decoder="llama"):
        fixed = ["needle", model(decoder), "--text", str(text), "--out", str(tmp_path / "out")]
        few = {"--lengths": "300,400", "--depths": "0,1", "--samples": "1", "--methods": f"{HALVES} local:window=16"}
        return [*fixed, *(word for name, value in few.items() if name not in more for word in (name, value)), *more]

    return command


def test_the_command_writes_its_files_prints_a_table_and_shows_it_again(words, tmp_path, painted):
    done = run(app, words("--oracle-length", "300"))
    assert done.exit_code == 0, done.output
    for word in ("niah_single", "cwe", "clustered-tail", "oracle-top", "300 tokens", "400 tokens", "report.md"):
        assert word in done.stdout
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"report.json", "report.md", "needle.png"}
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["command"].startswith("subquad needle ")
    assert "--oracle-length 300" in report["command"]
    assert [len(method["cells"]) for method in report["methods"]] == [16, 16, 16, 8]
    again = run(app, words("--oracle-length", "300"))
    assert again.exit_code == 0
    assert "contains this run" in again.stderr
    other = run(app, words("--oracle-length", "0"))
    assert other.exit_code == 2
    assert "--oracle-length 300 (now 0)" in other.stderr


def test_json_alone(words):
    done = run(app, words("--json", "--tasks", "niah_single", "--depths", "0.5", "--lengths", "300"))
    report = json.loads(done.stdout)
    assert report["kind"] == "subquad needle"
    assert report["settings"]["depths"] == [0.5]


def test_bad_input_is_one_line_and_exit_code_2(words, tmp_path):
    bad = {
        "needs a causal language model, such as demo-decoder": words(decoder="bert"),
        "no task 'niah_singles'; did you mean 'niah_single'?": words("--tasks", "niah_singles"),
        "no task 'passkey'; `subquad needle --help` lists all 7": words("--tasks", "passkey"),
        "--depths has 2, but a depth is from 0": words("--depths", "0,2"),
        "--depths '0,x' are not numbers": words("--depths", "0,x"),
        "length 'x' is not a whole number": words("--lengths", "x"),
        "--lengths 513 is past the 512 positions": words("--lengths", "300,513"),
        "30 tokens are too few for the task niah_single": words("--lengths", "30"),
        "--samples 0 must be at least 1": words("--samples", "0"),
        "did you mean 'local'": words("--methods", "locl"),
        "take one that can, such as clustered-tail": words("--methods", "smyrf"),
        "no file or folder at": words("--text", str(tmp_path / "missing.txt")),
        "no device 'tpu9'": words("--device", "tpu9"),
    }
    for message, command in bad.items():
        done = run(app, command)
        assert done.exit_code == 2, (message, done.output, done.exception)
        assert message in done.stderr, (message, done.stderr)
        assert done.stderr.strip().splitlines()[-1].startswith("error:")
    assert not (tmp_path / "out" / "report.json").exists()
