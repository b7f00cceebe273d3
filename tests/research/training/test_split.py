"""Processes that share the tokens of each input learn what one process learns."""

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from subquad.research.training import trainer
from subquad.research.training.run import train
from tests.library.distributed import launch
from tests.research.training.split import LONGER, MODELS, RUNS, SHORTER, kept, settings, write_data

# Processes, how many of them share an input, and whether all share the weights: three have unequal parts of an input,
# four are two groups of two.
LAYOUTS = {
    "3": (3, 3, "false"),
    "2x2": (4, 2, "false"),
    "2, sharded": (2, 1, "true"),
    "2x2, sharded": (4, 2, "true"),
    "2": (2, 2, "false"),
    "4": (4, 4, "false"),
}


@pytest.fixture(scope="module")
def each_step() -> Any:
    """The loss of every step is in the log."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "SHOWN", 1)
        yield


@cache
def folder(layout: str) -> Path:
    """The folder of a run of these processes, in which one process had begun another one."""
    count, sequence, fsdp = LAYOUTS[layout]
    out = Path(mkdtemp())
    write_data(out)
    train(settings("lm", out, *SHORTER), out / "of one")
    log = launch.fork("tests.research.training.split", count, out, str(sequence), fsdp)
    assert all((out / f"{rank}.json").exists() for rank in range(count)), log[-3000:]
    return out


def found(layout: str) -> dict[str, Any]:
    """The findings of the first process."""
    return json.loads((folder(layout) / "0.json").read_text())


@cache
def of_one(name: str) -> dict[str, Any]:
    """The same run in one process."""
    out = Path(mkdtemp())
    write_data(out)
    return kept(train(settings(name, out) if name in RUNS else settings("lm", out, *LONGER), out / "run"))


def assert_alike(have: dict[str, Any], want: dict[str, Any]) -> None:
    """Curves and figures are equal up to rounding."""
    assert [entry["step"] for entry in have["history"]] == [entry["step"] for entry in want["history"]]
    for ours, theirs in zip(have["history"], want["history"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    assert have["test"] == pytest.approx(want["test"], rel=1e-4)


RARER = [pytest.param(name, marks=pytest.mark.long) for name in ("2", "4", "2x2", "2, sharded")]
MESH = "2x2, sharded"


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", ["3", *RARER])
def test_models_have_the_loss_and_the_gradients_of_one_process(layout: str, name: str, each_step: None):
    assert found(layout)[name] < 4e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("layout", ["3", MESH, *RARER])
def test_curves_of_twenty_steps_are_those_of_one_process(layout: str, name: str, each_step: None):
    assert len(of_one(name)["history"]) == 20 + 2 + 1
    assert_alike(found(layout)["curves"][name], of_one(name))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [MESH, *RARER])
def test_several_processes_go_on_with_a_run_of_one(layout: str, each_step: None):
    assert_alike(found(layout)["curves"]["of one"], of_one("of one"))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [MESH, *RARER[2:]])
def test_one_process_goes_on_with_a_run_of_several(layout: str, each_step: None):
    out = folder(layout)
    more = kept(train(settings("lm", out, *LONGER, "training.steps=26"), out / "of one"))
    whole = kept(train(settings("lm", out, *LONGER, "training.steps=26"), out / "whole"))
    assert_alike(more, whole)
