"""What `subquad doctor` says about the backends."""

import pytest

import subquad as sq
from subquad.ops import backends as registry
from subquad.ops import native
from subquad.workflows import machine


@pytest.fixture
def no_library(monkeypatch):
    monkeypatch.setattr(native, "_LIBRARY", None)
    monkeypatch.setattr(native, "_REFUSAL", "nobody built it: build it")


@pytest.mark.usefixtures("no_library")
def test_without_the_library_it_says_why_what_to_do_and_what_that_costs():
    described = machine.backends()
    assert described["backend cpu"].startswith("nobody built it: build it. ")
    assert "slower than exact attention" in described["backend cpu"]
    assert described["backend reference"] == "in use: plain PyTorch"


@pytest.mark.skipif(native.refusal() is not None, reason=f"backend cpu: {native.refusal()}")
def test_with_the_library_it_names_the_variants_and_the_one_in_use():
    with native.use_variant("baseline"):
        described = machine.backends()["backend cpu"]
    assert described.startswith("in use: variant baseline (")
    assert all(name in described for name in native.variants())


@pytest.mark.parametrize(("has", "says"), [(True, ", OpenMP"), (False, ", built without OpenMP: on one thread")])
@pytest.mark.skipif(native.refusal() is not None, reason=f"backend cpu: {native.refusal()}")
def test_it_says_whether_kernels_run_on_several_threads(monkeypatch, has, says):
    monkeypatch.setattr(native, "has_openmp", lambda: has)
    assert machine.backends()["backend cpu"].endswith(says)


def test_the_backend_that_is_forced_is_the_one_in_use():
    with sq.use_backend("reference"):
        described = machine.backends()
    assert [name for name, what in described.items() if what.startswith("in use: ")] == ["backend reference"]


def test_a_backend_that_cannot_run_says_so(monkeypatch):
    monkeypatch.setitem(registry._BACKENDS, "other", lambda: "no such machine")
    assert machine.backends()["backend other"] == "no such machine"


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
    with machine.watched() as use:
        stat(user=1300, system=100, idle=99, waiting=99, stolen=25)
        monkeypatch.setattr(machine.time, "process_time", lambda: 1.5)
    assert use["others"] == pytest.approx(3.0 + 0.5 + 0.25 - 1.5)
    assert use["elapsed"] > 0


@pytest.mark.parametrize("text", ["", "cpu 1 2", "intr 1 2 3 4 5 6 7 8", "cpu a b c d e f g h", "cpu 0 0 0 0 0 0 0 0"])
def test_a_system_that_does_not_say_is_told_apart_from_an_idle_one(monkeypatch, tmp_path, text):
    monkeypatch.setattr(machine, "_STAT", tmp_path / "stat")
    if text:
        (tmp_path / "stat").write_text(text)
    with machine.watched() as use:
        pass
    assert use["others"] is None
    assert machine.load(0.5, [use])["others"] is None


def test_the_share_is_over_all_whiles_and_cores(monkeypatch):
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 4)
    uses = [{"elapsed": 1.0, "others": 3.0}, {"elapsed": 3.0, "others": 1.0}, {"elapsed": 9.0, "others": None}]
    assert machine.load(0.7, uses) == {"others": 0.25, "average": 0.7, "cores": 4}
    assert machine.load(None, [{"elapsed": 2.0, "others": -0.1}])["others"] == 0.0  # the count is coarse
    assert machine.load(None, [{"elapsed": 0.5, "others": 0.5}])["others"] is None  # and of too short a while
