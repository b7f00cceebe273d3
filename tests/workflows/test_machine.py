"""What `subquad doctor` says about the backends."""

import pytest

import subquad as sq
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


def test_a_backend_without_kernels_says_so():
    assert machine.backends()["backend triton"] == "this version of subquad has no Triton kernels"
