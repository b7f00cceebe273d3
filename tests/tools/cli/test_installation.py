"""What `subquad doctor` says of an installation: floors, bf16, threads, and the command that fixes what is wrong."""

import json

import pytest
import torch
from typer.testing import CliRunner

from subquad.core import requirements
from subquad.kernels import native
from subquad.tools.cli.main import app
from subquad.tools.doctor import installation
from tests.library.test_requirements import metadata

LEAST = {"torch": "2.9", "transformers": "5.5.4", "triton": "3.5"}
FINE = {"python": "3.11.7", "torch": "2.9.1", "transformers": "5.5.4", "triton": "3.5.0"}


@pytest.fixture(autouse=True)
def sound(monkeypatch, tmp_path):
    """A machine on which nothing is wrong, and the floors of pyproject.toml."""
    monkeypatch.setattr(requirements, "requires", lambda package: metadata())
    requirements._declared.cache_clear()
    monkeypatch.setattr(native, "refusal", lambda: None)
    monkeypatch.setattr(native, "has_threads", lambda: True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(installation, "cores", lambda: 4)
    monkeypatch.setattr(installation, "openmp_runtimes", lambda: ["/torch/lib/libgomp.so.1"])
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    yield
    requirements._declared.cache_clear()


def test_nothing_is_wrong_with_the_floors():
    assert installation.problems(FINE) == []


@pytest.mark.parametrize("package", LEAST)
def test_a_package_below_its_floor(package):
    (problem,) = installation.problems(FINE | {package: "1.2.3"})
    least = LEAST[package]
    assert problem.problem == f"{package} 1.2.3 is older than {least}, the lowest version that works"
    assert problem.command == f"pip install '{package}>={least}'"


@pytest.mark.parametrize("package", LEAST)
def test_a_package_that_is_newer_than_the_tested_ones(package):
    (problem,) = installation.problems(FINE | {package: "99.0"})
    assert problem.problem == f"{package} 99.0 is newer than the versions that were tested"
    assert problem.command == f"pip install '{package}<{requirements.untested()[package]}', if something fails"


def test_without_transformers_the_extra_is_named():
    (problem,) = installation.problems({"torch": "2.9.1"})
    assert problem.problem.startswith("transformers is not installed")
    assert problem.command == "pip install -c constraints.txt '.[hf]'"


def test_without_the_kernels_their_own_remedy_is_the_command(monkeypatch):
    monkeypatch.setattr(native, "refusal", lambda: "no compiled library in this install: run `pip install .`")
    (problem,) = installation.problems(FINE)
    assert problem == (
        "no compiled library in this install, so that methods run in plain PyTorch",
        "run `pip install .`",
    )


def test_kernels_on_one_thread_on_several_cores(monkeypatch):
    monkeypatch.setattr(native, "has_threads", lambda: False)
    (problem,) = installation.problems(FINE)
    assert problem.command == "CXX=g++ pip install -v --force-reinstall --no-deps ."
    monkeypatch.setattr(installation, "cores", lambda: 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert installation.problems(FINE) == []


@pytest.mark.parametrize(
    ("threads", "cores", "problem"),
    [
        (8, 4, "8 threads share 4 cores"),
        (2, 1, "2 threads share 1 core"),
        (1, 4, "1 thread of 4 cores in use"),
        (2, 4, None),  # one for each physical core
        (4, 4, None),
        (1, 1, None),
    ],
)
def test_threads_against_cores(monkeypatch, threads, cores, problem):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(installation, "cores", lambda: cores)
    assert installation.problems(FINE) == ([] if problem is None else [(problem, f"export OMP_NUM_THREADS={cores}")])


def test_two_openmp_runtimes_are_named(monkeypatch):
    monkeypatch.setattr(installation, "openmp_runtimes", lambda: ["/a/libgomp.so.1", "/b/libiomp5.so"])
    (problem,) = installation.problems(FINE)
    assert problem.problem.startswith("2 OpenMP runtimes are loaded")
    assert problem.problem.endswith("/a/libgomp.so.1, /b/libiomp5.so")


def test_runtimes_are_found_by_their_files(monkeypatch, tmp_path):
    monkeypatch.undo()
    maps = tmp_path / "maps"
    row = "7f00-7f01 r-xp 00000000 fe:00 123 "
    files = [
        "/t/lib/libgomp.so.1",
        "/t/lib/libgomp.so.1",
        "/s/libgomp-a34b.so.1.0.0",
        "/i/libiomp5.so",
        "/x/libomptest",
    ]
    maps.write_text("\n".join(row + file for file in [*files, "/m/libc.so.6"]) + "\n7f02-7f03 rw-p 00000000 00:00 0\n")
    monkeypatch.setattr(installation, "_MAPS", maps)
    monkeypatch.setattr(installation.platform, "system", lambda: "Linux")
    assert installation.openmp_runtimes() == ["/i/libiomp5.so", "/s/libgomp-a34b.so.1.0.0", "/t/lib/libgomp.so.1"]
    monkeypatch.setattr(installation, "_MAPS", tmp_path / "none")
    assert installation.openmp_runtimes() == []


@pytest.mark.parametrize(("quota", "cores"), [("150000 100000", 2), ("max 100000", 8), ("5000 100000", 1), ("", 8)])
def test_the_cores_of_a_container(monkeypatch, tmp_path, quota, cores):
    monkeypatch.undo()
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(installation, "_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(installation.os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    assert installation.cores() == cores


def test_the_threads_and_what_set_them(monkeypatch):
    assert installation.described()["openmp"] == "4 threads for 4 cores"
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert installation.described()["openmp"] == "4 threads for 4 cores, OMP_NUM_THREADS=4"


@pytest.mark.parametrize(
    ("able", "words"), [(True, "has products of bf16"), (False, "slower than fp32 here: use fp32")]
)
def test_whether_bf16_has_products_here(monkeypatch, able, words):
    monkeypatch.setattr(installation, "has_products", lambda device, dtype: able)
    assert words in installation.described()["bf16"]


# ---------------------------------------------------------------------- the command


def doctor(*words: str) -> str:
    done = CliRunner().invoke(app, ["doctor", *words], env={"COLUMNS": "120"})
    assert done.exit_code == 0, done.stderr
    return done.stdout


def test_the_command_prints_versions_beside_their_floors_and_nothing_to_fix(monkeypatch):
    monkeypatch.setattr(installation, "problems", lambda installed: [])
    printed = doctor()
    limit = requirements.untested()["torch"]
    assert f"(needs {LEAST['torch']} or later, tested before {limit})" in " ".join(printed.split())
    assert printed.rstrip().endswith("Nothing to fix.")
    assert "4 threads for 4 cores" in printed
    assert len(printed.splitlines()) <= 30  # one screen


def test_the_command_prints_each_problem_with_its_command(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 9)
    printed = doctor()
    assert "9 threads share 4 cores:\n    export OMP_NUM_THREADS=4" in printed
    assert "Nothing to fix" not in printed
    record = json.loads(doctor("--json"))
    assert {"problem": "9 threads share 4 cores", "command": "export OMP_NUM_THREADS=4"} in record["problems"]
    assert record["torch"] == torch.__version__
    assert record["needed"]["torch"].startswith("needs 2.9 or later")


def test_without_metadata_no_floor_is_printed(monkeypatch):
    monkeypatch.setattr(requirements, "requires", lambda package: [])
    requirements._declared.cache_clear()
    assert "needs" not in doctor()
    assert json.loads(doctor("--json"))["needed"] == {}
