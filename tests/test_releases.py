"""What a release is made of agrees: versions, floors, platforms, and the scripts that workflows run."""

import os
import re
import runpy
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

import subquad as sq

ROOT = Path(__file__).parents[1]
ARM = "tests/library/kernels/test_replay.py"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


@cache
def noxfile() -> dict[str, Any]:
    """The names of noxfile.py, which nox allows to be run once."""
    pytest.importorskip("nox", reason="the extra dev brings nox")
    return runpy.run_path(str(ROOT / "noxfile.py"))


def commands(workflow: str) -> list[str]:
    """The shell commands of a workflow."""
    jobs = yaml.safe_load((ROOT / ".github/workflows" / workflow).read_text("utf-8"))["jobs"]
    return [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]


def test_the_version_is_the_same_everywhere():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))["version"]
    assert PYPROJECT["project"]["version"] == sq.__version__ == str(cited)


def test_ci_runs_the_script_that_developers_run():
    assert "bash .ci/run" in commands("ci.yml")
    assert os.access(ROOT / ".ci/run", os.X_OK)
    assert "mkdocs build --strict" in commands("ci.yml")
    (installs,) = [command for command in commands("ci.yml") if "mkdocstrings" in command]
    assert re.findall(r"'(.*?)'", installs) == PYPROJECT["project"]["optional-dependencies"]["docs"]


@pytest.mark.parametrize(
    ("file", "packages"),
    [("tests/tools/report/test_browser.py", "'.[browser]'"), ("tests/test_evaluation.py", "'.[test]' lm_eval")],
)
def test_ci_runs_tests_that_need_what_developers_may_lack(file, packages):
    """A browser, and the LM Evaluation Harness."""
    assert (ROOT / file).exists()
    at = commands("ci.yml").index(f"pytest -m slow {file}")
    assert commands("ci.yml")[at - 1] == f"pip install -c constraints.txt {packages}"


def test_ci_runs_the_kernels_of_arm():
    assert any(command.endswith(ARM) for command in commands("ci.yml"))
    assert f"`pytest -m slow {ARM}`" in (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    assert (ROOT / ARM).exists()


def test_a_wheel_is_built_and_tested_on_every_platform():
    settings = PYPROJECT["tool"]["cibuildwheel"]
    platforms = {name.partition("-")[2] for name in settings["build"]}
    assert platforms == {"manylinux_x86_64", "manylinux_aarch64", "macosx_arm64", "win_amd64"}
    assert {settings["manylinux-x86_64-image"], settings["manylinux-aarch64-image"]} == {"manylinux_2_28"}
    assert "--exclude libgomp.so.1" in settings["linux"]["repair-wheel-command"]
    for path in re.findall(r"{project}/(\S+)", settings["test-command"]):
        assert (ROOT / path).exists()
    jobs = yaml.safe_load((ROOT / ".github/workflows/wheels.yml").read_text("utf-8"))["jobs"]
    assert len(jobs["wheel"]["strategy"]["matrix"]["os"]) == len(platforms)


def test_nox_installs_the_floors_that_are_declared():
    names = noxfile()
    extras = PYPROJECT["project"]["optional-dependencies"]
    lines = [*PYPROJECT["project"]["dependencies"], *extras["hf"], *extras["test"]]
    declared = [line.partition(";")[0] for line in lines]
    floors = names["lowest"]()
    assert {floor.partition("==")[0] for floor in floors} == set(names["WITH_FLOORS"])
    assert {floor.replace("==", ">=") for floor in floors} <= set(declared)
    assert PYPROJECT["project"]["requires-python"] == f">={names['PYTHONS'][0]}"
    assert "jaxtyping" not in names["UNCHECKED"]
    assert names["UNCHECKED"].startswith("--doctest-modules --strict-markers")


def test_ci_runs_every_session_of_versions():
    sessions = {command.removeprefix("nox -s ") for command in commands("ci.yml") if command.startswith("nox ")}
    assert sessions == {"${{ matrix.versions }}"}
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text("utf-8"))["jobs"]
    rows = jobs["versions"]["strategy"]["matrix"]["include"]
    assert {row["versions"] for row in rows} == {"oldest", "newest", "gpu-machine"}
    for row in rows:
        assert noxfile()[row["versions"].replace("-", "_")].python == row["python"]


def test_builds_are_dated_by_their_commit():
    for job in ("wheel", "sdist"):
        steps = yaml.safe_load((ROOT / ".github/workflows/wheels.yml").read_text("utf-8"))["jobs"][job]["steps"]
        runs = [step["run"] for step in steps if "run" in step]
        dated = next(i for i, run in enumerate(runs) if "SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)" in run)
        assert dated < next(i for i, run in enumerate(runs) if "cibuildwheel --" in run or "build --sdist" in run)
    assert "SOURCE_DATE_EPOCH" in PYPROJECT["tool"]["cibuildwheel"]["linux"]["environment-pass"]


def test_placeholder_addresses_are_in_two_places():
    assert all(url.startswith("https://subquad.example/") for url in PYPROJECT["project"]["urls"].values())
    tracked = [*ROOT.glob("*.*"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py")]
    files = {path.name for path in tracked if path.is_file() and "subquad.example" in path.read_text("utf-8")}
    assert files == {"pyproject.toml", "releasing.md", "README.md"}
    readme = (ROOT / "README.md").read_text("utf-8")
    assert readme.count("subquad.example") == 1
    assert f"git clone {PYPROJECT['project']['urls']['Repository']} subquad && cd subquad" in readme


def test_the_files_of_a_public_repository_are_there():
    templates = ROOT / ".github/ISSUE_TEMPLATE"
    for path in templates.glob("*.yml"):
        form = yaml.safe_load(path.read_text("utf-8"))
        assert path.name == "config.yml" or {"name", "description", "body"} <= set(form), path.name
    assert {path.stem for path in templates.glob("*.yml")} == {"bug", "config", "method", "model"}
    assert (ROOT / "SECURITY.md").is_file()
