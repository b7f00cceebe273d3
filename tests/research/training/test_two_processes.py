"""Two processes, each with half of every batch, learn what one process learns."""

import json
from pathlib import Path

import pytest
import torch

from subquad.research.training.run import train
from tests.library.distributed import launch
from tests.research.training.small import small, without_times
from tests.research.training.two import COMMON, RUNS, run

NAMES = [pytest.param(name, marks=pytest.mark.long if i % 3 else []) for i, name in enumerate(RUNS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("two")
    log = launch.fork("tests.research.training.two", 2, out)
    # What both wrote counts; torch's threads may abort a process that is already done, as the interpreter ends.
    assert all((out / f"{name}.pt").exists() for name in RUNS), log[-3000:]
    return out


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_curves_and_weights_are_those_of_one_process(name: str, folder: Path, tmp_path: Path):
    two = json.loads((folder / f"{name}.json").read_text())
    assert two["checksums"][0] == two["checksums"][1]  # weights, centroids, counts of passes: bit for bit
    one = run(name, tmp_path)
    history = without_times(one.history)
    assert [entry["step"] for entry in two["history"]] == [entry["step"] for entry in history]
    for ours, theirs in zip(two["history"], history, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    weights = torch.load(folder / f"{name}.pt", weights_only=True)
    for key, tensor in one.model.state_dict().items():
        torch.testing.assert_close(weights[key], tensor, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_one_process_goes_on_with_a_run_of_two(folder: Path, tmp_path: Path):
    longer = small(*COMMON, *RUNS["longer"], "training.steps=32")
    parts = train(longer, folder / "longer")
    whole = train(longer, tmp_path)
    assert parts.steps == 32
    for ours, theirs in zip(without_times(parts.history)[-2:], without_times(whole.history)[-2:], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
