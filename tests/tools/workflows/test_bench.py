"""`subquad bench`, end to end on tiny shapes. Nothing here depends on how long anything takes."""

import csv
import json
import os
import pickle
import sys
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from subquad.tools.bench import run as bench
from subquad.tools.bench.benched_plans import resolved
from subquad.tools.bench.report import report_of
from subquad.tools.bench.run import TIME, Bench, Timed, measure
from subquad.tools.bench.settings import QUICK, BenchSettings
from subquad.tools.bench.tables import markdown
from subquad.tools.cli.main import app
from subquad.tools.measure.noise import AGAIN
from subquad.tools.measure.resident import Peak
from subquad.tools.measure.timing import Effort
from subquad.tools.runs.executors import LocalExecutor
from subquad.tools.runs.machine import Use
from subquad.tools.runs.options import from_arguments
from tests.tools.workflows.bad_bench import bad_inputs

SMALL = ["--heads", "2", "--head-dim", "8", "--methods", "clustered:clusters=4 i-clustered:clusters=4,topk=4"]
NAMES = ["full", "clustered:clusters=4", "i-clustered:clusters=4,topk=4"]
FILES = {"bench.json", "bench.csv", "bench.md", "time-per-token.png", "memory-per-token.png", "speedup.png"}


@pytest.fixture(autouse=True)
def brief(monkeypatch):
    """Two rounds each, and memory without a process of its own."""
    monkeypatch.setattr(bench, "THOROUGH", Effort(seconds=0.0, least=2))
    monkeypatch.setattr(bench, "BRIEF", Effort(seconds=0.0, least=1))
    monkeypatch.setattr(bench, "extra_memory", lambda load, method, threads: Peak(load.length * 100, "made up"))


@pytest.fixture
def run(tmp_path):
    """Run the command with small heads; results in `tmp_path / "out"` if nothing else is said."""

    def runs(*words, out=tmp_path / "out"):
        lengths = [] if "--lengths" in words else ["--lengths", "16,32"]
        return CliRunner().invoke(app, ["bench", *SMALL, *lengths, *words, "--out", str(out)])

    return runs


@pytest.fixture
def written(tmp_path):
    return lambda: json.loads((tmp_path / "out" / "bench.json").read_text())


def test_a_whole_run(run, tmp_path, written, painted):
    done = run("--dtypes", "float32,bfloat16", "--batch", "2", "--seed", "3")
    assert done.exit_code == 0, (done.output, done.exception)
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES
    for title in ("forward, float32: batch 2, 2 heads of 8", "forward+backward, bfloat16"):
        assert title in done.stdout
    assert "48/48 done" in done.stderr
    report = written()
    assert [cell["method"] for cell in report["cells"]] == NAMES * 8
    for cell in report["cells"]:
        assert cell["status"] == "measured"
        assert 0 < cell["ms_low"] <= cell["ms"] <= cell["ms_high"]
        assert cell["repeats"] == 2 * bench.VISITS == 2 * len(cell["visits"])
        assert cell["us_per_token"] == pytest.approx(1e3 * cell["ms"] / (2 * cell["length"]))
        assert 0 < cell["speedup_low"] <= cell["speedup"] <= cell["speedup_high"]
        assert (cell["extra_bytes"], cell["bytes_per_token"]) == (100 * cell["length"], 50)
        assert ("growth" in cell) == (cell["length"] == 32)
    assert [cell["speedup"] for cell in report["cells"] if cell["method"] == "full"] == [1.0] * 8
    assert len(report["crossovers"]) == 2 * 4
    assert report["settings"]["seed"] == 3
    assert report["hardware"]["threads"] == str(torch.get_num_threads())
    assert report["methods"][NAMES[2]]["topk"] == 4
    rows = list(csv.DictReader((tmp_path / "out" / "bench.csv").read_text().splitlines()))
    assert [row["method"] for row in rows] == NAMES * 8


def test_visits_have_inputs_of_their_own(monkeypatch, tmp_path):
    drawn = []

    class Kept(bench.Calls):
        def __init__(self, load):
            super().__init__(load)
            drawn.append(self.inputs[0])

    monkeypatch.setattr(bench, "Calls", Kept)
    measure(BenchSettings(methods=("linear",), lengths=(16,), passes=("forward",), heads=1, head_dim=8), tmp_path)
    assert len(drawn) == bench.VISITS
    assert not any(torch.equal(drawn[0], other) for other in drawn[1:])


def test_gradients_do_not_add_up_from_call_to_call(monkeypatch):
    seen, of = [], bench.Calls.call_of

    def watched(self, method):
        call = of(self, method)
        return lambda: seen.append(self.inputs[0].grad is None) or call()

    monkeypatch.setattr(bench.Calls, "call_of", watched)
    settings = BenchSettings(methods=(NAMES[1],), lengths=(16,), passes=("forward+backward",), heads=1, head_dim=8)
    Bench(settings, [bench.Full(), bench.parse_method(NAMES[1])]).time(Bench(settings, []).loads[0], 0)
    assert len(seen) >= 2 + 2 * 2
    assert all(seen[2:])  # after one call of each that shows whether it can run


def test_methods_may_be_repeated_and_full_is_there_once(run, written):
    assert run("--methods", "full", "--quick").exit_code == 0
    assert [cell["method"] for cell in written()["cells"]] == NAMES * 2


def test_learned_methods_are_measured(run, written):
    done = run("--methods", "lha:buckets=0,bucket_size=8", "--lengths", "16,40")
    assert done.exit_code == 0, (done.output, done.exception)
    cells = [cell for cell in written()["cells"] if cell["method"].startswith("lha")]
    assert [(cell["status"], cell["length"]) for cell in cells] == [("measured", 16), ("measured", 40)] * 2


def test_causal_calls_beside_causal_sdpa_and_a_reason_for_what_cannot(run, written, monkeypatch):
    loads, made = [], bench.Calls
    monkeypatch.setattr(bench, "Calls", lambda load: loads.append(load) or made(load))
    done = run("--causal", "--methods", "smyrf:clusters=4 local:window=4", "--quick")
    assert done.exit_code == 0, (done.output, done.exception)
    assert {load.causal for load in loads} == {True}
    assert "causal, batch 1" in done.stdout
    report = written()
    assert report["settings"]["causal"] is True
    assert "--causal" in report["command"]
    states = {cell["method"]: cell.get("reason", "") for cell in report["cells"]}
    assert "does not support a causal mask" in states["smyrf:clusters=4"]
    assert states["full"] == states["local:window=4"] == ""
    assert run("--quick", "--again").exit_code == 0
    assert written()["settings"]["causal"] is False


def test_json_prints_the_results_alone(run, written):
    done = run("--json")
    assert json.loads(done.stdout) == written()


def test_quick_measures_less(run, written, tmp_path, monkeypatch):
    monkeypatch.setitem(QUICK, "lengths", (16, 24, 40))
    done = CliRunner().invoke(app, ["bench", *SMALL, "--quick", "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    report = written()
    assert {cell["passes"] for cell in report["cells"]} == {"forward"}
    assert [cell["length"] for cell in report["cells"][::3]] == [16, 24, 40]
    assert {cell["repeats"] for cell in report["cells"]} == {bench.VISITS}
    assert all("extra_bytes" not in cell for cell in report["cells"])
    assert any("quick" in note for note in report["notes"])
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES - {"memory-per-token.png"}


def test_what_is_said_goes_before_quick(run, written):
    assert run("--quick", "--passes", "forward+backward", "--lengths", "32 16").exit_code == 0
    assert [(cell["passes"], cell["length"]) for cell in written()["cells"][::3]] == [
        ("forward+backward", 16),
        ("forward+backward", 32),
    ]


def test_defaults_are_the_papers_setting():
    settings = resolved(BenchSettings())
    assert (settings.batch, settings.heads, settings.head_dim) == (1, 6, 64)
    assert settings.lengths == (256, 384, 512, 768, 1024, 2048, 4096, 8192, 16384)
    assert settings == resolved(from_arguments(BenchSettings, {"dtypes": "float32", "quick": False}, {}))


@pytest.mark.parametrize("number", ["1", "2"])
def test_threads_are_recorded_and_restored(run, written, number):
    before = torch.get_num_threads()
    assert run("--threads", number, "--quick").exit_code == 0
    assert written()["hardware"]["threads"] == number
    assert written()["settings"]["threads"] == int(number)
    assert torch.get_num_threads() == before


# ---------------------------------------------------------------------- noise


def made_up(tmp_path, **seconds):
    """A report of SDPA and one method at 16 tokens, with these seconds in the rounds of three visits."""
    settings = BenchSettings(methods=(NAMES[1],), lengths=(16,), passes=("forward",), heads=1, head_dim=8, quick=True)
    done = measure(settings, tmp_path)
    for visit in range(bench.VISITS):
        unit = done.results[TIME("float32/forward/16", visit)]
        assert set(unit.rows) == {"full", NAMES[1], AGAIN}
        unit.rows = {
            name: Timed(seconds[which][2 * visit : 2 * visit + 2])
            for name, which in (("full", "exact"), (NAMES[1], "own"), (AGAIN, "again"))
        }
        unit.use = Use(elapsed=1.0, others=seconds.get("others", 0.0))
    return report_of(done)


def test_sdpa_is_timed_against_itself_in_the_same_rounds(tmp_path):
    exact = [1.0] * 6
    report = made_up(tmp_path, exact=exact, again=[1.0, 1.0, 1.2, 1.2, 1.0, 1.0], own=[0.9] * 6)
    sdpa, method = report.cells
    assert sdpa.noise == pytest.approx(1.2)
    assert sdpa.verdict is None
    assert (method.verdict, method.speedup) == ("within the noise", pytest.approx(1 / 0.9))
    assert report.crossovers[0].state == "not reached"
    assert "within the noise" in markdown(report)
    quiet = made_up(tmp_path / "quiet", exact=exact, again=exact, own=[0.9] * 6)
    assert (quiet.cells[1].verdict, quiet.crossovers[0].state) == ("faster", "below the shortest")


def test_rounds_that_jump_between_two_values_are_noise_though_visits_agree(tmp_path):
    """A busy machine takes the processor away for 20 times as long as a call takes, in a third of the calls."""
    exact, again = [1.0, 1.0, 20.0, 1.0, 20.0, 1.0], [1.0, 20.0, 1.0, 20.0, 1.0, 1.0]
    sdpa, method = made_up(tmp_path, exact=exact, again=again, own=[15.0] * 6).cells
    assert sdpa.noise > 10
    assert method.verdict == "within the noise"


def test_one_visit_on_the_other_side_is_noise(tmp_path):
    exact = [1.0] * 6
    report = made_up(tmp_path, exact=exact, again=exact, own=[0.5, 0.5, 0.5, 0.5, 1.1, 1.1])
    assert report.cells[1].verdict == "within the noise"


def test_time_and_speedup_cannot_contradict_each_other(tmp_path):
    """Own median 1 s, SDPA's 9 s: 9 times faster by the medians, and slower in five rounds of six."""
    own, exact = [1.0, 1.0, 1.0, 1.0, 10.0, 10.0], [0.9, 0.9, 0.9, 9.0, 9.0, 9.0]
    sdpa, method = made_up(tmp_path, exact=exact, again=exact, own=own).cells
    assert method.speedup < 1
    assert method.ms > sdpa.ms
    assert sdpa.ms / method.ms == pytest.approx(method.speedup)
    assert method.us_per_token == pytest.approx(1e3 * method.ms / 16)


@pytest.mark.parametrize(("others", "busy"), [(0.0, False), (10.0, True)])
def test_what_others_used_of_the_machine_is_in_the_report(tmp_path, others, busy):
    report = made_up(tmp_path, exact=[1.0] * 6, again=[1.0] * 6, own=[0.9] * 6, others=others)
    assert report.noise.busy is busy
    assert report.noise.load.others == (1.0 if busy else 0.0)
    assert report.noise.load.cores == os.cpu_count()
    assert ("Repeat the command on an idle machine" in report.noise.says) is busy


# ---------------------------------------------------------------------- resume


def test_an_interrupted_run_resumes(run, written, tmp_path, monkeypatch):
    measured, time = [], Bench.time

    def interrupted(self, load, visit):
        if load.length == 32 and not measured[1:]:
            measured.append("interrupted")
            raise KeyboardInterrupt
        measured.append(load.length)
        return time(self, load, visit)

    monkeypatch.setattr(Bench, "time", interrupted)
    done = run("--passes", "forward")
    assert done.exit_code == 130
    assert "resumes from here" in done.stderr
    assert not (tmp_path / "out" / "bench.json").exists()
    assert run("--passes", "forward").exit_code == 0
    assert measured == [16, "interrupted", 32, 16, 32, 16, 32]  # every length once before the next visit
    assert "1 of 12 units come from an earlier, interrupted run." in written()["notes"]
    assert not (tmp_path / "out" / ".progress").exists()


def test_other_settings_do_not_resume(tmp_path, monkeypatch):
    settings = BenchSettings(methods=("clustered:clusters=4",), lengths=(16,), heads=1, head_dim=8, quick=True)
    assert measure(settings, tmp_path).resumed == 0
    assert measure(settings, tmp_path).resumed == 2 * bench.VISITS
    assert measure(replace(settings, methods=("clustered:clusters=4,seed=0",)), tmp_path).resumed == 2 * bench.VISITS
    for other in ({"seed": 1}, {"heads": 2}, {"quick": False}, {"methods": ("clustered:clusters=5",)}):
        assert measure(replace(settings, **other), tmp_path).resumed == 0


# ---------------------------------------------------------------------- what is not run


def test_a_call_that_is_predicted_to_take_too_long_is_not_run(run, written, monkeypatch):
    monkeypatch.setattr(
        bench, "predicted", lambda method, seconds, growth: 71.4 * growth if method.name == "full" else 0
    )
    processes = []
    monkeypatch.setattr(
        bench, "extra_memory", lambda load, method, threads: processes.append((method, load.length)) or Peak(1, "")
    )
    done = run("--passes", "forward", "--call-limit", "142")
    assert ("full", 16) in processes
    assert ("full", 32) not in processes
    assert "full at 32 tokens: not run: predicted 143 s per call" in done.stdout
    cells = {(cell["method"], cell["length"]): cell for cell in written()["cells"]}
    exact = cells["full", 32]
    assert (exact["status"], exact["reason"]) == ("not run", "predicted 143 s per call")
    assert "ms" not in exact
    assert "extra_bytes" not in exact
    assert cells["full", 16]["ms"] > 0
    assert cells[NAMES[1], 32]["ms"] > 0
    assert "speedup" not in cells[NAMES[1], 32]
    assert cells[NAMES[1], 16]["speedup"] > 0
    assert written()["crossovers"][0]["longest"] == 16
    assert run("--passes", "forward", "--call-limit", "144", "--again").exit_code == 0
    assert {cell["status"] for cell in written()["cells"]} == {"measured"}


def test_a_long_first_length_is_predicted_from_a_shorter_call(run, written, monkeypatch):
    monkeypatch.setattr(bench, "PROBE", 16)
    asked = []
    monkeypatch.setattr(bench, "predicted", lambda method, seconds, growth: asked.append((seconds, growth)) or 99.0)
    assert run("--lengths", "64", "--passes", "forward").exit_code == 0
    assert {cell.get("reason") for cell in written()["cells"]} == {"predicted 99 s per call"}
    assert [growth for _, growth in asked] == [4.0] * 3
    assert all(seconds > 0 for seconds, _ in asked)


def test_a_method_left_out_is_predicted_from_where_it_last_ran(monkeypatch):
    growths = []

    def predicted(method, seconds, growth):
        growths.append(growth)
        return 0.0 if growth == 2 and len(growths) == 1 else 99.0

    monkeypatch.setattr(bench, "predicted", predicted)
    settings = BenchSettings(methods=("full",), lengths=(16, 32, 64, 128), passes=("forward",), heads=1, head_dim=8)
    made = Bench(settings, [bench.Full()])
    for load in made.loads:
        made.results[TIME(load.key, 0)] = made.time(load, 0)
    assert growths == [2.0, 2.0, 4.0]
    assert [result.rows["full"].seconds is not None for result in made.results.all(TIME)] == [True, True, False, False]


@pytest.mark.parametrize(("error", "reason"), [
    (ValueError("it is causal;\nuse 'full'"), "it is causal; use 'full'"),
    (TypeError("no int8"), "no int8"),
    (torch.OutOfMemoryError("CUDA out of memory"), "out of memory"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "out of memory"),
    (MemoryError(), "out of memory"),
])  # fmt: skip
def test_what_a_method_refuses_is_a_reason(error, reason, monkeypatch, tmp_path):
    of = bench.Calls.call_of

    def refusing(self, method):
        def refuse():
            raise error

        return refuse if method == NAMES[1] else of(self, method)

    monkeypatch.setattr(bench.Calls, "call_of", refusing)
    settings = BenchSettings(methods=(NAMES[1],), lengths=(16,), passes=("forward",), heads=1, head_dim=8)
    exact, refused = report_of(measure(settings, tmp_path)).cells
    assert (refused.status, refused.reason) == ("not run", reason)
    assert exact.status == "measured"


@pytest.mark.parametrize("error", [ZeroDivisionError(), RuntimeError("a bug"), AssertionError()])
def test_a_mistake_of_ours_is_not_hidden(error, monkeypatch, tmp_path):
    def broken(self, method):
        def call():
            raise error

        return call

    monkeypatch.setattr(bench.Calls, "call_of", broken)
    with pytest.raises(type(error)):
        measure(BenchSettings(lengths=(16,), quick=True), tmp_path)


# ---------------------------------------------------------------------- an earlier run


def test_compare_tells_what_changed(run, written, tmp_path):
    assert run("--quick").exit_code == 0
    old = written()
    for cell in old["cells"]:  # so far away that no noise reaches it
        factor = {NAMES[1]: 1e-6, NAMES[2]: 1e6}.get(cell["method"], 1.0)
        cell |= {name: factor * cell[name] for name in ("speedup", "speedup_low", "speedup_high")}
        cell["visits"] = [factor * visit for visit in cell["visits"]]
    old["cells"][-1]["length"] = 64
    old["hardware"]["cores"] = "1024"
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "bench.json").write_text(json.dumps(old))
    for path in (tmp_path / "old" / "bench.json", tmp_path / "old"):
        done = run("--quick", "--compare", str(path))
        assert done.exit_code == 0, done.output
        assert "2 faster; 1 slower; 0 within the noise" in done.stdout.replace("\n", " ")
        verdicts = {(c["method"], c["length"]): c["verdict"] for c in written()["changes"]["cells"]}
        assert verdicts[NAMES[1], 16] == verdicts[NAMES[1], 32] == "faster"
        assert verdicts[NAMES[2], 16] == "slower"
        assert written()["changes"]["only_old"] == [f"{NAMES[2]}, float32, forward, 64 tokens"]
        assert f"hardware cores: 1024 then, {os.cpu_count()} now" in written()["changes"]["notes"]


def test_bad_input_is_one_line_and_exit_code_2(run, tmp_path, monkeypatch):
    monkeypatch.setattr(Bench, "time", lambda *_: pytest.fail("must be told before anything is measured"))
    for message, words in bad_inputs(tmp_path):
        done = CliRunner().invoke(app, ["bench", *SMALL, "--out", str(tmp_path / "out"), *words])
        assert done.exit_code == 2, (message, done.output, done.exception)
        assert message in done.stderr, (message, done.stderr)
        assert done.stderr.strip().splitlines()[-1].startswith("error:"), done.stderr
        assert done.stderr.count("error:") == 1
        assert not list((tmp_path / "out").glob("bench*"))


def test_no_methods_at_all(tmp_path):
    done = CliRunner().invoke(app, ["bench", "--methods", " ", "--out", str(tmp_path)])
    assert (done.exit_code, "--methods is empty" in done.stderr) == (2, True)


def test_without_matplotlib_the_remedy_is_told(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "subquad.tools.bench.write", None)
    done = run()
    assert done.exit_code == 2
    assert "pip install -c constraints.txt '.[report]'" in done.stderr


def test_a_length_whose_inputs_do_not_fit_is_a_reason(run, written, monkeypatch):
    made = bench.Calls

    def calls(load):
        if load.length == 32:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")
        return made(load)

    monkeypatch.setattr(bench, "Calls", calls)
    assert run("--quick").exit_code == 0
    reasons = {(cell["length"], cell.get("reason")) for cell in written()["cells"]}
    assert reasons == {(16, None), (32, "out of memory")}


@pytest.mark.parametrize(
    ("option", "message"),
    [(("--seed", "-1"), "seed -1 must be at least 0"), (("--device", "mps"), "only cpu and cuda")],
)
def test_seeds_and_devices_that_cannot_be_are_one_line(run, option, message):
    done = run("--quick", *option)
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())


class Elsewhere(LocalExecutor):
    """Runs a pickled copy of each unit, as a worker does; the key of each with those before it."""

    description = "2 processes"

    def __init__(self):
        self.after = {}

    def run(self, works, told):
        for work in works:
            self.after[work.key] = (work.timed, set(work.after))
            yield work, pickle.loads(pickle.dumps(work.run))(lambda *said: None)


def test_units_run_from_copies_after_those_that_they_read(tmp_path):
    executor = Elsewhere()
    settings = BenchSettings(methods=(NAMES[1],), lengths=(16, 32), passes=("forward",), heads=1, head_dim=8)
    found = measure(settings, tmp_path, executor=executor)
    first, second = "time/float32/forward/16/", "time/float32/forward/32/"
    assert executor.after[f"{first}0"] == (True, set())
    assert executor.after[f"{second}0"] == (True, {f"{first}0"})
    assert executor.after[f"{second}2"] == (True, {f"{second}0", f"{second}1"})
    memory = {key: of for key, of in executor.after.items() if key.startswith("memory")}
    assert len(memory) == 4
    assert memory["memory/float32/forward/16/full"] == (False, {f"{first}{visit}" for visit in range(bench.VISITS)})
    assert any("Run by 2 processes" in note for note in report_of(found).notes)


def test_the_sheet_of_a_gpu_is_measured_here():
    done = CliRunner().invoke(app, ["bench", "--gpu-sheet", "--executor", "processes", "--workers", "2"])
    assert done.exit_code == 2
    assert "--gpu-sheet measures the GPU in this process, and --executor (2 processes) is given" in done.output
