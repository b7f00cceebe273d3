"""A command in a folder that holds a finished run: shown where it is the same, refused where it is another."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from subquad.core.checksums import sealed_json
from subquad.tools.cli.finished import ASKED, Claim
from subquad.tools.cli.folder import REMOVING
from subquad.tools.cli.main import app
from subquad.tools.compare import run as compare
from subquad.tools.compare.command import COMPARE
from subquad.tools.compare.settings import CompareSettings
from subquad.tools.inspect import run as inspect
from subquad.tools.inspect.command import INSPECT
from subquad.tools.inspect.settings import InspectSettings
from subquad.tools.needle import run as retrieval
from subquad.tools.needle.command import NEEDLE
from subquad.tools.needle.settings import NeedleSettings
from subquad.tools.plan import run as planning
from subquad.tools.plan.command import PLAN
from subquad.tools.plan.settings import PlanSettings
from subquad.tools.runs.cache import clear, run_cache
from subquad.tools.runs.jobs import Job
from tests.tools.report import sample, sample_inspect, sample_needle, sample_plan

run = CliRunner().invoke
OF = {
    "compare": (COMPARE, CompareSettings, sample.encoder, "Recommendation"),
    "plan": (PLAN, PlanSettings, sample_plan.report, "attention plan"),
    "inspect": (INSPECT, InspectSettings, sample_inspect.report, "what methods choose"),
    "needle": (NEEDLE, NeedleSettings, sample_needle.report, "retrieval from long prompts"),
}


@pytest.fixture(autouse=True)
def nothing_is_measured(monkeypatch):
    """A run that starts says so, and models are not looked for."""

    def begun(*_):
        raise compare.InputError("measured again")

    for module, name in ((compare, "measure"), (inspect, "measure"), (retrieval, "measure"), (planning, "make")):
        monkeypatch.setattr(module, name, begun)
        monkeypatch.setattr(module, "check_model", lambda name, device: None)


@pytest.fixture
def finished(put):
    """Write the report of a command with these settings into a folder; returns the folder."""

    def write(command, **settings):
        kind, of, made, _ = OF[command]
        folder = put(kind.file, made(), command)
        put(kind.file, Claim(kind, of(**settings), folder).marked(made()), command)
        return folder

    return write


def test_a_run_that_an_earlier_commit_finished_is_shown_again(tmp_path):
    """The folder holds what `bench` wrote before pieces of work became jobs; only its settings are compared."""
    report = tmp_path / "bench.json"
    shutil.copy(Path(__file__).with_name("records") / "bench" / report.name, report)
    before = report.read_bytes()
    done = run(app, ["bench", "--quick", "--lengths", "64,128", "--out", str(tmp_path)])
    assert done.exit_code == 0, (done.output, done.exception)
    assert "contains this run, finished on 2026-11-23" in done.output
    assert "i-clustered" in done.stdout
    assert report.read_bytes() == before
    assert "lengths" in refusal("bench", "--quick", "--lengths", "64,256", "--out", tmp_path)


def refusal(*words):
    done = run(app, list(map(str, words)))
    assert done.exit_code == 2, (done.output, done.exception)
    assert done.stderr.count("error:") == 1
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("command", OF)
def test_the_same_settings_show_the_report(command, finished):
    folder = finished(command, model="m", methods=("full", "local"))
    before = (folder / OF[command][0].file).read_bytes()
    done = run(app, [command, "m", "--methods", "full local", "--out", str(folder)])
    assert done.exit_code == 0, (done.output, done.exception)
    assert OF[command][3] in done.stdout
    assert done.stderr == f"{folder} contains this run, finished on 2026-03-14; --again runs it again\n"
    shown = run(app, [command, "m", "--methods", "full local", "--out", str(folder), "--json"])
    assert json.loads(shown.stdout) == json.loads(before)
    assert (folder / OF[command][0].file).read_bytes() == before


@pytest.mark.parametrize("command", OF)
def test_other_settings_are_refused_with_both_remedies(command, finished):
    folder = finished(command, model="m")
    said = refusal(command, "another", "--out", folder)
    assert f"{folder} contains the report of another run, made on 2026-03-14 with model 'm' (now 'another')" in said
    assert said.endswith("; give another folder with --out, or --again to replace it")
    assert "measured again" in refusal(command, "another", "--out", folder, "--again")
    assert "measured again" in refusal(command, "m", "--out", folder, "--again")


def test_five_settings_are_named_with_both_values_and_the_others_counted(finished):
    folder = finished("plan", model="m", methods=("full", *(f"local:window={n}" for n in range(9))), minutes=2.0)
    given = ("--seed", 1, "--minutes", 3, "--lengths", "64,128", "--shift", 2, "--column", "body")
    said = refusal("plan", "m", "--out", folder, *given)
    assert "--column 'text' (now 'body'), --shift 1.6 (now 2), --lengths not given (now 64,128)" in said
    assert "--methods 'full local:window=0 local:window=1 local:window=2 local:win…' (now not given)" in said
    assert "--minutes 2 (now 3) and 1 more; give another" in said


@pytest.mark.parametrize("command", OF)
def test_a_mistake_in_the_settings_is_said_before_anything_against_the_folder(command, finished, put, tmp_path):
    train = put("results.json", {"task": {}, "test": {}}, "train")
    for where in (["--out", finished(command, model="m")], ["--out", train, "--again"]):
        assert "did you mean 'clustered'" in refusal(command, "--methods", "clustred", *where)
        missing = refusal(command, "--text", tmp_path / "missing", *where)
        assert f"no file or folder at {tmp_path / 'missing'}" in missing


def test_a_missing_model_is_said_before_anything_against_the_folder(finished, monkeypatch):
    folder = finished("compare", model="m")
    monkeypatch.undo()
    assert "no model at /no/such: there is no such folder" in refusal("compare", "/no/such", "--out", folder)
    assert "no device 'tpu9'" in refusal("plan", "m", "--device", "tpu9", "--out", folder)


@pytest.mark.slow
def test_another_minimum_fidelity_reads_the_finished_run_anew(finished):
    folder = finished("compare", model="m")
    before = json.loads((folder / "report.json").read_text())
    for floor in ("0.2", "0.999999"):
        done = run(app, ["compare", "m", "--min-fidelity", floor, "--out", str(folder)])
        assert done.exit_code == 0, (done.output, done.exception)
        assert f"fidelity ≥ {floor}" in done.stdout
        after = json.loads((folder / "report.json").read_text())
        assert after["methods"] == before["methods"]
        assert after["settings"]["min_fidelity"] == float(floor)
        assert f"--min-fidelity {floor}" in after["command"]
        assert f"--min-fidelity {floor}" in after["recommendation"]["next"]
        assert f"≥ {floor}" in (folder / "report.md").read_text()
    assert "min-fidelity 2 must be" in refusal("compare", "m", "--min-fidelity", "2", "--out", folder)
    assert "--min-fidelity" not in refusal("compare", "m", "--min-fidelity", "0.3", "--column", "x", "--out", folder)


def test_a_report_of_an_earlier_version_counts_as_another(put):
    folder = put("report.json", sample.encoder())
    assert "made on 2026-03-14, which did not record its settings;" in refusal("compare", "--out", folder)


@pytest.mark.parametrize("again", [[], ["--again"]])
def test_reports_of_other_commands_and_other_files_are_never_replaced(again, put):
    plan = put("report.json", sample_plan.report(), "plan")
    assert "contains a run of subquad plan; give another folder" in refusal("compare", "--out", plan, *again)
    train = put("results.json", {"task": {}, "test": {}}, "train")
    assert "contains a run of subquad train; give another folder" in refusal("inspect", "--out", train, *again)
    mine = put("report.json", {"mine": 1}, "mine")
    assert "report.json is not a report of subquad; remove it" in refusal("plan", "--out", mine, *again)
    assert "line 1); remove it, or give another folder with --out" in refusal(
        "plan", "--out", put("report.json", "{", "broken"), *again
    )


def test_a_removal_that_was_interrupted_is_completed_first(put):
    folder = put("results.json", {"task": {}, "test": {}}, "train")
    for name in ("settings.toml", "curve.png"):
        put(name, "", "train")
    put(REMOVING, sealed_json({"names": ["results.json", "settings.toml"]}).decode(), "train")
    assert "measured again" in refusal("compare", "--out", folder)
    assert {path.name for path in folder.iterdir()} == {"curve.png"}


@pytest.mark.parametrize("again", [[], ["--again"]])
def test_nothing_is_written_beside_a_run_of_another_command_or_a_model(again, put):
    train = put("results.json", {"task": {}, "test": {}}, "train")
    assert "contains a run of subquad train; give another folder" in refusal("compare", "--out", train, *again)
    model = put("config.json", {"model_type": "bert"}, "model")
    assert "contains a model (config.json); give another folder" in refusal("compare", "--out", model, *again)
    assert [path.name for path in model.iterdir() if not path.name.startswith(".")] == ["config.json"]
    mine = put("bench.json", {"mine": 1}, "notes")  # nobody's report
    assert "measured again" in refusal("compare", "--out", mine, *again)


@pytest.mark.parametrize("again", [[], ["--again"]])
def test_a_plan_that_no_command_wrote_is_not_replaced(again, put):
    folder = put("plan.json", {}, "saved")
    said = refusal("plan", "--out", folder, *again)
    assert f"{folder} contains plan.json without a report of subquad plan; give another folder" in said
    assert "measured again" in refusal("compare", "--out", folder, *again)  # which writes none
    run_cache(folder, {"seed": 0}).get(Job("unit", lambda progress: 1))  # a plan that was interrupted at its end
    assert "measured again" in refusal("plan", "--out", folder, *again)


def test_a_run_that_was_cut_off_goes_on_in_place_of_its_report(finished):
    folder = finished("compare", model="m")
    (folder / ".progress").mkdir()
    (folder / ".progress" / "subquad.txt").write_text("")
    assert "measured again" in refusal("compare", "m", "--out", folder)


def test_an_interrupted_run_of_other_settings_is_not_replaced(tmp_path, monkeypatch):
    def stopped(settings, out, *_):
        run_cache(out, {"seed": settings.seed}).get(Job("unit", lambda progress: 1))
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(compare, "measure", stopped)
        assert run(app, ["compare", "m", "--out", str(tmp_path)]).exit_code == 130
    said = refusal("compare", "another", "--out", tmp_path)
    assert f"{tmp_path} contains an interrupted run with model 'm' (now 'another'); give another folder" in said
    assert said.endswith("or --again to replace it")
    for again in ([], ["--again"]):
        assert "an interrupted run of subquad compare; give another" in refusal("plan", "m", "--out", tmp_path, *again)
    assert "measured again" in refusal("compare", "m", "--out", tmp_path)
    assert "measured again" in refusal("compare", "another", "--out", tmp_path, "--again")
    clear(tmp_path)
    assert "measured again" in refusal("plan", "m", "--out", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_report_is_not_shown(finished):
    folder = finished("plan", model="m")
    report = json.loads((folder / "report.json").read_text())
    (folder / "report.json").write_text(json.dumps({**report, "lengths": [1]}))
    assert "is damaged: it has no table to show" in refusal("plan", "m", "--out", folder)


def test_inputs_that_changed_since_are_named(finished, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("text")
    os.utime(text, (1, 1))
    folder = finished("compare", text=(text,))
    words = ["compare", "--text", str(text), "--out", str(folder)]
    assert "has changed" not in run(app, words).stderr
    os.utime(text, (time.time() + 60, time.time() + 60))
    assert f"warning: {text} has changed since that run\n" in run(app, words).stderr


def test_the_folder_of_the_run_is_no_change_of_the_text_around_it(finished, tmp_path):
    folder = finished("compare", text=(tmp_path,))
    (tmp_path / "text.txt").write_text("text")
    for path in (tmp_path, *tmp_path.glob("*.txt")):
        os.utime(path, (1, 1))
    words = ["compare", "--text", str(tmp_path), "--out", str(folder)]
    done = run(app, words)
    assert (done.exit_code, "has changed" in done.stderr) == (0, False), done.output
    os.utime(tmp_path / "text.txt", (time.time() + 60, time.time() + 60))
    assert f"warning: {tmp_path} has changed since that run\n" in run(app, words).stderr


def test_a_folder_of_data_matters_with_a_task_only(tmp_path):
    def mark(**settings):
        return Claim(COMPARE, CompareSettings(**settings).as_used, tmp_path).asked

    assert mark() == mark(data_dir=tmp_path) != mark(task="sts", data_dir=tmp_path)
    assert mark(seed=1) != mark()  # what no option says counts as well


def test_a_benchmark_is_shown_again_and_measured_again(brief, tmp_path):
    assert run(app, brief).exit_code == 0
    first = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert ASKED in first
    done = run(app, brief)
    assert (done.exit_code, done.stderr.count("finished on")) == (0, 1)
    assert json.loads((tmp_path / "out" / "bench.json").read_text()) == first
    assert "give another folder with --out" in refusal(*brief, "--causal")
    assert run(app, [*brief, "--causal", "--again"]).exit_code == 0
    assert json.loads((tmp_path / "out" / "bench.json").read_text())["settings"]["causal"] is True


def test_a_finished_benchmark_is_compared_without_measuring(brief, tmp_path):
    assert run(app, brief).exit_code == 0
    old = (tmp_path / "out" / "bench.json").rename(tmp_path / "old.json")
    assert run(app, brief).exit_code == 0
    done = run(app, [*brief, "--compare", str(old)])
    assert done.exit_code == 0, (done.output, done.exception)
    assert "Against" in done.stdout
    assert "finished on" in done.stderr
    assert "changes" in json.loads((tmp_path / "out" / "bench.json").read_text())
