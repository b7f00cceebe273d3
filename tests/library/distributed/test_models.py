"""Modules and models on two, three and four processes equal those of one, forward and backward."""

import pytest

from tests.library.distributed import launch
from tests.library.distributed.models import CASES, LONG, REFUSED
from tests.library.distributed.trainer import losses

RUNS = [
    *((3, name) for name in CASES if name not in LONG),
    *(pytest.param(n, name, marks=pytest.mark.long) for n in (2, 4) for name in CASES),
]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "name"), RUNS)
def test_outputs_losses_and_gradients_are_those_of_one_process(ranks: int, name: str):
    for of_rank in launch.found("tests.library.distributed.models", ranks):
        assert isinstance(of_rank[name], float), of_rank[name]
        assert of_rank[name] <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("another group", "but the model over [0, 1, 2]; make it with the group that the model was swapped with"),
        ("vmap", "`parallel` is not supported with vmap"),
        ("a device without a backend", "the process group has no backend for these tensors"),
        ("another batch", "rank 1 has 1 items but rank 0 has 2; they must match"),
        ("one rank without a mask", "rank 0 was given attention_mask but rank 1 was not; all ranks must make one call"),
        ("positions that start anew", "position_ids of rank 1 start at 0, but 8 tokens come before its own"),
        ("packed sequences", "position_ids of rank 1 do not grow by 1 from token to token"),
        ("labels that are not shifted", "cut the batch with sq.hf.shard(model, batch)"),
    ],
)
def test_what_makes_no_sequence_is_refused_on_every_rank(name: str, message: str):
    assert name in REFUSED
    for of_rank in launch.found("tests.library.distributed.models", 3):
        assert message in of_rank[name]
        assert "\n" not in of_rank[name]


@pytest.mark.slow
def test_the_trainer_recipe_trains_as_one_process():
    alone = losses(None)
    assert len(alone) == 20
    assert alone[-1] < alone[0] - 1
    for of_rank in launch.found("tests.library.distributed.trainer", 2, start=launch.ran):
        assert of_rank["losses"] == pytest.approx(alone, abs=1e-4)
