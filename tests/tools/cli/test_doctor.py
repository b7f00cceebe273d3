"""`subquad doctor --measure`, on made-up timings and on tiny inputs, and what `subquad doctor` shows of it."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import subquad as sq
from subquad.core.errors import InputError
from subquad.kernels import dispatch, triton
from subquad.methods.core.measured_crossovers import MeasuredCrossover, read_all
from subquad.tools.cli.main import app
from subquad.tools.doctor import measure_crossovers as doctor
from subquad.tools.doctor.settings import CrossoverSettings
from subquad.tools.measure.noise import MachineLoad
from subquad.tools.measure.timing import Effort

TINY = ["--lengths", "16,32", "--dtypes", "float32", "--heads", "2", "--head-dim", "8"]
TWO = ["--methods", "clustered:clusters=4 smyrf:cluster_size=4"]


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path))
    return tmp_path / "crossovers.json"


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(doctor, "EFFORT", Effort(seconds=0.0, least=2))
    return lambda *words: CliRunner().invoke(app, ["doctor", *words], env={"COLUMNS": "150"})


@pytest.fixture
def timed(monkeypatch):
    """Measure with made-up seconds of each call; returns the crossovers and the calls at each length."""

    class Named:
        def __init__(self, load):
            self.load = load

        def call_of(self, name):
            return name, self.load

    def measured(seconds, **settings):
        visits = []

        def rounds(calls, effort, device):
            visits.append((next(load for _, load in calls.values()), set(calls)))
            return {name: [seconds(name, load)] * 6 for name, load in calls.values()}

        monkeypatch.setattr(doctor, "Calls", Named)
        monkeypatch.setattr(doctor, "until_steady", rounds)
        settings = {"methods": ("clustered",), "dtypes": ("float32",), "masks": ("none",)} | settings
        return doctor.measure(CrossoverSettings(**settings)), visits

    return measured


def linear(name, load, sdpa=2.0, kernel=1.0):
    """SDPA takes twice the kernel's time, and the method is as fast as the kernel at 700.5 tokens."""
    n = load.length
    return 1e-8 * {"full": sdpa * n * n, "full:kernel=subquad": kernel * n * n}.get(name, 700.5 * n)


# ---------------------------------------------------------------------- the measurement


def test_the_crossover_is_against_the_faster_exact_attention(timed):
    (found,), visits = timed(linear)
    assert (found.state, found.method, found.dtype, found.causal) == ("at", "clustered", "float32", False)
    assert found.tokens == pytest.approx(700.5)
    assert found.start == 701
    (found,), _ = timed(lambda *call: linear(*call, sdpa=0.5))
    assert found.tokens == pytest.approx(1401)
    assert visits[0][1] == {"full", "full:kernel=subquad", "clustered"}


def test_it_ends_where_two_lengths_are_clearly_faster(timed):
    (found,), visits = timed(linear)
    assert [load.length for load, _ in visits] == [128, 181, 256, 362, 512, 724, 1024, 1448]
    assert (found.shortest, found.longest) == (128, 1448)


def test_the_slower_exact_attention_is_dropped_where_calls_are_long(timed):
    _, visits = timed(lambda name, load: 10 * linear(name, load))
    lengths = [load.length for load, calls in visits if "full" in calls]
    assert lengths == [128, 181, 256]  # where it takes 2e-7·256² s, more than 0.01 s


def test_a_method_that_is_never_faster_is_measured_up_to_the_longest_length(timed):
    (found,), visits = timed(lambda name, load: linear(name, load) * (100 if name == "clustered" else 1))
    assert (found.state, found.tokens, found.start, found.longest) == ("not reached", None, None, 8192)
    assert len(visits) == 13
    (found,), _ = timed(lambda name, load: linear(name, load) / (100 if name == "clustered" else 1))
    assert (found.state, found.start) == ("below the shortest", 128)


def test_a_tie_is_no_crossover(timed):
    def equal_until_1024(name, load):
        return linear("full:kernel=subquad" if load.length <= 1024 else name, load)

    (found,), _ = timed(equal_until_1024)
    assert (found.state, found.tokens) == ("at or below", 1448.0)


def test_each_dtype_and_mask_is_measured_for_the_methods_that_take_it(timed):
    methods = ("clustered", "smyrf", "clustered:clusters=100")  # the last one is the first
    found, visits = timed(linear, methods=methods, dtypes=("bfloat16", "float32"), masks=("none", "causal"))
    of = [(each.dtype, each.causal, each.method) for each in found]
    assert of == [
        ("bfloat16", False, "clustered"),
        ("bfloat16", False, "smyrf"),
        ("bfloat16", True, "clustered"),
        ("float32", False, "clustered"),
        ("float32", False, "smyrf"),
        ("float32", True, "clustered"),
    ]
    assert all("smyrf" not in calls for load, calls in visits if load.causal)
    assert {load.causal for load, _ in visits} == {True, False}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"masks": ("casual",)}, "no mask 'casual'; did you mean 'causal'"),
        ({"dtypes": ("float",)}, "no dtype 'float'"),
        ({"methods": ("clusterd",)}, "no method 'clusterd'"),
        ({"methods": ()}, "--methods names none"),
        ({"masks": ()}, "no mask is named; there are none, causal"),
        ({"methods": ("smyrf", "sinkhorn"), "masks": ("causal",)}, "none of these methods supports a causal mask"),
        ({"lengths": (0,)}, "length 0 must be at least 1"),
        ({"device": "mps"}, "cannot time device 'mps'"),
    ],
)
def test_settings_that_do_not_work_are_refused(settings, message):
    with pytest.raises(InputError) as error:
        doctor.measure(CrossoverSettings(**settings))
    assert message in str(error.value)


# ---------------------------------------------------------------------- the command


def test_it_measures_stores_and_shows(run, cache):
    done = run("--measure", *TWO, *TINY)
    assert done.exit_code == 0, (done.output, done.exception)
    assert f"Stored: {cache}, for by-length:" in done.stdout
    stored = read_all()
    of = [(each.method, each.causal, each.heads, each.head_dim) for each in stored]
    assert of == [
        ("clustered:clusters=4", False, 2, 8),
        ("smyrf:cluster_size=4", False, 2, 8),
        ("clustered:clusters=4", True, 2, 8),
    ]
    for printed in (done.stdout, run().stdout):
        lines = [line.split() for line in printed.splitlines()]
        assert [line[:5] for line in lines if line[:1] == ["smyrf:cluster_size=4"]] == [
            ["smyrf:cluster_size=4", "float32", "2", "of", "8"]
        ]
        assert next(line for line in lines if line[:1] == ["smyrf:cluster_size=4"])[-1] == "–"
    shown = json.loads(run("--json").stdout)
    assert [MeasuredCrossover(**each) for each in shown["crossovers"]] == stored
    assert "no crossovers" not in shown


def test_json_is_printed_alone(run, cache):
    done = run("--measure", "--json", *TWO, *TINY, "--masks", "none")
    record = json.loads(done.stdout)
    assert record["file"] == str(cache)
    assert [MeasuredCrossover(**each) for each in record["crossovers"]] == read_all()
    assert len(record["crossovers"]) == 2


def test_by_length_starts_where_the_command_measured(run, timed, monkeypatch):
    found, _ = timed(linear, methods=("clustered-tail",))
    monkeypatch.setattr(doctor, "measure", lambda settings, progress: found)
    assert run("--measure", "--methods", "clustered-tail").exit_code == 0
    text = "by-length:steps=0:full:kernel=subquad+measured:clustered-tail"
    assert str(sq.parse_method(text)) == text.replace("measured", "701")
    assert "701" in run().stdout


@pytest.mark.parametrize(
    ("state", "tokens", "shown"),
    [
        ("at", 2500.2, "2,501"),
        ("at or below", 1024.0, "≤1,024"),
        ("below the shortest", None, "≤128"),
        ("not reached", None, "not up to 8,192"),
    ],
)
def test_how_a_crossover_is_written(run, timed, monkeypatch, state, tokens, shown):
    (found,), _ = timed(linear)
    found = MeasuredCrossover(**(vars(found) | {"state": state, "tokens": tokens, "longest": 8192}))
    monkeypatch.setattr(doctor, "measure", lambda settings, progress: [found])
    printed = run("--measure").stdout
    assert next(line for line in printed.splitlines() if line.startswith("clustered")).split("64")[1].strip() == (
        f"{shown}       –"
    )


def test_without_a_measurement_the_command_is_named(run, cache):
    done = run()
    assert "`subquad doctor --measure` measures them" in " ".join(done.stdout.split())
    shown = json.loads(run("--json").stdout)
    assert shown["crossovers"] == []
    assert "subquad doctor --measure" in shown["no crossovers"]
    assert not cache.exists()


def test_a_damaged_file_is_shown_and_measured_again(run, cache):
    cache.write_text("{")
    done = run()
    assert done.exit_code == 0
    assert f"{cache} is damaged" in done.stdout
    assert run("--measure", *TWO, *TINY).exit_code == 0
    assert len(read_all()) == 3


def test_a_cache_that_cannot_be_written_is_refused_before_anything_is_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "measure", None)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path / "file"))
    done = CliRunner().invoke(app, ["doctor", "--measure"])
    assert (done.exit_code, done.exception.__class__) == (2, SystemExit)
    assert "a file is in its place" in done.stderr


@pytest.mark.parametrize("option", [("--methods", "clustered"), ("--head-dim", "32"), ("--dtypes", "float32")])
def test_an_option_of_the_measurement_without_it_is_refused(run, option):
    done = run(*option)
    assert done.exit_code == 2
    assert f"error: {option[0]} is an option of --measure; give both or none of them" in done.stderr


# ---------------------------------------------------------------------- backends that must run


@pytest.fixture
def without_kernels(monkeypatch):
    monkeypatch.setitem(dispatch._BACKENDS, "cpu", lambda: "the library was not built; install g++")


def test_a_backend_that_runs_is_enough(run):
    plain = run("--json")
    done = run("--require", "reference", "--require", "reference", "--json")
    assert (done.exit_code, done.stdout, done.stderr) == (0, plain.stdout, "")


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_missing_backend_ends_with_2_and_the_reason(run, form):
    done = run("--require", "reference", "--require", "cpu", *form)
    assert done.exit_code == 2
    assert done.stderr == "error: backend 'cpu' cannot run here: the library was not built; install g++\n"
    assert "plain PyTorch" in (json.loads(done.stdout)["backend reference"] if form else done.stdout)
    assert run(*form).exit_code == 0


def test_an_unknown_backend_is_refused_before_anything_is_shown(run):
    done = run("--require", "gpu")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "error: no backend 'gpu'" in done.stderr
    assert "cpu" in done.stderr.partition("'gpu'")[2]


def test_a_busy_machine_is_reported(run, monkeypatch):
    monkeypatch.setattr(doctor.machine, "load", lambda average, uses: MachineLoad(0.5, 1.0, 2))
    done = run("--measure", *TWO, *TINY)
    assert "The machine was busy: other processes used 50 % of the processors' time" in done.stderr
    assert "The machine" not in done.stdout


def test_the_measurement_needs_no_extra():
    heavy = {"transformers", "matplotlib", "sklearn", "safetensors", "jinja2"}
    code = f"import sys, subquad.tools.doctor.measure_crossovers; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("cuda", "gpu", "reason"),
    [
        (None, False, "this build of torch has no GPU support"),
        ("13.0", False, "there is no GPU"),
        ("13.0", True, "Triton is not installed: `pip install triton=="),
    ],
)
def test_triton_is_asked_for_only_if_there_is_a_gpu(monkeypatch, cuda, gpu, reason):
    monkeypatch.setattr(triton, "usable", lambda: False)
    monkeypatch.setattr(triton, "INTERPRETED", False)
    monkeypatch.setattr("torch.version.cuda", cuda)
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    assert triton.refusal().startswith(reason)
    assert ("install" in triton.refusal()) == gpu
