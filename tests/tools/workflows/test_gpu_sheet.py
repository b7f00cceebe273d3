"""The sheet of a GPU, measured with a timer that makes its times up."""

import json
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from subquad.core.errors import InputError
from subquad.tools.bench import gpu_sheet, gpu_tiles
from subquad.tools.bench.calls import Calls, Load
from subquad.tools.bench.gpu_page import markdown
from subquad.tools.bench.gpu_sheet import Sheet, SheetCell, SheetPlan, fill, measured, plan_of
from subquad.tools.bench.gpu_tiles import TriedTiles
from subquad.tools.bench.settings import BenchSettings
from subquad.tools.cli.main import app
from subquad.tools.measure.gpu_chips import GPUS
from subquad.tools.measure.gpu_model import GpuStep, Recorded

METHODS = "linear", "i-clustered:clusters=4,topk=3"
PLAN = SheetPlan(METHODS, ("local",), (32, 16), (8,), heads=2, dtype="float32", device="cpu")


class Timer:
    """The first call takes 99 ms, each a millisecond less than the one before; a graph takes half of that."""

    def __init__(self, refuses_graphs=False):
        self.ms, self.refuses_graphs = 100.0, refuses_graphs

    def eager(self, call):
        call()
        self.ms -= 1.0
        return self.ms

    def graph(self, call):
        if self.refuses_graphs:
            raise RuntimeError("operation not permitted when\nstream is capturing")
        return self.ms / 2

    def peak_mib(self, call):
        return 3.0

    def kernels(self, call):
        return {}


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch):
    """Neither recorded nor tuned: the tests of the compiled kernels do that."""
    monkeypatch.setattr(gpu_sheet.model, "record", lambda method, load: Recorded([GpuStep("a", bytes=10**9)], []))
    tried = [
        TriedTiles("members", 8, 2, (64, 32, 4, 1), 3.0),
        TriedTiles("members", 8, 2, (32, 32, 4, 1), 2.0),
        TriedTiles("members", 8, 2, (128, 32, 4, 1), None, "out of | memory"),
    ]
    monkeypatch.setattr(gpu_sheet, "try_tiles", lambda load, timer, left, progress: tried if left() else [])


def filled(timer=None, seconds=0.0, gpu="NVIDIA H100 80GB HBM3"):
    ticks = iter(range(10**6))
    return fill(
        Sheet(PLAN, gpu, "sm_90"), timer or Timer(), lambda *of: None, clock=lambda: seconds * next(ticks)
    ).plain()


def test_every_method_is_measured_on_every_load_beside_sdpa():
    cells = filled()["cells"]
    assert len(cells) == 2 * (2 * 4 + 3)
    first, cudnn, linear, clustered = cells[:4]
    assert [cell["method"] for cell in cells[:4]] == ["full", "cudnn", *PLAN.methods]
    assert (first["length"], first["passes"], first["width"], first["causal"]) == (32, "forward", 8, False)
    assert [cell["eager_ms"] for cell in cells[:4]] == [99.0, 98.0, 97.0, 96.0]
    assert linear["eager_speedup"] == 99 / 97
    assert clustered["graph_speedup"] == 99 / 96
    assert first["eager_speedup"] == 1.0
    assert cudnn["fidelity"] == pytest.approx(1.0)
    assert first["peak_mib"] == 3.0


def test_forward_passes_come_first_and_causal_ones_are_beside_them():
    loads = list(dict.fromkeys((cell["length"], cell["passes"], cell["causal"]) for cell in filled()["cells"]))
    forward = [(length, "forward", causal) for length in (32, 16) for causal in (False, True)]
    assert loads == [*forward, (32, "forward+backward", False), (16, "forward+backward", False)]


def test_without_causal_methods_there_is_no_causal_load():
    plan = replace(PLAN, causal_methods=())
    assert not any(load.causal for load in plan.loads())


def test_what_was_measured_is_stored_after_each_load():
    stored = []
    fill(Sheet(PLAN, "", ""), Timer(), lambda *of: None, store=lambda sheet: stored.append(len(sheet.cells)))
    assert stored == [4, 7, 11, 14, 18, 22, 22]


def test_the_fidelity_is_to_sdpa_on_the_same_inputs():
    exact, _, linear, clustered = filled()["cells"][:4]
    assert exact["fidelity"] is None
    assert -1 < linear["fidelity"] < clustered["fidelity"] < 1


def test_the_models_times_stand_beside_the_measured_ones():
    exact, cudnn, linear = filled()["cells"][:3]
    assert exact["predicted_graph_ms"] == exact["predicted_eager_ms"] > 0
    assert cudnn["predicted_graph_ms"] is None
    assert linear["predicted_graph_ms"] == pytest.approx(1e12 / (3350e9 * 0.75) + 1.3e-3, rel=1e-3)


def test_an_unknown_gpu_has_no_prediction():
    assert {cell["predicted_graph_ms"] for cell in filled(gpu="Some GPU")["cells"]} == {None}


def test_the_prediction_of_sdpas_flash_kernel_is_its_own():
    cell = SheetCell("full", 4096, 64, "forward")
    load = Load(4096, "bfloat16", "forward", 1, 32, 64, "cuda", 0)
    gpu_sheet.predict(cell, load, GPUS["H200"])
    assert cell.predicted_graph_ms == pytest.approx(4 * 32 * 4096**2 * 64 / 321e9)  # FlashAttention-2, TFLOP/s
    gpu_sheet.predict(cell, load, GPUS["MI300X"])  # where only another is known
    assert cell.predicted_graph_ms == pytest.approx(4 * 32 * 4096**2 * 64 / (0.35 * 1307.4e9))


def test_without_sdpas_output_nothing_is_compared_with_another_methods(monkeypatch):
    def fail(kernel, call):
        raise RuntimeError("No available kernel")

    monkeypatch.setattr(gpu_sheet, "_only", fail)
    exact, cudnn, *others = filled()["cells"][:4]
    assert exact["reason"] == cudnn["reason"] == "No available kernel"
    for cell in others:
        assert cell["eager_ms"] is not None
        assert cell["fidelity"] is cell["eager_speedup"] is cell["graph_speedup"] is None


def test_no_gradients_are_left_when_memory_is_measured():
    calls = Calls(PLAN.load(16, 8, "forward+backward"))

    class Watching(Timer):
        def peak_mib(self, call):
            assert all(x.grad is None for x in calls.inputs)
            return 1.0

    for name in ("full", "linear"):
        cell, _ = measured(name, calls, Watching())
        assert (cell.peak_mib, cell.reason) == (1.0, None)


def test_all_is_measured_on_the_device_of_the_plan(monkeypatch):
    opened = []

    @contextmanager
    def device(name):
        opened.append(name)
        yield
        opened.append("closed")

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda name: "GPU")
    monkeypatch.setattr(gpu_sheet.machine, "hardware", lambda name: {})
    monkeypatch.setattr(gpu_sheet, "fill", lambda sheet, *of, **options: opened.append("filled") or sheet)
    gpu_sheet.measure(replace(PLAN, device="cuda:1"))
    assert opened == ["cuda:1", "filled", "closed"]


def test_what_cannot_be_captured_is_told_and_the_rest_is_measured():
    cell = filled(Timer(refuses_graphs=True))["cells"][2]
    assert cell["reason"] == "operation not permitted when stream is capturing"
    assert cell["graph_ms"] is cell["graph_speedup"] is None
    assert cell["eager_ms"] == 97.0


def test_a_method_that_refuses_is_told(monkeypatch):
    plan = SheetPlan(("oracle-top:topk=1", "lsh:buckets=0,bucket_size=0"), (), (8,), (4,), 1, "float32", "cpu")
    cells = fill(Sheet(plan, "", ""), Timer(), lambda *of: None).cells
    assert cells[2].reason is None
    assert "bucket" in cells[3].reason


def test_inputs_that_do_not_fit_are_told_and_the_rest_is_measured(monkeypatch):
    def short_of_memory(load):
        if load.length == 32:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return Calls(load)

    monkeypatch.setattr(gpu_sheet, "Calls", short_of_memory)
    cells = filled()["cells"]
    assert len(cells) == 2 * (2 * 4 + 3)
    reasons = {cell["length"]: cell["reason"] for cell in cells}
    assert reasons == {32: "CUDA out of memory. Tried to allocate 2.00 GiB", 16: None}


def test_tiles_whose_inputs_do_not_fit_are_told(monkeypatch):
    def short_of_memory(load):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(gpu_tiles, "Calls", short_of_memory)
    tried = gpu_tiles.try_tiles(PLAN.load(32, 8, "forward"), Timer(), lambda: True, lambda *of: None)
    assert {each.reason for each in tried} == {"CUDA out of memory"}
    assert len(tried) == len(gpu_tiles.METHODS)


def test_after_its_time_nothing_more_is_measured():
    sheet = filled(seconds=60.0)  # a minute between two looks at the clock
    reasons = [cell["reason"] for cell in sheet["cells"]]
    assert reasons[:11] == [None] * 11
    assert set(reasons[11:]) == {"no time was left"}
    assert sheet["tiles"] == []


def test_the_page_has_all_of_it(tmp_path):
    page = markdown(filled() | {"versions": {"torch": "2"}, "hardware": {"gpu": "H100"}}, "subquad bench --gpu-sheet")
    assert page.startswith("# NVIDIA H100 80GB HBM3 (sm_90)")
    assert "## forward+backward, D=8" in page
    assert "## causal forward, D=8" in page
    assert "| SDPA (flash) | 16 | " in page
    assert page.index("| `linear` | 16 |") < page.index("| `linear` | 32 |")
    assert '("members", 2, 8): Tiles(32, 32, 4, 1),' in page
    assert "(128, 32, 4, 1) | – | out of \\| memory |" in page


def test_reasons_stand_below_the_table_once():
    page = markdown(filled(Timer(refuses_graphs=True)), "c")
    assert page.count("linear: operation not permitted") == 2  # once for each of the passes


def test_what_no_time_was_left_for_is_one_line():
    page = markdown(filled(seconds=60.0) | {"versions": {}, "hardware": {}}, "c")
    assert page.count("Not measured, because no time was left: 16, 32 tokens.") == 1
    assert "no time was left |" not in page


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (BenchSettings(device="cpu"), "--gpu-sheet needs --device cuda, and the device is cpu"),
        (BenchSettings(device="gpu"), "--gpu-sheet needs --device cuda, and the device is gpu"),
        (BenchSettings(device="cuda", heads=3), "itself, and heads is given"),
        (BenchSettings(device="cuda", quick=True), "itself, and quick is given"),
    ],
)
def test_what_the_sheet_does_not_take_is_refused(settings, says):
    with pytest.raises(InputError, match=says):
        plan_of(settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused_before_anything_runs(tmp_path):
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["bench", "--gpu-sheet", "--device", "cuda", "--out", str(out)])
    assert done.exit_code == 2
    assert "no device 'cuda' here" in done.output
    assert not out.exists()


def test_without_triton_it_is_refused(monkeypatch):
    monkeypatch.setattr(gpu_sheet, "check_device", lambda device: None)
    monkeypatch.setattr(gpu_sheet.triton, "refusal", lambda: "Triton is not installed")
    with pytest.raises(InputError, match="cannot run here: Triton is not installed"):
        plan_of(BenchSettings(device="cuda"))


def test_methods_lengths_and_seed_can_be_given(monkeypatch):
    monkeypatch.setattr(gpu_sheet, "check_device", lambda device: None)
    monkeypatch.setattr(gpu_sheet.triton, "refusal", lambda: None)
    assert plan_of(BenchSettings(device="cuda:1", seed=3)) == SheetPlan(device="cuda:1", seed=3)
    plan = plan_of(BenchSettings(device="cuda", methods=("linear",), lengths=(512,)))
    assert (plan.methods, plan.lengths) == (("linear",), (512,))
    methods = "nystrom", "performer", "linear"
    plan = plan_of(BenchSettings(device="cuda", methods=methods, lengths=(512,)))
    rows = {load.causal: plan.rows(load)[2:] for load in plan.loads()}
    assert rows == {False: methods, True: ("performer", "linear")}
    with pytest.raises(InputError, match="lineer"):
        plan_of(BenchSettings(device="cuda", methods=("lineer",)))


def test_the_command_writes_the_page_and_the_data(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_sheet, "plan_of", lambda settings: PLAN)
    monkeypatch.setattr(
        gpu_sheet,
        "measure",
        lambda plan, progress, store: fill(Sheet(plan, "GPU", "sm_0"), Timer(), progress, store=store),
    )
    done = CliRunner().invoke(app, ["bench", "--gpu-sheet", "--device", "cuda", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    page = (tmp_path / "gpu-sheet.md").read_text("utf-8")
    assert "subquad bench --device cuda --gpu-sheet" in page
    assert page.splitlines()[0] in done.stdout
    assert json.loads((tmp_path / "gpu-sheet.json").read_text("utf-8"))["gpu"] == "GPU"


def test_a_sheet_that_is_cut_short_leaves_what_was_measured(monkeypatch, tmp_path):
    class Interrupted(Timer):
        def eager(self, call):
            if self.ms < 90:
                raise KeyboardInterrupt
            return super().eager(call)

    monkeypatch.setattr(gpu_sheet, "plan_of", lambda settings: PLAN)
    monkeypatch.setattr(
        gpu_sheet,
        "measure",
        lambda plan, progress, store=None: fill(Sheet(plan, "GPU", "sm_0"), Interrupted(), progress, store=store),
    )
    done = CliRunner().invoke(app, ["bench", "--gpu-sheet", "--device", "cuda", "--out", str(tmp_path)])
    assert done.exit_code != 0
    assert len(json.loads((tmp_path / "gpu-sheet.json").read_text("utf-8"))["cells"]) == 4 + 3 + 4
    assert (tmp_path / "gpu-sheet.md").exists()


def test_compare_is_refused_beside_it(tmp_path):
    done = CliRunner().invoke(app, ["bench", "--gpu-sheet", "--compare", "x.json", "--out", str(tmp_path)])
    assert done.exit_code == 2
    assert "--compare x.json is given too" in " ".join(done.output.split())
