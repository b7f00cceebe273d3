"""The parts of the package stand without those above them: a copy without `research`, and one without `tools` too."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import subquad

SOURCE = Path(subquad.__file__).parent
# Everything but the kernels in Triton, which load where they can run, and what starts a program.
ALL_MODULES = """
import pkgutil, sys
from importlib import import_module
import subquad
for module in pkgutil.walk_packages(subquad.__path__, "subquad."):
    if not {"triton", "__main__", "libsubquad"} & set(module.name.split(".")):
        import_module(module.name)
assert subquad.__file__.startswith(sys.argv[1]), subquad.__file__
"""
COMMANDS = """
from subquad.tools.cli.main import app
app(["--help"], standalone_mode=False)
print("listed above")
app("bench --lengths 64 --methods clustered:clusters=4 --out bench".split(), standalone_mode=False)
"""
CALLS = """
import torch, subquad as sq
query, key, value = torch.randn(3, 1, 2, 40, 8)
for name, method in sq.METHODS.items():
    if not method.traits.learned and not method.traits.needs_hidden:
        assert sq.attention(query, key, value, method=method(**method.traits.example)).isfinite().all(), name
"""


@pytest.fixture(scope="module")
def without_research(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("without-research")
    shutil.copytree(SOURCE, root / "subquad", ignore=shutil.ignore_patterns("__pycache__", "csrc", "research"))
    return root


@pytest.fixture(scope="module")
def library(without_research, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("library")
    shutil.copytree(without_research / "subquad", root / "subquad", ignore=shutil.ignore_patterns("tools"))
    return root


def python(root: Path, *words: str) -> str:
    """The output of a process that imports the copy."""
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *words], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_tools_work_without_research(without_research):
    said = python(without_research, "-c", ALL_MODULES + COMMANDS, str(without_research))
    listed, measured = said.split("listed above")
    names = {line.strip("│ ").partition(" ")[0] for line in listed.splitlines()}
    assert {"compare", "plan", "calibrate", "bench", "inspect", "needle", "report"} <= names
    assert not {"train", "tune", "reproduce"} & names
    assert "clustered:clusters=4" in measured
    assert "subquad bench" in python(without_research, "-m", "subquad", "report", "bench")


@pytest.mark.slow
def test_the_library_works_without_tools(library):
    python(library, "-c", ALL_MODULES + CALLS, str(library))


def test_importing_subquad_loads_no_tools_and_no_research():
    code = "import sys, subquad; print([m for m in sys.modules if m.startswith(('subquad.tools', 'subquad.research'))])"
    assert python(SOURCE.parent, "-c", code).strip() == "[]"
