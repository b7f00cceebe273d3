"""`subquad tune`, end to end on runs of a second."""

import json
import time
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from subquad.core.errors import InputError
from subquad.research.tuning import run as running
from subquad.research.tuning import study_trial as trials
from subquad.research.tuning.record import record_of
from subquad.research.tuning.run import Tuning, tune
from subquad.research.tuning.schema import TriedTrial
from subquad.research.tuning.search import Base
from subquad.research.tuning.study import STARTUP, Study
from subquad.research.tuning.write import write_tune
from subquad.tools.cli.main import app
from subquad.tools.runs.executors import ProcessExecutor
from tests.research.training.small import QUICK, SIZES, Killed, read_overrides

pytest.importorskip("optuna", reason="optuna is not installed: pip install -c constraints.txt '.[tune]'")
GIVEN = (*SIZES, *QUICK, "training.steps=4", "training.batch=4", "training.every=2", "model.method=clustered")
SEARCHES = ("training.learning_rate=1e-3:1e-1:log", "method.clusters=2,4")


@pytest.fixture
def asked(tmp_path):
    return Tuning(Base("masked-copy", (read_overrides(GIVEN),)), SEARCHES, tmp_path / "out", trials=4)


@pytest.fixture
def made_up(monkeypatch):
    """Trials that are not trained: the figure is the learning rate; the numbers of those that ran."""
    ran = []

    def run(self, progress):
        ran.append(self.number)
        rate = self.settings.training.learning_rate
        return trials.Tried("finished", rate, {"accuracy": rate}, 4, 0.1)

    monkeypatch.setattr(trials.Trial, "run", run)
    return ran


def values(rows):
    return [row.values for row in rows]


def test_trials_are_trained_and_the_best_one_is_first(asked, tmp_path, monkeypatch):
    monkeypatch.delenv("SUBQUAD_DATA", raising=False)
    words = [word for text in GIVEN[:-1] for word in ("--set", text)]
    words += [word for text in SEARCHES for word in ("--search", text)]
    command = ["tune", "masked-copy", *words, "--method", "clustered", "--trials", "2", "--out", str(asked.out)]
    done = CliRunner().invoke(app, [*command, "--json"])
    assert done.exit_code == 0, (done.output, done.exception)
    record = json.loads(done.stdout)
    figures = [trial["value"] for trial in record["trials"]]
    assert figures == sorted(figures, reverse=True)
    assert {trial["state"] for trial in record["trials"]} == {"finished"}
    best = record["trials"][0]["values"]
    assert record["best"]["command"].startswith("subquad train masked-copy --set task.length=7 ")
    assert f"training.learning_rate={best['training.learning_rate']}" in record["best"]["command"]
    assert record["best"]["command"].endswith(f"--method clustered:clusters={best['method.clusters']}")
    assert record["best"]["command"].count("--method") == 1
    assert {path.name for path in asked.out.iterdir()} >= {"results.json", "results.md", "trials.png", "search.json"}
    assert {path.name for path in (asked.out / "trials").iterdir()} == {"0.json", "1.json"}
    assert "Train the best one" in (asked.out / "results.md").read_text()
    shown = CliRunner().invoke(app, ["report", str(asked.out)])
    assert "2 trials (2 finished); the highest validation accuracy is" in shown.stdout
    monkeypatch.setattr(trials.Trial, "run", None)
    again = CliRunner().invoke(app, command)  # nothing is trained
    assert again.exit_code == 0, (again.output, again.exception)
    assert again.stderr == f"{asked.out} contains this run, finished; --again runs it again\n"
    assert shown.stdout.splitlines()[:4] == again.stdout.splitlines()[:4]
    fewer = ["tune", "masked-copy", *words, "--trials", "1", "--out", str(asked.out), "--json"]
    assert json.loads(CliRunner().invoke(app, [*fewer, "--method", "clustered"]).stdout) == record
    refused = CliRunner().invoke(app, [*fewer, "--method", "clustered", "--seed", "1"])
    assert "another run with seed 0 (now 1); give another folder with --out, or --again to" in refused.stderr
    monkeypatch.setattr(trials.Trial, "run", lambda self, progress: trials.Tried("finished", 0.5))
    replaced = CliRunner().invoke(app, [*fewer, "--method", "clustered", "--seed", "1", "--again"])
    assert [trial["value"] for trial in json.loads(replaced.stdout)["trials"]] == [0.5]


def test_an_interrupted_search_ends_as_an_uninterrupted_one(asked, made_up, tmp_path, monkeypatch):
    whole = tune(replace(asked, out=tmp_path / "whole"))
    assert made_up == [0, 1, 2, 3]
    run = trials.Trial.run

    def killed(self, progress):
        if self.number == 2:
            raise Killed
        return run(self, progress)

    monkeypatch.setattr(trials.Trial, "run", killed)
    with pytest.raises(Killed):
        tune(asked)
    monkeypatch.setattr(trials.Trial, "run", run)
    made_up.clear()
    assert tune(asked) == whole
    assert made_up == [2, 3]


def test_a_trial_whose_end_the_study_was_not_told_does_not_run_again(asked, made_up, monkeypatch):
    def killed(*given):
        raise Killed

    monkeypatch.setattr(Study, "tell", killed)
    with pytest.raises(Killed):
        tune(asked)
    monkeypatch.undo()
    assert made_up == [0]
    monkeypatch.setattr(trials.Trial, "run", lambda self, progress: trials.Tried("finished", float(self.number)))
    assert [row.value for row in tune(asked)][1:] == [1.0, 2.0, 3.0]


def test_more_trials_add_to_a_finished_search(asked, made_up):
    first = tune(replace(asked, trials=2))
    assert tune(asked)[:2] == first
    assert made_up == [0, 1, 2, 3]
    assert len(tune(replace(asked, trials=1))) == 4  # fewer take none away


def test_few_points_are_tried_once_each(asked, made_up):
    few = replace(asked, searches=("training.warmup=0:1", "method.clusters=2,4"), trials=20)
    rows = tune(few)
    assert sorted(tuple(each.values()) for each in values(rows)) == [("0", "2"), ("0", "4"), ("1", "2"), ("1", "4")]
    assert len(tune(few)) == 4
    assert len(made_up) == 4


def test_a_bad_trial_is_pruned_at_a_validation(asked, monkeypatch):
    """The median is of trials that ran to their end; trials are made bad by their number."""

    def train(settings, folder, *, callbacks, **more):
        figure = 1.0 if int(folder.name) < STARTUP else 0.1
        (reports,) = callbacks
        for step in (2, 4):
            time.sleep(0.06)
            state = type("State", (), {"global_step": step})
            reports.on_evaluate(None, state, None, {"eval_accuracy": figure})
            reports.on_evaluate(None, state, None, {"test_accuracy": 5.0})  # is not told
        outcome = type("Outcome", (), {"validation": {"accuracy": figure}, "steps": 4, "seconds": 0.0})
        return outcome

    monkeypatch.setattr(trials, "train", train)
    rows = tune(replace(asked, trials=STARTUP + 1, prune=True))
    assert [row.state for row in rows] == ["finished"] * STARTUP + ["pruned"]
    assert (rows[-1].value, rows[-1].steps) == (0.1, 2)
    assert rows[-1].seconds >= 0.1
    rows = tune(replace(asked, trials=STARTUP + 1, out=asked.out.parent / "unpruned"))
    assert [row.state for row in rows] == ["finished"] * (STARTUP + 1)


def test_a_failed_trial_does_not_end_the_search_but_three_do(asked, monkeypatch):
    def some(self, progress):
        return trials.Tried("failed", reason="it diverged") if self.number in fail else trials.Tried("finished", 0.5)

    monkeypatch.setattr(trials.Trial, "run", some)
    fail = {1}
    assert [row.state for row in tune(asked)] == ["finished", "failed", "finished", "finished"]
    fail = {0, 1, 2, 3}
    with pytest.raises(InputError, match=r"^all 3 trials failed, the last one because it diverged$"):
        tune(replace(asked, out=asked.out.parent / "other"))


def test_what_cannot_be_trained_is_a_failed_trial(asked, tmp_path):
    settings = asked.base.at({"model.width": "15"})  # heads=2 do not divide it
    trial = trials.Trial(0, settings, tmp_path / "0", tmp_path, None, "cpu", False)
    tried = trial.run(lambda *said: None)
    assert tried.state == "failed"
    assert "15" in tried.reason


@pytest.mark.parametrize(
    ("given", "search", "reason"),
    [
        ("training.accumulate=2", "training.batch=2:4", "training: batch=3 does not divide into accumulate=2 passes"),
        ("model.dropout=0", "model.heads=2,3,4", "model.width=16 is not a multiple of model.heads=3"),
    ],
)
def test_values_that_do_not_go_together_are_a_failed_trial(asked, given, search, reason):
    name = search.partition("=")[0]
    fixed = [each for each in (*GIVEN, given) if not each.startswith(f"{name}=")]
    rows = tune(replace(asked, base=Base("masked-copy", (read_overrides(fixed),)), searches=(search,)))
    ends = {row.values[name]: (row.state, row.reason) for row in rows}
    assert ends == {"2": ("finished", None), "3": ("failed", reason), "4": ("finished", None)}


def test_a_first_trial_whose_values_do_not_go_together_is_reported_last(asked):
    fixed = [*(each for each in GIVEN if not each.startswith("training.batch=")), "training.accumulate=2"]
    odd = replace(asked, base=Base("masked-copy", (read_overrides(fixed),)), searches=("training.batch=2:4",))
    failed = TriedTrial(0, {"training.batch": "3"}, "failed", None, {}, 0, 0.0, "3 does not divide into 2")
    finished = TriedTrial(1, {"training.batch": "4"}, "finished", 0.5, {"accuracy": 0.5}, 4, 0.1, None)
    report = record_of(odd, [failed, finished], ["masked-copy"])
    assert [row.number for row in report.trials] == [1, 0]
    assert report.best["command"].endswith("--set training.batch=4")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trials": 0}, "trials 0 must be at least 1"),
        ({"seed": -1}, "seed -1 must be at least 0"),
        ({"device": "cuda:77"}, "no device 'cuda:77' here"),
        ({"searches": ()}, "nothing to search"),
        ({"prune": True, "searches": ("training.every=2,4",)}, "training.every is searched by"),
    ],
)
def test_what_is_refused_before_anything_is_written(asked, changes, message):
    with pytest.raises(InputError, match=f"^{message}"):
        tune(replace(asked, **changes))
    assert not asked.out.exists()


def test_pruning_needs_validations_on_the_way(asked):
    base = Base("masked-copy", (read_overrides([*SIZES, "training.steps=4"]),))
    with pytest.raises(InputError, match=r"^--prune looks at validations on the way, but training\.every=0 with"):
        tune(replace(asked, base=base, searches=SEARCHES[:1], prune=True))


def test_another_search_in_the_folder_is_named(asked, made_up):
    tune(asked)
    with pytest.raises(InputError, match=r"another run, unfinished, with search .*, prune off \(now on\);"):
        tune(replace(asked, searches=SEARCHES[:1], prune=True))
    (asked.out.parent / "thesis").mkdir()
    (asked.out.parent / "thesis" / "mine.txt").touch()
    with pytest.raises(InputError, match="is not empty and contains no run of subquad tune"):
        tune(replace(asked, out=asked.out.parent / "thesis"))


def test_another_device_or_other_data_is_another_search(asked, made_up, tmp_path):
    tune(asked)
    with pytest.raises(InputError, match=r"unfinished, with device 'cpu' \(now 'cuda'\); give another folder"):
        running.search_folder(replace(asked, device="cuda")).begin()
    running.search_folder(replace(asked, data=tmp_path)).begin()  # the task reads no data
    record = json.loads((asked.out / "search.json").read_text())
    del record["device"], record["data"]
    (asked.out / "search.json").write_text(json.dumps(record))
    running.search_folder(replace(asked, device="cuda")).begin()  # an earlier version did not record it
    texts = replace(asked, base=Base("text"), searches=("training.seed=0:9",), out=tmp_path / "texts")
    running.search_folder(replace(texts, data=tmp_path / "one")).begin()
    (texts.out / "trials.log").write_text("a trial")
    with pytest.raises(InputError, match=r"with data '.*one' \(now '.*two'\); give another folder"):
        running.search_folder(replace(texts, data=tmp_path / "two")).begin()


def test_again_removes_the_search_and_no_file_of_a_user(asked, made_up):
    rows = tune(replace(asked, trials=2))
    mine = {"mine.png", "trials.log.mine", "trials.txt"}
    for name in mine:
        (asked.out / name).write_text(name)
    write_tune(record_of(asked, rows, ["masked-copy"]), asked.out)
    assert {"trials.png", "by-method-clusters.png", "results.md"} <= {path.name for path in asked.out.iterdir()}
    photo = asked.out / "trials" / "photo.jpg"
    photo.write_text("mine")
    with pytest.raises(InputError, match=r"trials contains photo\.jpg, which subquad tune did not write"):
        running.search_folder(asked).begin(again=True)
    assert (asked.out / "trials" / "0.json").exists()
    photo.unlink()
    assert running.search_folder(asked).begin(again=True)
    assert {path.name for path in asked.out.iterdir()} == {"search.json", *mine}


def test_a_damaged_journal_is_named(asked, made_up):
    tune(replace(asked, trials=1))
    (asked.out / "trials.log").write_text("{}\n")
    with pytest.raises(InputError, match=r"trials\.log is damaged: Optuna cannot read it .*; give another folder with"):
        tune(asked)


def test_without_a_task_the_command_says_so():
    done = CliRunner().invoke(app, ["tune", "--search", SEARCHES[0]])
    assert done.exit_code == 2
    assert "no task is named; give subquad tune TASK" in done.output


@pytest.mark.slow
def test_trials_in_two_processes_are_all_kept(asked):
    with ProcessExecutor(2) as executor:
        rows = tune(replace(asked, trials=3), executor=executor)
    assert [row.number for row in rows] == [0, 1, 2]
    assert {row.state for row in rows} == {"finished"}
    again = tune(replace(asked, trials=3))  # in one process: they are kept
    assert again == rows


def test_the_trials_of_a_seed_are_always_the_same(asked, made_up, tmp_path):
    first, second, other = (
        values(tune(replace(asked, out=tmp_path / f"{i}", seed=seed))) for i, seed in enumerate((0, 0, 1))
    )
    assert first == second != other
    assert running.CLAIM == "search.json"
