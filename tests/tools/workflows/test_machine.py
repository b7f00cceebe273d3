"""The report of `subquad doctor` about the backends."""

import sys
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest
import torch

import subquad as sq
from subquad.core import environment
from subquad.kernels import dispatch as registry
from subquad.kernels import native, triton
from subquad.tools.measure.noise import MachineLoad
from subquad.tools.runs import machine
from subquad.tools.runs.machine import Use


@pytest.fixture
def no_library(monkeypatch):
    monkeypatch.setattr(native, "_LIBRARY", None)
    monkeypatch.setattr(native, "_MESSAGE", "nobody built it: build it")


@pytest.mark.usefixtures("no_library")
def test_without_the_library_it_says_why_what_to_do_and_what_that_costs():
    described = machine.backends()
    assert described["backend cpu"].startswith("nobody built it: build it. ")
    assert "slower than exact attention" in described["backend cpu"]
    assert described["backend reference"] == "in use: plain PyTorch"


@pytest.mark.skipif(native.refusal() is not None, reason=f"backend cpu: {native.refusal()}")
def test_with_the_library_it_names_the_variants_and_the_one_in_use():
    with native.use_variant(slowest := native.variants()[-1]):
        described = machine.backends()["backend cpu"]
    assert described.startswith(f"in use: variant {slowest} (")
    assert all(name in described for name in native.variants())


@pytest.mark.parametrize(
    ("has", "says"), [(True, ", several threads"), (False, ", built without OpenMP: on one thread")]
)
@pytest.mark.skipif(native.refusal() is not None, reason=f"backend cpu: {native.refusal()}")
def test_it_says_whether_kernels_run_on_several_threads(monkeypatch, has, says):
    monkeypatch.setattr(native, "has_threads", lambda: has)
    assert machine.backends()["backend cpu"].endswith(says)


def test_the_backend_that_is_forced_is_the_one_in_use():
    with sq.use_backend("reference"):
        described = machine.backends()
    assert [name for name, what in described.items() if what.startswith("in use: ")] == ["backend reference"]


def test_a_backend_that_cannot_run_says_so(monkeypatch):
    monkeypatch.setitem(registry._BACKENDS, "other", lambda: "no such machine")
    assert machine.backends()["backend other"] == "no such machine"


# ---------------------------------------------------------------------- Triton


@pytest.fixture
def installed(monkeypatch):
    """Triton as it was told: installed in this version, wanted in that one, and why it cannot run."""

    def say(have, want="3.7.1", reason=None, interpreted=False):
        monkeypatch.setattr(triton, "usable", lambda: have is not None)
        monkeypatch.setattr(triton, "installed_version", lambda: have)
        monkeypatch.setattr(triton, "wanted_version", lambda: want)
        monkeypatch.setattr(triton, "refusal", lambda: reason)
        monkeypatch.setattr(triton, "INTERPRETED", interpreted)
        return machine._triton_backend()

    return say


def test_without_triton_it_says_what_to_install(installed):
    assert installed(None, reason="Triton is not installed: …") == "Triton is not installed: …"


def test_triton_without_a_gpu_has_its_version_and_the_reason(installed):
    assert installed("3.7.1", reason="there is no GPU") == "triton 3.7.1; there is no GPU"


def test_another_version_of_triton_than_torchs_is_told(installed):
    said = installed("3.5.0", reason="there is no GPU")
    assert said == "triton 3.5.0, but this torch was built with 3.7.1; there is no GPU"


def test_the_interpreter_is_told(installed):
    assert installed("3.7.1", interpreted=True).endswith("in its interpreter, on CPU tensors (TRITON_INTERPRET=1)")


@pytest.mark.parametrize(("measured", "says"), [(True, "with tiles measured there"), (False, "nobody has measured")])
def test_on_a_gpu_it_says_whose_tiles_run(installed, monkeypatch, measured, says):
    table = SimpleNamespace(MEASURED={"sm_90": {}} if measured else {})  # the module itself imports Triton
    monkeypatch.setitem(sys.modules, "subquad.kernels.triton.tiles", table)
    monkeypatch.setattr(machine, "gpu_architecture", lambda: "sm_90")
    said = installed("3.7.1")
    assert said.startswith("triton 3.7.1, for sm_90, ")
    assert says in said


@pytest.mark.parametrize(
    ("requirements", "wanted"),
    [
        (['triton==3.9.0; platform_system == "Linux"', "sympy>=1.13"], "3.9.0"),
        (["sympy>=1.13", "tritonclient==1.0"], triton.VERSION),
        (None, triton.VERSION),
    ],
)
def test_torch_says_which_triton_it_wants(monkeypatch, requirements, wanted):
    monkeypatch.setattr(triton, "requires", lambda package: requirements)
    assert triton.wanted_version() == wanted


def test_a_triton_under_another_name_has_no_version(monkeypatch):
    def missing(package):
        raise PackageNotFoundError(package)

    monkeypatch.setattr(triton, "version", missing)
    assert triton.installed_version() is None


# ---------------------------------------------------------------------- the GPU


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that is not here."""
    environment.gpu_architecture.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    yield
    environment.gpu_architecture.cache_clear()


@pytest.mark.usefixtures("gpu")
def test_the_gpu_and_its_architecture_are_named():
    described = machine.hardware("cuda")
    assert (described["gpu"], described["gpu_architecture"]) == ("NVIDIA H100", "sm_90")
    assert "gpu" not in machine.hardware("cpu")


@pytest.mark.usefixtures("gpu")
def test_an_amd_gpu_has_the_name_that_its_compiler_uses(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    made = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: made)
    assert environment.gpu_architecture() == "gfx942"


# ---------------------------------------------------------------------- what else the machine did


@pytest.fixture
def stat(monkeypatch, tmp_path):
    """The system's count of busy time as a file that says what it is told, and a process that uses nothing."""
    monkeypatch.setattr(machine, "_STAT", tmp_path / "stat")
    monkeypatch.setattr(machine.time, "process_time", lambda: 0.0)
    monkeypatch.setattr(machine.os, "sysconf", lambda name: 100)

    def say(user=0, system=0, idle=0, waiting=0, stolen=0):
        ticks = [user, 0, system, idle, waiting, 0, 0, stolen, 0, 0]
        (tmp_path / "stat").write_text(f"cpu  {' '.join(map(str, ticks))}\ncpu0 1 2 3\n")

    return say


def test_others_are_all_busy_time_but_this_process_own(stat, monkeypatch):
    stat(user=1000, system=50, idle=7)
    used = machine.watch()
    stat(user=1300, system=100, idle=99, waiting=99, stolen=25)
    monkeypatch.setattr(machine.time, "process_time", lambda: 1.5)
    use = used()
    assert use.others == pytest.approx(3.0 + 0.5 + 0.25 - 1.5)
    assert use.elapsed > 0


@pytest.mark.parametrize("text", ["", "cpu 1 2", "intr 1 2 3 4 5 6 7 8", "cpu a b c d e f g h", "cpu 0 0 0 0 0 0 0 0"])
def test_a_system_that_does_not_say_is_told_apart_from_an_idle_one(monkeypatch, tmp_path, text):
    monkeypatch.setattr(machine, "_STAT", tmp_path / "stat")
    if text:
        (tmp_path / "stat").write_text(text)
    use = machine.watch()()
    assert use.others is None
    assert machine.load(0.5, [use]).others is None


def test_the_share_is_over_all_whiles_and_cores(monkeypatch):
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 4)
    uses = [Use(1.0, 3.0), Use(3.0, 1.0), Use(9.0, None)]
    assert machine.load(0.7, uses) == MachineLoad(0.25, 0.7, 4)
    assert machine.load(None, [Use(2.0, -0.1)]).others == 0.0  # the count is coarse
    assert machine.load(None, [Use(0.5, 0.5)]).others is None  # and of too short a while
