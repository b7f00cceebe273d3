"""Losses of single layers from workers are those of this process."""

from dataclasses import replace

import pytest
import torch

from subquad.core.errors import InputError
from subquad.tools.plan import run as running
from subquad.tools.plan.measure import SingleLosses
from subquad.tools.plan.planning import candidates_for
from subquad.tools.plan.prepared import loss_elsewhere, prepare
from subquad.tools.plan.settings import PlanSettings
from subquad.tools.runs.executors import LocalExecutor
from tests.tools.workflows.planning.steady import make_steady

METHODS = ("local:window=12", "clustered:clusters=8")


def silent(what, done, total):
    pass


@pytest.fixture
def settings(model, text):
    return PlanSettings(model=model("bert"), text=(text,), lengths=(64,), methods=METHODS, min_fidelity=0.3)


class Workers(LocalExecutor):
    """Three at a time, as far as the run can see; it counts what it is given."""

    description = "3 processes"
    width = 3

    def __init__(self):
        self.ran = []

    def run(self, works, told):
        self.ran.append(list(works))
        return super().run(self.ran[-1], told)


def test_a_worker_finds_the_same_from_the_settings_alone(settings, tmp_path):
    found = prepare(settings, tmp_path, silent)
    (load,) = found.loads
    candidates = candidates_for(load.model, found.methods, found.fitted)(64)
    assert {candidate.name for candidate in candidates} == set(METHODS)
    losses = SingleLosses(load)
    for candidate in candidates:
        for layers in ((0,), (0, 1)):
            wanted = losses.loss(1, {number: candidate.by_layer[number] for number in layers})
            assert loss_elsewhere(settings, tmp_path, 64, 1, candidate.name, layers) == wanted


def test_a_plan_from_workers_is_that_of_one_process(settings, tmp_path, monkeypatch):
    make_steady(monkeypatch.setattr)
    workers = Workers()
    alone = running.make(settings, tmp_path / "alone", silent)
    spread = running.make(settings, tmp_path / "spread", silent, workers)
    assert spread.plan.layers == alone.plan.layers
    assert spread.planning.lengths[0].losses == alone.planning.lengths[0].losses
    assert [len(each) for each in workers.ran[:-1]] == [3] * (len(workers.ran) - 1)
    assert "Losses of single layers were measured by 3 processes." in spread.notes
    assert not any("measured by" in note for note in alone.notes)


def test_the_inputs_of_a_dtype_have_a_model_in_it(settings, tmp_path):
    own, other = (prepare(replace(settings, dtype=dtype), tmp_path, silent) for dtype in (None, "bf16"))
    assert [found.loads[0].model.dtype for found in (own, other)] == [torch.float32, torch.bfloat16]
    with pytest.raises(InputError, match="--dtype 'half' is none of"):
        replace(settings, dtype="half")
