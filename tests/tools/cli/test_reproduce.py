"""`subquad reproduce`: what it lists, writes and prints, and how it ends."""

import json

import pytest
from matplotlib.image import imread
from typer.testing import CliRunner

from subquad.research.papers import run as running
from subquad.research.papers.catalogue import NAMES, load
from subquad.tools.cli.main import app

run = CliRunner().invoke


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """An empty working folder, and no data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SUBQUAD_DATA", raising=False)


def test_without_a_name_all_are_listed():
    done = run(app, ["reproduce"])
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(NAMES)
    assert all(load(name).title in line for name, line in zip(NAMES, lines, strict=True))


def test_a_smoke_run_writes_its_results_and_prints_them(tmp_path):
    done = run(app, ["reproduce", "lha-latency", "--scale", "smoke"])
    assert done.exit_code == 0, done.output
    folder = tmp_path / "subquad-lha-latency-smoke"
    written = json.loads((folder / "results.json").read_text())
    assert written["experiment"]["command"] == "subquad reproduce lha-latency --scale smoke"
    page = (folder / "results.md").read_text()
    for plot in written["results"]["plots"]:
        assert f"({plot['file']}.png)" in page
        assert imread(folder / f"{plot['file']}.png").shape[1] >= 800
    for table in written["results"]["tables"]:
        assert table["title"] in " ".join(done.stdout.split())
    assert set(written["cells"]) == {
        cell.key for cell in load("lha-latency").cells(load("lha-latency").scales["smoke"])
    }


@pytest.mark.parametrize(("experiment", "change", "message"), [
    ("spectrum", "length=100000", "100,000 tokens are past the 64 positions"),
    ("spectrum", "length=-1", "a length of -1 leaves"),
    ("spectrum", "sequences=0", "does not run with --set sequences=0: "),
    ("spectrum", "texts=[]", "texts=[]"),
    ("lha-latency", "heads=-1", "does not run with --set heads=-1: num_heads=-1"),
    ("copy-heatmap", "seeds=[]", "leave no cell"),
    ("copy-heatmap", "lengths=" + "[" * 2000, "write a list as TOML does"),
])  # fmt: skip
def test_settings_that_cannot_run_are_one_line(experiment, change, message):
    done = run(app, ["reproduce", experiment, "--scale", "smoke", "--set", change])
    assert done.exit_code == 2, (done.output, done.exception)
    assert message in done.stderr
    assert done.stderr.count("error:") == 1


def test_a_mistake_of_ours_is_not_taken_for_one_of_the_settings(monkeypatch):
    def bug(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(running.JobCache, "compute", bug)
    assert isinstance(run(app, ["reproduce", "copy-heatmap", "--scale", "smoke"]).exception, ZeroDivisionError)


def test_a_finished_run_is_shown_and_runs_again_with_again_only(tmp_path):
    command, out = ["reproduce", "lha-latency", "--scale", "smoke", "--out", str(tmp_path / "out")], tmp_path / "out"
    first = run(app, command)
    before = (out / "results.json").read_bytes()
    shown = run(app, command)
    assert (shown.exit_code, shown.stdout) == (0, first.stdout)
    assert shown.stderr == f"{out} contains this run, finished; --again runs it again\n"
    assert (out / "results.json").read_bytes() == before
    other = [*command, "--set", "heads=1"]
    refused = run(app, other)
    assert refused.exit_code == 2
    assert "contains another run with settings.heads" in refused.stderr
    assert "; give another folder with --out, or --again to replace it" in refused.stderr
    assert run(app, [*other, "--set", "hedas=2", "--again"]).exit_code == 2
    assert (out / "results.json").read_bytes() == before  # mistakes replace nothing
    for words in (other, [*command, "--json"]):
        assert run(app, [*words, "--again"]).exit_code == 0
        settings = json.loads((out / "results.json").read_text())["experiment"]["settings"]
        assert (settings["heads"] == 1) == (words is other)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lha-latenzy"], "did you mean 'lha-latency'"),
        (["lha-latency", "--scale", "tiny"], "no scale 'tiny'; there are smoke, small, paper"),
        (["spectrum"], "needs the data in wikitext-2, movie_reviews: --data-dir FOLDER"),
        (["spectrum", "--data-dir", "."], "which is not there"),
        (["lha-latency", "--device", "tpu9"], "no device 'tpu9'"),
        (["lha-latency", "--out", "file"], "is a file; give a folder"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(tmp_path, arguments, message):
    (tmp_path / "file").write_text("")
    done = run(app, ["reproduce", *arguments])
    assert done.exit_code == 2, done.output
    assert message in done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("error:")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_interruption_ends_with_130_and_says_how_to_go_on(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(running.JobCache, "compute", interrupted)
    done = run(app, ["reproduce", "lha-latency", "--scale", "smoke"])
    assert done.exit_code == 130
    assert "the same command resumes from here" in done.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"task": {}, "test": {}}, "contains a run of subquad train; give another folder"),
        (
            {"mine": 1},
            "results.json is damaged: it has no results of subquad reproduce; remove this file",
        ),
    ],
)
def test_again_does_not_remove_results_that_are_not_its_own(tmp_path, content, message):
    command, out = ["reproduce", "lha-latency", "--scale", "smoke", "--out", str(tmp_path / "out")], tmp_path / "out"
    assert run(app, command).exit_code == 0
    (out / "notes.txt").write_text("mine")
    (out / "results.json").write_text(json.dumps(content))
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    refused = run(app, [*command, "--again"])
    assert refused.exit_code == 2
    assert message in " ".join(refused.stderr.split())
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
