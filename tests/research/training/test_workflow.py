"""`subquad train`: the folder of a run, and every end in one line."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import subquad.research.training.workflow
from subquad.core.errors import InputError
from subquad.research.papers.tasks.masked_copy import MaskedCopy
from subquad.research.training.model_card import training_card
from subquad.research.training.models import MaskedSymbolEncoder
from subquad.research.training.run import train
from subquad.research.training.settings import read_toml, settings_of
from subquad.research.training.tasks import TASKS
from subquad.research.training.workflow import training_folder, with_earlier_warmup
from subquad.tools.cli.main import app
from tests.research.training.small import QUICK, SIZES, TRAINING, small

pytest.importorskip("tensorboard")
ROOT = Path(__file__).parents[3]


def options(*overrides: str) -> list[str]:
    return [part for given in (*SIZES, *TRAINING, *QUICK, *overrides) for part in ("--set", given)]


def command(*args: str | Path) -> Any:
    result = CliRunner().invoke(app, ["train", *map(str, args)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def refusal(*args: str | Path) -> str:
    """The one line with which a run that cannot be is refused."""
    result = command(*args)
    assert result.exit_code == 2, result.output
    progress = re.compile(r"\d+/\d+ |reading the data$|step \d+ of \d+: loss ")
    lines = [line for line in result.stderr.splitlines() if line and not progress.match(line)]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    return lines[0]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "mine"
    assert command("masked-copy", "--method", "clustered:clusters=4", "--out", out, *options()).exit_code == 0
    return out


# ---------------------------------------------------------------------- what it leaves


def test_the_folder_has_all_of_the_run(finished: Path):
    assert {path.name for path in finished.iterdir() if not path.name.startswith("checkpoint-")} == {
        "README.md",
        "data.json",
        "model",
        "results.json",
        "settings.toml",
        "tensorboard",
    }
    record = json.loads((finished / "results.json").read_text())
    assert record["settings"]["model"]["method"] == "clustered:clusters=4"
    assert record["steps"] == 24
    assert 0.0 < record["test"]["accuracy"] < 1.0
    assert record["baselines"] == {"guess": {"accuracy": 0.1}}
    assert [entry["step"] for entry in record["history"] if "eval_accuracy" in entry] == [8, 16, 24]


def test_the_saved_model_is_the_one_that_was_measured(finished: Path):
    record = json.loads((finished / "results.json").read_text())
    model = MaskedSymbolEncoder.from_pretrained(finished / "model").eval()
    task = small().task
    splits = task.splits(None)
    batch = task.collate([splits.test[i] for i in range(512)])
    with torch.no_grad():
        scores = task.score(model(**batch), batch)
    assert task.metrics(scores)["accuracy"] == pytest.approx(record["test"]["accuracy"])


def test_the_card_of_a_run_on_a_gpu_trains_on_one_again(finished: Path):
    record = json.loads((finished / "results.json").read_text())
    assert "--device" not in training_card(record, "mine")
    record["machine"]["gpu"] = "a GPU"
    command = re.search(r"^subquad train (.*)$", training_card(record, "mine"), re.MULTILINE)
    assert command[1].endswith("-again --device cuda")


def test_the_card_tells_how_well_and_how_to_have_it_again(finished: Path, monkeypatch: pytest.MonkeyPatch):
    card, record = (finished / "README.md").read_text(), json.loads((finished / "results.json").read_text())
    assert f"| clustered:clusters=4 | {record['test']['accuracy']:.4f} |" in card
    assert "| guess | 0.1000 |" in card
    assert 'method = "clustered:clusters=4"' in card
    line = re.search(r"^subquad train (.*)$", card, re.MULTILINE)
    assert line is not None
    monkeypatch.chdir(finished.parent)
    assert command(*line[1].split()).exit_code == 0
    again = json.loads((finished.parent / "mine-again" / "results.json").read_text())
    assert (again["test"], again["settings"]) == (record["test"], record["settings"])
    code = re.search(r"```python\n(.*?)```", card, re.DOTALL)
    assert code is not None
    namespace: dict[str, Any] = {}
    exec(code[1], namespace)
    assert namespace["model"].config.method == "clustered:clusters=4"


def test_the_terminal_shows_the_figures_beside_the_baselines(tmp_path: Path):
    result = command("masked-copy", "--out", tmp_path / "run", *options("training.steps=4", "training.every=0"))
    assert " ".join(result.stdout.split()).startswith(MaskedCopy.summary)
    first_words = [line.split()[0] for line in result.stdout.splitlines()]
    assert "accuracy full guess 4" in " ".join(first_words)


def test_json_is_all_that_is_printed(tmp_path: Path):
    given = options("training.steps=4", "training.every=0")
    result = command("masked-copy", "--json", "--out", tmp_path / "run", *given)
    assert json.loads(result.stdout)["steps"] == 4


def test_a_file_names_the_task_and_the_options_win_over_it(tmp_path: Path):
    file = tmp_path / "mine.toml"
    file.write_text('task = "masked-copy"\n[model]\nmethod = "linear"\nlayers = 3\n')
    given = options("training.steps=2", "training.every=0", "model.layers=2")
    result = command("--config", file, "--method", "local:window=4", "--json", "--out", tmp_path / "run", *given)
    model = json.loads(result.stdout)["settings"]["model"]
    assert (model["method"], model["layers"]) == ("local:window=4", 2)


def test_without_a_task_it_lists_all():
    shown = command().stdout
    assert all(f"{name:<12} {task.summary}" in shown for name, task in TASKS.items())


@pytest.mark.parametrize("given", [("--again",), ("--set", "training.steps=3"), ("--out", "x"), ("--method", "full")])
def test_options_without_a_task_ask_for_one(given: tuple[str, ...]):
    wanted = f"no task is named; give subquad train TASK …, where `subquad train` lists all {len(TASKS)}"
    assert wanted in refusal(*given)


def test_the_help_shows_the_tables_by_their_names():
    shown = " ".join(command("--help").stdout.replace("│", " ").split())
    assert all(table in shown for table in ("[task]", "[model]", "[training]"))


def test_the_five_minutes_of_the_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    page = (ROOT / "docs" / "how-to" / "train.md").read_text("utf-8")
    section = page.partition("## Five minutes")[2].partition("\n## ")[0]
    (make, load, _), (line, _) = (re.findall(rf"```{kind}\n(.*?)```", section, re.DOTALL) for kind in ("python", "sh"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SUBQUAD_DATA", raising=False)
    exec(make, {})
    quick = (
        "--set",
        "task.length=64",
        "--set",
        "training.steps=2",
        "--set",
        "training.every=0",
        "--set",
        "model.width=32",
    )
    program, name, *args = shlex.split(line)
    assert (program, name) == ("subquad", "train")
    assert command(*args, *quick).exit_code == 0
    loaded: dict[str, Any] = {}
    exec(load, loaded)
    assert loaded["classify"].model.config.method == "i-clustered:clusters=25"
    assert set(loaded["classify"].model.config.id2label.values()) == {"argparse", "tarfile", "typing"}
    assert len(loaded["classes"]) == 2


# ---------------------------------------------------------------------- refusals


def test_mistakes_are_one_line(tmp_path: Path):
    out = ("--out", tmp_path / "run")
    assert "no task 'masked-coppy'; did you mean 'masked-copy'?" in refusal("masked-coppy", *out)
    assert "did you mean 'i-clustered'?" in refusal("masked-copy", "--method", "i-clusterd", *out)
    assert "did you mean 'steps'?" in refusal("masked-copy", "--set", "training.stepps=3", *out)
    assert "no settings at" in refusal("masked-copy", "--config", tmp_path / "no.toml", *out)
    assert not (tmp_path / "run").exists()


def test_data_that_is_missing_leaves_nothing_behind(tmp_path: Path):
    said = refusal("forecast", "--out", tmp_path / "run", "--data-dir", tmp_path / "nowhere")
    assert str(tmp_path / "nowhere") in said
    assert not (tmp_path / "run").exists()


def test_a_method_that_the_model_cannot_run_leaves_nothing_behind(tmp_path: Path):
    text = tmp_path / "mine.txt"
    text.write_text("to be or not to be " * 500)
    given = ("--set", f"task.files={text}", "--set", "task.length=32", "--method", "routing")
    assert "routing" in refusal("lm", *given, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_sizes_that_no_model_has_leave_nothing_behind(tmp_path: Path):
    out = ("--out", tmp_path / "run")
    said = refusal("masked-copy", *options("model.layers=2", "model.method=['full']"), *out)
    assert "method has 1 methods, but the model has more attention layers" in said
    width = refusal("masked-copy", *options("model.width=15"), *out)
    assert "model.width=15 is not a multiple of model.heads=2" in width
    assert not (tmp_path / "run").exists()


def test_a_failure_before_the_first_step_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fails(*args: Any) -> Any:
        raise IndexError("not the user's mistake")

    monkeypatch.setattr(MaskedCopy, "model", fails)
    with pytest.raises(IndexError):
        command("masked-copy", *options(), "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_folder_is_not_shared(finished: Path, tmp_path: Path):
    same = ("masked-copy", "--method", "clustered:clusters=4", *options(), "--out", finished)
    before = (finished / "results.json").stat().st_mtime_ns
    shown = command(*same, "--json")
    assert (shown.exit_code, shown.stderr) == (0, f"{finished} contains this run, finished; --again runs it again\n")
    assert json.loads(shown.stdout) == json.loads((finished / "results.json").read_text())
    assert (finished / "results.json").stat().st_mtime_ns == before
    said = refusal("masked-copy", "--method", "linear", *options("task.masked=0.3"), "--out", finished)
    assert "contains another run with task.masked 0.2 (now 0.3), model.method 'clustered:clusters=4' (now" in said
    assert said.endswith("; give another folder with --out, or --again to replace it")
    (tmp_path / "notes.txt").write_text("mine")
    assert "is not empty and contains no run" in refusal("masked-copy", *options(), "--out", tmp_path)
    assert "is a file" in refusal("masked-copy", *options(), "--out", tmp_path / "notes.txt")


def test_again_replaces_a_finished_run_once_the_new_one_begins(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    out, shorter = tmp_path / "run", options("training.steps=4", "training.every=0")
    shutil.copytree(finished, out)
    args = ("masked-copy", "--method", "linear", *shorter, "--out", out)
    assert "or --again to replace it" in refusal(*args)
    before = sorted(out.rglob("*"))

    def fails(*args: Any) -> Any:
        raise IndexError("before the first step")

    with monkeypatch.context() as patch:
        patch.setattr(MaskedCopy, "model", fails)
        with pytest.raises(IndexError):
            command(*args, "--again")
    assert sorted(out.rglob("*")) == before
    with monkeypatch.context() as patch:
        stop_at(1, KeyboardInterrupt(), patch)
        assert command(*args, "--again").exit_code == 130
    assert not (out / "results.json").exists()
    assert not list(out.glob("checkpoint-*"))
    assert command(*args, "--again").exit_code == 0
    record = json.loads((out / "results.json").read_text())
    assert (record["steps"], record["settings"]["model"]["method"]) == (4, "linear")


def test_again_removes_no_file_of_a_user(finished: Path, tmp_path: Path):
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    mine = {"curve.png", "checkpoint-notes.txt", "checkpoint-8-mine", "README.md.mine"}
    for name in mine:
        (out / name).write_text(name)
    (out / "checkpoint-500").mkdir()
    (out / "checkpoint-500" / "model.safetensors").write_text("mine")
    folder = training_folder(settings_of("masked-copy", read_toml(out / "settings.toml")), out, "cpu")
    with pytest.raises(InputError, match="contains checkpoint-500, which subquad train did not write"):
        folder.begin(again=True)
    (out / "checkpoint-500").rename(tmp_path / "mine")
    record = (out / "settings.toml").read_text()
    (out / "settings.toml").write_text('task = "masked-copy"\n')
    with pytest.raises(InputError, match=r"settings\.toml is not of subquad train: it has no 'model'; move it"):
        folder.begin(again=True)
    (out / "settings.toml").write_text(record)
    assert folder.begin(again=True)
    assert {path.name for path in out.iterdir()} == {"settings.toml", *mine}


def test_a_failure_at_the_beginning_clears_only_what_this_run_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    args = ("masked-copy", *options(), "--out", tmp_path / "run")
    with monkeypatch.context() as patch:
        stop_at(3, KeyboardInterrupt(), patch)  # before the first checkpoint
        assert command(*args).exit_code == 130
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with monkeypatch.context() as patch:
        stop_at(2, OSError(28, "No space left on device"), patch)
        refusal(*args)
    assert {path: path.read_bytes() for path in before} == before
    with monkeypatch.context() as patch:
        stop_at(2, OSError(28, "No space left on device"), patch)
        refusal(*args[:-1], tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_another_device_is_another_run_and_is_no_setting(finished: Path, tmp_path: Path):
    shutil.copytree(finished, out := tmp_path / "run")
    tables = read_toml(out / "settings.toml")
    assert "run" not in tables
    settings = settings_of("masked-copy", tables)
    assert training_folder(settings, out, "cpu:0").finished() is not None
    with pytest.raises(InputError, match=r"contains another run with run\.device 'cpu' \(now 'cuda'\); give another"):
        training_folder(settings, out, "cuda:1").finished()
    record = (out / "settings.toml").read_text()
    (out / "settings.toml").write_text(record.replace('[run]\ndevice = "cpu"\n', ""))
    assert training_folder(settings, out, "cuda").finished() is not None  # an earlier version did not record it
    assert (out / "settings.toml").read_text() != record


def test_damaged_results_are_named_and_their_remedy_works(finished: Path, tmp_path: Path):
    args = ("masked-copy", "--method", "clustered:clusters=4", *options(), "--out", tmp_path / "run")
    shutil.copytree(finished, tmp_path / "run")
    results = tmp_path / "run" / "results.json"
    for content in ("{", '{"settings": {}}'):
        results.write_text(content)
        assert f"{results} is damaged: it" in (said := refusal(*args))
        assert said.endswith("; remove this file; the same command then writes it again")
    results.unlink()
    assert command(*args).exit_code == 0
    again, before = (json.loads((at / "results.json").read_text()) for at in (tmp_path / "run", finished))
    assert (again["test"], again["best_step"]) == (before["test"], before["best_step"])


def test_settings_of_the_user_survive_a_run_that_is_refused(tmp_path: Path):
    (tmp_path / "settings.toml").write_text('task = "masked-copy"\n[training]\nseed = 7\n')
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    refusal("masked-copy", *options(), "--out", tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_it_ends_with_what_happened_and_starts_again_with_other_settings(tmp_path: Path):
    out = tmp_path / "run"
    given = ("training.learning_rate=1e30", "training.every=0", "training.optimizer=adam")
    said = refusal("masked-copy", *options(*given), "--out", out)
    assert "A lower training.learning_rate" in said
    assert not out.exists()  # no checkpoint that would be lost
    assert command("masked-copy", *options("training.steps=4", "training.every=0"), "--out", out).exit_code == 0


# ---------------------------------------------------------------------- going on


def stop_at(step: int, how: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*args: Any, progress: Any, **kwargs: Any) -> Any:
        def stopping(what: str, done: int, total: int) -> None:
            if done == step:
                raise how

        return train(*args, progress=stopping, **kwargs)

    monkeypatch.setattr(subquad.research.training.workflow, "train", stopped)


def test_it_says_early_what_it_does_and_how_much_of_the_texts_it_reads(tmp_path: Path):
    rows = "".join(f"{['bad', 'good'][i % 2]} {'film ' * i},{i % 2}\n" for i in range(40))
    (tmp_path / "mine.csv").write_text(f"text,label\n{rows}")
    tiny = ("model.width=8", "model.layers=1", "training.every=0", "training.warmup=0", "training.batch=4")
    given = (f"task.files={tmp_path / 'mine.csv'}", "training.steps=3", "model.heads=1", *tiny)
    asked = ("text", *(part for each in given for part in ("--set", each)))
    done = command(*asked, "--set", "task.length=100", "--out", tmp_path / "cut")
    reading, cut, first = done.stderr.splitlines()[:3]
    assert reading == "reading the data"
    # "good " and 20 times "film " are 105 bytes, "bad " and 20 times "film " are 104
    assert cut == "20 of 40 texts are cut to 100 bytes, the longest of 200: --set task.length=N reads more"
    assert re.fullmatch(r"step 1 of 3: loss \d\.\d{4}", first)
    assert "are cut" not in command(*asked, "--set", "task.length=200", "--out", tmp_path / "whole").stderr


def test_a_table_without_the_column_names_the_setting(tmp_path: Path):
    (tmp_path / "mine.csv").write_text("body,label\na,x\n")
    said = refusal("text", "--set", f"task.files={tmp_path / 'mine.csv'}", "--out", tmp_path / "run")
    assert "has no column 'text'; it has body, label; name the columns with --set task.text_column" in said


def test_an_interruption_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    args = ("masked-copy", *options(), "--out", tmp_path / "run")
    for step, says in ((3, "no checkpoint yet, so the same command starts again"), (13, "continues from step 8")):
        with monkeypatch.context() as patch:
            stop_at(step, KeyboardInterrupt(), patch)
            result = command(*args)
        assert result.exit_code == 130
        assert result.stderr.splitlines()[-1].endswith(says)
    said = refusal(*args, "--set", "training.seed=1", "--again")
    assert "contains another run, unfinished, with training.seed 0 (now 1); give another folder with --out" in said
    assert command(*args, "--again").exit_code == 0  # an unfinished run continues


def test_after_a_lack_of_memory_it_goes_on_in_more_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    args = ("masked-copy", "--out", tmp_path / "run")
    with monkeypatch.context() as patch:
        stop_at(13, MemoryError(), patch)
        assert "training.accumulate, which the run resumes with" in refusal(*args, *options())
    more = options("training.accumulate=4", "training.checkpoint_minutes=0", "training.evaluation_batch=128")
    assert command(*args, *more).exit_code == 0
    assert command("masked-copy", "--out", tmp_path / "whole", *options()).exit_code == 0
    parts, whole = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("run", "whole"))
    assert parts["settings"]["training"]["accumulate"] == 4
    assert parts["test"] == pytest.approx(whole["test"], rel=1e-3)


def test_a_disk_that_is_full_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    stop_at(13, OSError(28, "No space left on device", "/disk/run/x"), monkeypatch)
    said = refusal("masked-copy", *options(), "--out", tmp_path / "run")
    assert "cannot write /disk/run/x: No space left on device; free some space there" in said


def test_a_damaged_checkpoint_is_named_and_its_remedy_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    args = ("masked-copy", *options(), "--out", tmp_path / "run")
    with monkeypatch.context() as patch:
        stop_at(17, KeyboardInterrupt(), patch)
        command(*args)
    newest = tmp_path / "run" / "checkpoint-16"
    (newest / "model.safetensors").write_bytes(b"nothing")
    said = refusal(*args)
    assert f"{newest} is damaged (model.safetensors has 7 bytes instead of" in said
    assert "remove that folder to resume from checkpoint-8" in said
    shutil.rmtree(newest)
    assert command(*args).exit_code == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda rows: [*rows, ("more", "a")] * 2, "items to learn from instead of"),
        (lambda rows: [(text.upper(), label) for text, label in rows], "other items in train"),
        (lambda rows: [(text, {"a": "c"}.get(label, label)) for text, label in rows], "other items|other labels"),
    ],
)
def test_other_data_is_not_gone_on_with(change: Any, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file, rows = tmp_path / "mine.csv", [(f"text {i}", "ab"[i % 2]) for i in range(40)]

    def write(rows: Any) -> None:
        file.write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in rows))

    write(rows)
    sizes = [given for given in (*SIZES, *TRAINING) if "task.length" not in given]
    given = [part for one in (*sizes, f"task.files={file}", "task.length=16") for part in ("--set", one)]
    args = ("text", *given, "--out", tmp_path / "run")
    with monkeypatch.context() as patch:
        stop_at(13, KeyboardInterrupt(), patch)
        command(*args)
    write(change(rows))
    said = refusal(*args)
    assert "the data is not what" in said
    assert re.search(says, said)
    write(rows)
    assert command(*args).exit_code == 0


def test_a_longer_run_goes_on_as_if_it_had_been_asked_for(finished: Path, tmp_path: Path):
    longer = ("masked-copy", "--method", "clustered:clusters=4", *options("training.steps=40"))
    shutil.copytree(finished, tmp_path / "parts")
    assert command(*longer, "--out", tmp_path / "parts").exit_code == 0
    assert command(*longer, "--out", tmp_path / "whole").exit_code == 0
    parts, whole = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("parts", "whole"))
    assert (parts["test"], parts["steps"], parts["best_step"]) == (whole["test"], 40, whole["best_step"])
    losses = [[(e["step"], e["loss"]) for e in run["history"] if "loss" in e] for run in (parts, whole)]
    assert losses[0] == losses[1]


def test_a_longer_run_with_a_rate_that_falls_to_the_end_is_another(tmp_path: Path):
    given = ("training.schedule=linear", "training.every=0")
    assert command("masked-copy", *options(*given, "training.steps=4"), "--out", tmp_path / "run").exit_code == 0
    said = refusal("masked-copy", *options(*given, "training.steps=8"), "--out", tmp_path / "run")
    assert "whose learning rate (training.schedule='linear') falls towards that end" in said
    said = refusal("masked-copy", *options(*given, "training.steps=2"), "--out", tmp_path / "run")
    assert "contains another run with training.steps 4 (now 2)" in said


def test_a_longer_run_keeps_its_warm_up_unless_one_is_given(tmp_path: Path):
    (tmp_path / "mine.csv").write_text("text,label\n" + "good,a\nbad,b\n" * 20)
    sizes = ("model.width=8", "model.layers=1", "model.heads=1", "task.length=4", "training.batch=1")
    given = (f"task.files={tmp_path / 'mine.csv'}", *sizes, "training.schedule=constant")
    args = ("text", *(part for one in given for part in ("--set", one)), "--out", tmp_path / "run", "--json", "--set")
    records = [json.loads(command(*args, f"training.steps={steps}").stdout) for steps in (10, 61, 61)]
    assert [record["steps"] for record in records] == [10, 61, 61]
    assert [record["settings"]["training"]["warmup"] for record in records] == [1, 1, 1]
    said = refusal(*args, "training.steps=62", "--set", "training.warmup=60")
    assert "contains another run with training.steps 61 (now 62), training.warmup 1 (now 60)" in said
    for again, warmup in ((False, 1), (True, 60)):  # a run that is replaced has the default
        found = with_earlier_warmup(settings_of("text"), [], tmp_path / "run", "cpu", again)
        assert found.training.warmup == warmup


@pytest.mark.slow
def test_killed_by_a_signal_it_goes_on_to_the_same_weights(tmp_path: Path):
    given = options("training.steps=60", "training.every=3", "model.dropout=0.1")
    args = ["train", "masked-copy", "--method", "i-clustered:clusters=4,topk=4", *given]
    run = tmp_path / "killed"
    process = subprocess.Popen(
        [sys.executable, "-m", "subquad", *args, "--out", str(run)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.DEVNULL,
    )
    try:
        while not list(run.glob("checkpoint-*/seal.json")):
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(0.2)  # somewhere: in a step, in a validation, or in a checkpoint
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert process.returncode == -signal.SIGKILL
    assert not (run / "results.json").exists()
    assert command(*args[1:], "--out", run).exit_code == 0
    assert command(*args[1:], "--out", tmp_path / "whole").exit_code == 0
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("killed", "whole")]
    assert weights[0] == weights[1]
    results = [json.loads((tmp_path / name / "results.json").read_text()) for name in ("killed", "whole")]
    assert results[0]["test"] == results[1]["test"]
    assert [e["step"] for e in results[0]["history"]] == [e["step"] for e in results[1]["history"]]
