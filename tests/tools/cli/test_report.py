"""`subquad report`: a finished run of every command is shown again."""

import json
import webbrowser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from subquad.tools.cli.commands import kinds
from subquad.tools.cli.kinds import kind_of
from subquad.tools.cli.main import app
from subquad.tools.runs.records import to_plain
from tests.tools.report import sample, sample_bench, sample_inspect, sample_needle, sample_plan

RECORDS = Path(__file__).parents[1] / "report" / "records"  # of small runs, as their commands wrote them
run = CliRunner().invoke
SAMPLES = {
    "compare": ("report.json", sample.encoder, "Recommendation"),
    "plan": ("report.json", sample_plan.report, "attention plan"),
    "bench": ("bench.json", sample_bench.report, "forward, float32"),
    "inspect": ("results.json", sample_inspect.report, "what methods choose"),
    "needle": ("report.json", sample_needle.report, "retrieval from long prompts"),
}


def refusal(*words):
    done = run(app, ["report", *map(str, words)])
    assert done.exit_code == 2, (done.output, done.exception)
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("command", SAMPLES)
def test_a_report_is_shown_again(command, put):
    file, made, says = SAMPLES[command]
    folder = put(file, made())
    done = run(app, ["report", str(folder)])
    assert done.exit_code == 0, (done.output, done.exception)
    assert says in done.stdout
    assert done.stdout.splitlines()[-1] == f"subquad {command}: {folder / file}"
    assert json.loads(run(app, ["report", str(folder), "--json"]).stdout) == json.loads((folder / file).read_text())


@pytest.mark.parametrize(("command", "says"), [("train", "steps"), ("calibrate", "mean"), ("reproduce", "Linformer")])
def test_the_record_of_a_real_run_is_shown(command, says):
    done = run(app, ["report", str(RECORDS / f"{command}.json")])
    assert done.exit_code == 0, (done.output, done.exception)
    assert says in done.stdout
    assert done.stdout.splitlines()[-1].startswith(f"subquad {command}")


def test_json_of_an_adapter_is_the_record_that_calibrate_prints():
    path = RECORDS / "calibrate.json"
    printed = json.loads(run(app, ["report", str(path), "--json"]).stdout)
    assert printed == json.loads(path.read_text())["record"]


def test_a_folder_with_several_runs_asks_for_the_file_of_one(put):
    put("report.json", sample.encoder())
    folder = put("bench.json", sample_bench.report())
    assert "contains several runs, report.json (subquad compare) and bench.json (subquad bench)" in refusal(folder)
    assert run(app, ["report", str(folder / "bench.json")]).exit_code == 0


@pytest.mark.parametrize(("file", "content", "says"), [
    ("notes.txt", "", "contains no finished run of subquad"),
    ("report.json", {"mine": 1}, "contains no finished run of subquad"),
    ("plan.json", {}, "it contains a plan alone, which sq.load_plan reads"),
    ("settings.toml", "", "the same command resumes it"),
    ("report.json", "{", "is not JSON"),
    ("bench.json", {"kind": "subquad bench"}, "is damaged: it has no table to show"),
])  # fmt: skip
def test_a_folder_without_a_finished_run_is_one_line(file, content, says, put):
    assert says in refusal(put(file, content))


def test_a_run_that_was_cut_off_says_how_it_goes_on(tmp_path):
    (tmp_path / ".progress").mkdir()
    (tmp_path / ".progress" / "subquad.txt").write_text("")
    assert "a run was interrupted there, and the same command resumes it" in refusal(tmp_path)
    assert "no file or folder at" in refusal(tmp_path / "nowhere")


def test_open_shows_the_page_in_the_browser(put, monkeypatch):
    opened = []
    monkeypatch.setattr(webbrowser, "open", lambda address: opened.append(address) or True)
    folder = put("report.json", sample.encoder())
    assert "there is no report.html next to" in refusal(folder, "--open")
    put("report.html", "<p>")
    done = run(app, ["report", str(folder), "--open"])
    assert done.exit_code == 0
    assert done.stdout.splitlines()[-1] == f"subquad compare: {folder / 'report.html'}"
    assert opened == [(folder / "report.html").as_uri()]
    bench = put("bench.json", sample_bench.report(), "b")
    put("bench.md", "# Bench", "b")
    assert run(app, ["report", str(bench), "--open"]).exit_code == 0
    assert opened[1:] == [(bench / "bench.md").as_uri()]
    monkeypatch.setattr(webbrowser, "open", lambda address: False)
    assert f"no browser could be started; the page is {folder / 'report.html'}" in refusal(folder, "--open")


def test_every_kind_is_told_from_the_others():
    contents = {command: to_plain(made()) for command, (_, made, _) in SAMPLES.items()}
    contents["train"] = {"task": {}, "test": {}}
    contents["reproduce"] = {"experiment": {}, "results": {}}
    contents["calibrate"] = {"record": {"history": []}}
    assert {command: kind_of(content, kinds()).command for command, content in contents.items()} == {
        command: f"subquad {command}" for command in contents
    }
    assert kind_of({"record": {}}, kinds()) is None  # an adapter that calibrate did not make
    assert kind_of([], kinds()) is None
