"""Attention split over two, three and four processes equals that of one, forward and backward."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.parallel import launch
from tests.parallel.cases import CASES, REFUSED, SENT
from tests.parallel.ranks import Case, Sent

RANKS = [3, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 4))]
BY_DTYPE = {"torch.float32": 1e-5, "torch.bfloat16": 2e-2, "torch.float64": 1e-10}


def found(ranks: int) -> list[dict[str, Any]]:
    """What each rank found, by the name of the case."""
    return launch.found("tests.parallel.ranks", ranks)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_outputs_and_gradients_are_those_of_one_process(ranks: int, case: Case):
    for of_rank in found(ranks):
        assert isinstance(of_rank[case.name], float), of_rank[case.name]
        assert of_rank[case.name] <= BY_DTYPE[str(case.dtype)] * 4


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_what_cannot_be_split_is_refused_on_every_rank(case: Case):
    for of_rank in found(3):
        assert "use " in of_rank[case.name], of_rank[case.name]
        assert "\n" not in of_rank[case.name]


@pytest.mark.slow
@pytest.mark.parametrize("case", SENT, ids=lambda case: case.name)
def test_summaries_do_not_grow_with_the_length(case: Sent):
    for of_rank in found(3):
        (few, calls), (many, again) = of_rank[case.name]
        assert calls == again == case.calls
        assert many == (10 * few if case.mode == "heads" else few)


@pytest.mark.slow
def test_ranks_that_disagree_are_told_on_all_sides():
    for of_rank in found(3):
        assert of_rank["disagreeing"] == "rank 2 has the seed 1 but rank 0 has 0; all ranks must make the same call"


@pytest.mark.slow
def test_a_rank_that_ends_ends_the_others(tmp_path: Path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = tmp_path / "one_ends.py"
    script.write_text(ENDING)
    done = subprocess.run(
        [*launcher, str(script)],
        cwd=launch.ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "RuntimeError: rank 0 of 2 waited for the others in vain" in done.stderr


ENDING = """
import os, time, torch, torch.distributed as dist, subquad as sq
dist.init_process_group("gloo")
of = sq.parallel.Sequence.even(8)
part = of.shard(torch.randn(1, 2, 8, 4), dim=2)
sq.attention(part, part, part, method="linear", parallel=of)
if of.rank == 1:
    time.sleep(0.5)
    os._exit(0)
sq.attention(part, part, part, method="linear", parallel=of)
"""
