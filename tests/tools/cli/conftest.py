import json
from dataclasses import replace

import pytest

from subquad.tools.bench import run as bench
from subquad.tools.runs.records import to_plain
from tests.tools.workflows.conftest import model, text

__all__ = ["model", "text"]

SMALL = ["--quick", "--lengths", "16", "--heads", "1", "--head-dim", "8", "--methods", "local:window=4"]


@pytest.fixture
def brief(monkeypatch, tmp_path):
    """A benchmark of a moment, without plots, in an empty working folder; returns its words."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "BRIEF", replace(bench.BRIEF, seconds=0.0))
    monkeypatch.setattr("subquad.tools.bench.plots.plots", lambda report: {})
    return ["bench", *SMALL, "--out", "out"]


@pytest.fixture
def put(tmp_path):
    """Write a file of JSON into a folder, which is made; returns the folder."""

    def write(name, content, folder="run"):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / name).write_text(content if isinstance(content, str) else json.dumps(to_plain(content)))
        return tmp_path / folder

    return write
