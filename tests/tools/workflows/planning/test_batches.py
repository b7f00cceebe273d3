"""Whole plans for batches of texts whose lengths differ."""

import json
import random

import pytest
from typer.testing import CliRunner

import subquad as sq
from subquad.tools.cli.main import app
from subquad.tools.plan import length as planning
from subquad.tools.plan import prepared
from subquad.tools.plan.settings import PlanSettings
from subquad.tools.runs.jobs import silent
from tests.tools.workflows import tiny
from tests.tools.workflows.planning.steady import make_steady


def runs_at(method, length):
    return method.method_at(length) if isinstance(method, sq.ByLength) else method


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A folder of 60 texts of 17 to 48 words."""
    folder, draw = tmp_path_factory.mktemp("mixed"), random.Random(0)
    for i, document in enumerate(tiny.documents(60, 8)):
        (folder / f"{i}.txt").write_text(" ".join(document.split()[: draw.randint(17, 48)]))
    return folder


@pytest.mark.parametrize(
    ("name", "floor"), [("bert", "--min-fidelity"), pytest.param("llama", "--min-agreement", marks=pytest.mark.long)]
)
def test_lengths_from_the_text_are_planned_and_verified_on_its_batches(
    name, floor, model, mixed, tmp_path, monkeypatch
):
    make_steady(monkeypatch.setattr)
    verified, held_out_pass = [], planning.held_out_pass

    def watched(load, item, choices, seed):
        verified.extend((load.length, choices["plan"]) for _ in choices.keys() & {"plan"})
        return held_out_pass(load, item, choices, seed=seed)

    monkeypatch.setattr(planning, "held_out_pass", watched)
    out, methods = tmp_path / "plan", "local:window=12 clustered:clusters=8"
    options = ["--batch", "3", "--lengths", "from-text", floor, "0.02", "--methods", methods, "--minutes", "3"]
    done = CliRunner().invoke(app, ["plan", model(name), "--text", str(mixed), *options, "--out", str(out)])
    assert done.exit_code == 0, done.output
    plan, report = sq.load_plan(out), json.loads((out / "report.json").read_text())
    assert len(plan.lengths) == 3
    assert [length["length"] for length in report["lengths"]] == list(plan.lengths)
    for before, length in zip((0, *plan.lengths), plan.lengths, strict=False):
        sizes = plan.verified[str(length)]["batches"]
        assert before < sizes["padded"] <= length
        assert 16 < sizes["tokens"] < sizes["padded"]
        assert sizes["batch"] == 3
        words = f"batches of 3, mean {sizes['tokens']:,.0f} tokens, padded to {sizes['padded']:,.0f}"
        assert f"{length} tokens ({words}): 2 candidates were tried on" in (out / "report.md").read_text()
        assert words in " ".join(done.output.split())
        assert words in plan.description(length)
    assert any("exact_because" not in verified for verified in plan.verified.values())
    assert "--batch 3" in report["next"]
    first = plan.lengths[0]
    planned = {number: runs_at(method, first) for number, method in plan.layers.items()}
    assert any(length > first for length, _ in verified)
    for length, methods in verified:
        if length > first:  # the shorter texts of its batches run what the plan has for them
            assert {number: runs_at(method, first) for number, method in methods.items()} == planned


def test_lengths_from_the_text_end_at_the_longest_planned_length(model, mixed, tmp_path, monkeypatch):
    monkeypatch.setattr(prepared, "PLANNED_LENGTHS", (16, 24, 32))
    settings = PlanSettings(model=model("bert"), text=(mixed,), lengths="from-text", batch=3)
    lengths = [load.length for load in prepared.prepare(settings, tmp_path, silent).loads]
    assert 24 < max(lengths) <= 32
