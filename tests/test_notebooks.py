"""The notebooks run from the first cell to the last, each in a process and a folder of its own, offline."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "docs/notebooks").glob("*.ipynb"))


def cells(notebook: Path, kind: str) -> list[dict]:
    return [cell for cell in json.loads(notebook.read_text("utf-8"))["cells"] if cell["cell_type"] == kind]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_starts_with_a_title_and_stores_no_outputs(notebook: Path):
    assert cells(notebook, "markdown")[0]["source"][0].startswith("# ")
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells(notebook, "code"))


RARER = "long-documents", "own-transformer"  # two models more of what the others show
RUN = [pytest.param(path, marks=pytest.mark.long) if path.stem in RARER else path for path in NOTEBOOKS]


@pytest.mark.slow
@pytest.mark.parametrize("notebook", RUN, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook: Path, tmp_path: Path):
    if notebook.stem == "long-documents":
        pytest.importorskip("sentence_transformers")
    program = tmp_path / "program.py"
    program.write_text("\n".join("".join(cell["source"]) for cell in cells(notebook, "code")), "utf-8")
    settings = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(program)], cwd=tmp_path, env=settings, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_step_of_the_own_transformer_reads_four_tokens():
    """The notebook's claim is that a step costs the same after any number of tokens."""
    (notebook,) = (path for path in NOTEBOOKS if path.stem == "own-transformer")
    code = ["".join(cell["source"]) for cell in cells(notebook, "code")]
    names: dict[str, Any] = {"__name__": "notebook"}
    exec(f"{code[0]}\n{code[1]}", names)
    model, sizes = names["LanguageModel"](), []
    near, names["model"] = model.near, model
    model.near = lambda tokens: sizes.append(tokens.shape[1]) or near(tokens)
    exec(next(cell for cell in code if "def generate" in cell), names)
    assert len(sizes) == 100
    assert set(sizes[1:]) == {4}


def test_the_page_lists_every_notebook():
    page = (NOTEBOOKS[0].parents[1] / "tutorial.md").read_text("utf-8")
    assert len(NOTEBOOKS) == 3
    assert all(f"(notebooks/{notebook.name})" in page for notebook in NOTEBOOKS)
