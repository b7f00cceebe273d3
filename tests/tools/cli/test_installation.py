"""Installations as `subquad doctor` sees them: floors, bf16, threads, and the command that fixes a fault."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from subquad.core import requirements
from subquad.kernels import native, triton
from subquad.tools.cli.main import app
from subquad.tools.doctor import installation, remedies
from tests.library.test_requirements import metadata

ROOT = Path(__file__).parents[3]
LEAST = {"torch": "2.9", "transformers": "5.5.4", "triton": "3.5"}
AGAIN = "pip install -v --force-reinstall --no-deps"
FINE = {"python": "3.11.7", "torch": "2.9.1", "transformers": "5.5.4", "triton": "3.5.0"}


@pytest.fixture(autouse=True)
def sound(monkeypatch, tmp_path):
    """A machine on which nothing is wrong, and the floors of pyproject.toml."""
    monkeypatch.setattr(requirements, "requires", lambda package: metadata())
    requirements._declared.cache_clear()
    monkeypatch.setattr(native, "cause", lambda: None)
    monkeypatch.setattr(native, "has_threads", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    system(monkeypatch, "Linux")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(installation, "cores", lambda: 4)
    monkeypatch.setattr(installation, "openmp_runtimes", lambda: ["/torch/lib/libgomp.so.1"])
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path))
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(remedies, "_installed_from", dict)
    monkeypatch.chdir(ROOT)
    yield
    requirements._declared.cache_clear()


def system(monkeypatch, name):
    """Another operating system, for the commands."""
    for module in (installation, remedies):
        monkeypatch.setattr(module, "platform", SimpleNamespace(system=lambda: name))


@pytest.fixture
def no_clone(monkeypatch, tmp_path):
    """An install from a wheel, far from any clone."""
    monkeypatch.setattr(remedies, "_PACKAGE", tmp_path / "a" / "b" / "subquad")
    monkeypatch.chdir(tmp_path)


def test_nothing_is_wrong_with_the_floors():
    assert installation.problems(FINE) == []


@pytest.mark.parametrize("package", LEAST)
def test_a_package_below_its_floor(package):
    (problem,) = installation.problems(FINE | {package: "1.2.3"})
    least = LEAST[package]
    assert problem.problem == f"{package} 1.2.3 is older than {least}, the lowest version that works"
    limit = requirements.untested()[package]
    assert problem.command == f"pip install -c constraints.txt '{package}>={least},<{limit}'"


@pytest.mark.parametrize("package", LEAST)
def test_a_package_that_is_newer_than_the_tested_ones(package):
    (problem,) = installation.problems(FINE | {package: "99.0"})
    assert problem.problem == (
        f"{package} 99.0 is newer than the versions that were tested; if something fails, replace it"
    )
    limit = requirements.untested()[package]
    assert problem.command == f"pip install -c constraints.txt '{package}>={LEAST[package]},<{limit}'"


@pytest.mark.usefixtures("no_clone")
@pytest.mark.parametrize(
    ("gpu", "name", "about"), [(False, "Linux", True), (True, "Linux", False), (False, "Darwin", False)]
)
def test_without_a_clone_no_constraints_are_named_and_the_build_of_torch_is(monkeypatch, gpu, name, about):
    system(monkeypatch, name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(triton, "usable", lambda: True)
    (problem,) = installation.problems(FINE | {"torch": "1.2.3"})
    assert problem.command == f"pip install 'torch>=2.9,<{requirements.untested()['torch']}'"
    assert ("without a GPU, the CPU build" in problem.problem) == about
    (problem,) = installation.problems(FINE | {"triton": "1.2.3"})
    assert "build" not in problem.problem


@pytest.mark.parametrize(("gpu", "usable"), [(True, False), (True, True), (False, False)])
def test_a_gpu_without_triton(monkeypatch, gpu, usable):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(triton, "usable", lambda: usable)
    monkeypatch.setattr(triton, "wanted_version", lambda: "3.5.0")
    expected = [("there is a GPU but no Triton, so that methods run in plain PyTorch on it", True)]
    found = installation.problems(FINE)
    assert [(each.problem, each.command.endswith("triton==3.5.0")) for each in found] == expected * (gpu and not usable)


def test_without_transformers_the_extra_is_named():
    (problem,) = installation.problems({"torch": "2.9.1"})
    assert problem.problem.startswith("transformers is not installed")
    assert problem.command == "pip install -c constraints.txt '.[hf]'"


@pytest.mark.usefixtures("no_clone")
def test_without_transformers_and_a_clone_its_packages_are_named():
    (problem,) = installation.problems({"torch": "2.9.1"})
    assert problem.command == "pip install 'transformers>=5.5.4' 'safetensors>=0.5'"
    assert remedies.install_extra("hf", {}) is None  # without metadata


def test_without_the_kernels_the_cause_and_the_command_are_apart(monkeypatch):
    monkeypatch.setattr(native, "cause", lambda: "the compiled library cannot be loaded (/a: b: no such file)")
    monkeypatch.setattr(native, "compiler", lambda: "/usr/bin/c++")
    (problem,) = installation.problems(FINE)
    assert problem == (
        "the compiled library cannot be loaded (/a: b: no such file), so that methods run in plain PyTorch",
        f"{AGAIN} .",
    )


@pytest.mark.parametrize(
    ("name", "programs", "root", "command"),
    [
        ("Linux", ["apt"], True, "apt install g++"),
        ("Linux", ["apt"], False, "sudo apt install g++"),
        ("Linux", ["dnf"], True, "dnf install gcc-c++"),
        ("Linux", [], True, None),
        ("Darwin", ["apt"], False, "xcode-select --install"),
    ],
)
def test_without_a_compiler_one_comes_first(monkeypatch, name, programs, root, command):
    system(monkeypatch, name)
    monkeypatch.setattr(native, "cause", lambda: "no compiled library")
    monkeypatch.setattr(native, "compiler", lambda: None)
    monkeypatch.setattr(remedies.shutil, "which", lambda program: program if program in programs else None)
    monkeypatch.setattr(remedies, "_is_root", lambda: root)
    first, second = installation.problems(FINE)
    assert first.problem.startswith("there is no C++ compiler")
    assert first.command == command
    assert ("install GCC or Clang first" in first.problem) == (command is None)
    assert second.command == f"{AGAIN} ."


@pytest.mark.usefixtures("no_clone")
def test_without_a_clone_it_is_said_where_the_kernels_are_built(monkeypatch):
    monkeypatch.setattr(native, "cause", lambda: "no compiled library")
    monkeypatch.setattr(native, "compiler", lambda: "c++")
    (problem,) = installation.problems(FINE)
    assert problem.problem.endswith("; in a clone of subquad, build them")
    assert problem.command == f"{AGAIN} ."


def test_kernels_on_one_thread_on_several_cores(monkeypatch):
    monkeypatch.setattr(native, "has_threads", lambda: False)
    (problem,) = installation.problems(FINE)
    assert problem.command == f"CXX=g++ {AGAIN} ."
    system(monkeypatch, "Darwin")  # where they never have it
    assert installation.problems(FINE) == []
    system(monkeypatch, "Linux")
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


@pytest.mark.parametrize(
    ("variables", "end", "command"),
    [
        ({}, "let them sleep", "export OMP_WAIT_POLICY=passive"),
        ({"OMP_WAIT_POLICY": "active"}, "let them sleep", "export OMP_WAIT_POLICY=passive"),
        ({"LD_PRELOAD": "/x/libjemalloc.so:/b/libiomp5.so"}, "one of them by LD_PRELOAD", "unset LD_PRELOAD"),
        ({"LD_PRELOAD": "/x/libjemalloc.so"}, "let them sleep", "export OMP_WAIT_POLICY=passive"),
    ],
)
def test_two_openmp_runtimes_are_named(monkeypatch, variables, end, command):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(installation, "openmp_runtimes", lambda: ["/a/libgomp.so.1", "/b/libiomp5.so"])
    (problem,) = installation.problems(FINE)
    assert problem.problem.startswith("2 OpenMP runtimes are loaded (/a/libgomp.so.1, /b/libiomp5.so), ")
    assert problem.problem.endswith(end)
    assert problem.command == command


def test_threads_that_sleep_while_they_wait_are_not_a_problem(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setattr(installation, "openmp_runtimes", lambda: ["/a/libgomp.so.1", "/b/libiomp5.so"])
    assert installation.problems(FINE) == []


TWO_RUNTIMES = """
import ctypes, sys, torch
from subquad.tools.doctor.installation import problems
before = [each.problem for each in problems() if "OpenMP runtimes" in each.problem]
ctypes.CDLL(sys.argv[1])
print(before, [each for each in problems() if "OpenMP runtimes" in each.problem], sep="\\n")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_second_runtime_in_a_real_process_is_found(tmp_path):
    brought = Path(torch.__file__).parent / "lib" / "libgomp.so.1"
    if not brought.is_file():
        pytest.skip("this torch brings no libgomp.so.1")
    other = tmp_path / "libgomp-a34b.so.1.0.0"
    other.write_bytes(brought.read_bytes())
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "LD_"))}
    done = subprocess.run(
        [sys.executable, "-c", TWO_RUNTIMES, str(other)], capture_output=True, text=True, env=variables, check=True
    )
    before, after = done.stdout.splitlines()
    assert before == "[]"
    assert str(other) in after
    assert str(brought) in after
    assert "export OMP_WAIT_POLICY=passive" in after


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
    system(monkeypatch, "Linux")
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


# ---------------------------------------------------------------------- the commands that fix


def clone_at(folder):
    folder.mkdir(parents=True)
    (folder / "constraints.txt").touch()
    (folder / "pyproject.toml").write_text('[project]\nname = "subquad"\n')
    return folder


def test_the_clone_is_the_one_that_runs_that_was_installed_or_the_current_folder(monkeypatch, tmp_path):
    running, source, current = (clone_at(tmp_path / name) for name in ("running", "a source", "current"))
    monkeypatch.setattr(remedies, "_PACKAGE", running / "src" / "subquad")
    monkeypatch.setattr(remedies, "_installed_from", lambda: {"folder": source, "editable": False})
    monkeypatch.chdir(current)
    assert remedies.clone() == running
    assert remedies.install("x>=1") == f"pip install -c {running}/constraints.txt 'x>=1'"
    (running / "constraints.txt").unlink()
    assert remedies.clone() == source
    assert remedies.build_again() == f"{AGAIN} '{source}'"
    assert remedies.install_extra("hf", {}) == (
        f"pip install -c '{source}/constraints.txt' '{source}[hf]'"  # both are one word to a shell
    )
    (source / "pyproject.toml").write_text('[project]\nname = "other"\n')
    assert remedies.clone() == current
    assert remedies.build_again() == f"{AGAIN} ."
    (current / "pyproject.toml").unlink()
    assert remedies.clone() is None


def test_an_editable_install_stays_one(monkeypatch):
    monkeypatch.setattr(remedies, "_installed_from", lambda: {"folder": ROOT, "editable": True})
    assert remedies.build_again() == f"{AGAIN} -e ."
    assert remedies.install_extra("hf", {}) == "pip install -c constraints.txt -e '.[hf]'"
    assert remedies.install("x") == "pip install -c constraints.txt x"


@pytest.mark.parametrize(
    ("recorded", "found"),
    [
        (None, {}),
        ("not JSON", {}),
        ('{"url": "file:///a/subquad.whl", "archive_info": {}}', {}),
        ('{"url": "file:///a%20b/c", "dir_info": {}}', {"folder": Path("/a b/c"), "editable": False}),
        ('{"url": "file:///a", "dir_info": {"editable": true}}', {"folder": Path("/a"), "editable": True}),
    ],
)
@pytest.mark.skipif(os.name == "nt", reason="the paths are those of POSIX")
def test_the_folder_that_was_installed_is_what_pip_recorded(monkeypatch, recorded, found):
    monkeypatch.undo()
    monkeypatch.setattr(remedies, "distribution", lambda name: SimpleNamespace(read_text=lambda file: recorded))
    assert remedies._installed_from() == found


def test_commands_are_quoted_for_the_shells_of_windows(monkeypatch):
    system(monkeypatch, "Windows")
    monkeypatch.setattr(native, "has_threads", lambda: False)
    assert installation.problems(FINE) == []
    (problem,) = installation.problems(FINE | {"torch": "1.2.3"})
    limit = requirements.untested()["torch"]
    assert problem.command == f'pip install -c constraints.txt "torch>=2.9,<{limit}"'
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    (problem,) = installation.problems(FINE)
    assert problem.command == "setx OMP_NUM_THREADS 4"


def test_every_command_is_one_that_a_shell_accepts(monkeypatch):
    """Words of a command alone, whose options pip knows; what is to be known about it stands in the problem."""
    monkeypatch.setattr(native, "cause", lambda: "no compiled library")
    monkeypatch.setattr(native, "compiler", lambda: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(installation, "openmp_runtimes", lambda: ["/a/libgomp.so.1", "/b/libiomp5.so"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(triton, "usable", lambda: False)
    found = installation.problems({"torch": "1.0", "triton": "99.0"})
    assert len(found) == 8
    for each in found:
        first, *words = shlex.split(each.command or "")
        assert first in ("pip", "apt", "dnf", "sudo", "export")
        assert not set("()`;") & set(each.command)
        if first == "pip":
            checked = subprocess.run(
                ["bash", "-c", f"pip() {{ printf '%s\\n' \"$@\"; }}; {each.command}"], capture_output=True, text=True
            )
            assert checked.stdout.split("\n")[:-1] == words


# ---------------------------------------------------------------------- the command


def doctor(*words: str, columns: int = 120) -> str:
    done = CliRunner().invoke(app, ["doctor", *words], env={"COLUMNS": str(columns)})
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


def test_commands_are_not_broken_into_lines(monkeypatch):
    command = f"{AGAIN} -e /home/someone/with/a/long/path/to/their/clone/of/subquad"
    found = [installation.Problem("a long problem " * 12, command), installation.Problem("by hand", None)]
    monkeypatch.setattr(installation, "problems", lambda installed: found)
    lines = doctor(columns=60).splitlines()
    assert f"    {command}" in lines
    assert lines[-1] == "by hand"


def test_the_command_prints_each_problem_with_its_command(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 9)
    printed = doctor()
    assert "9 threads share 4 cores:\n    export OMP_NUM_THREADS=4" in printed
    assert "Nothing to fix" not in printed
    record = json.loads(doctor("--json"))
    assert {"problem": "9 threads share 4 cores", "command": "export OMP_NUM_THREADS=4"} in record["problems"]
    assert record["torch"].partition("+")[0] == torch.__version__.partition("+")[0]  # metadata may lack the build
    assert record["needed"]["torch"].startswith("needs 2.9 or later")


def test_without_metadata_no_floor_is_printed(monkeypatch):
    monkeypatch.setattr(requirements, "requires", lambda package: [])
    requirements._declared.cache_clear()
    assert "needs" not in doctor()
    assert json.loads(doctor("--json"))["needed"] == {}
