"""Attention split over two, three and four processes equals that of one, forward and backward."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.library.distributed import launch
from tests.library.distributed.cases import CASES, LONG, REFUSED, SENT
from tests.library.distributed.disagreeing import GRADIENTS, MADE, OTHERS
from tests.library.distributed.ranks import Case, Sent

RANKS = [3, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 4))]
BY_DTYPE = {"torch.float32": 1e-5, "torch.bfloat16": 2e-2, "torch.float64": 1e-10}


def found(ranks: int, *which: str) -> list[dict[str, Any]]:
    """Return each rank's findings, by the name of the case; `which` are the "long" ones."""
    return launch.found("tests.library.distributed.ranks", ranks, *which)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_outputs_and_gradients_are_those_of_one_process(ranks: int, case: Case):
    check(case, found(ranks))


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("case", LONG, ids=lambda case: case.name)
def test_outputs_and_gradients_of_more_cases(ranks: int, case: Case):
    check(case, found(ranks, "long"))


def check(case: Case, of_ranks: list[dict[str, Any]]) -> None:
    for of_rank in of_ranks:
        assert isinstance(of_rank[case.name], float), of_rank[case.name]
        assert of_rank[case.name] <= BY_DTYPE[str(case.dtype)]


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
        assert many == (few if case.mode == "summary" else 10 * few)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
def test_large_sums_are_shared_among_ranks(ranks: int):
    sums = [of_rank["large sum"] for of_rank in found(ranks)]
    assert len({x["bits"] for x in sums}) == 1
    for x in sums:
        assert max(x["error"], x["of gradient"]) <= 1e-6
        assert x["calls"] == (2 if ranks == 2 else 4)
        assert x["share of bytes"] == pytest.approx(1, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("what", [*OTHERS, *MADE, "gradients", "heads"])
def test_ranks_that_disagree_are_told_on_all_sides(what: str):
    known = {**OTHERS, **MADE, "gradients": (None, GRADIENTS), "heads": (None, "rank {last} has heads (2, 2) but")}
    for of_rank in found(3):
        said = of_rank["disagreeing"][what]
        assert said.startswith(known[what][1].format(last=2))
        assert said.endswith("; all ranks must make the same call")


@pytest.mark.slow
def test_a_process_outside_of_the_group_is_told():
    said = [of_rank["disagreeing"]["group"] for of_rank in found(3)]
    assert said[0] == "nothing"
    assert said[1].startswith("process 1 is not in the group")


@pytest.mark.slow
@pytest.mark.parametrize("does", ["os._exit(0)", pytest.param("time.sleep(60)", marks=pytest.mark.long)])
def test_a_rank_that_ends_or_hangs_ends_the_others(tmp_path: Path, does: str):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = tmp_path / "one_ends.py"
    script.write_text(ENDING.format(does=does))
    done = subprocess.run(
        [*launcher, str(script)],
        cwd=launch.ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "Lost: rank 0 of 2 waited for rank 1 in vain: it has ended, hangs, or makes another call" in done.stderr


ENDING = """
import datetime, os, time, torch, torch.distributed as dist, subquad as sq
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=4))
of = sq.distributed.Sequence.even(8)
part = of.shard(torch.randn(1, 2, 8, 4), dim=2)
sq.attention(part, part, part, method="linear", parallel=of)
if of.rank == 1:
    time.sleep(0.5)
    {does}
sq.attention(part, part, part, method="linear", parallel=of)
"""
