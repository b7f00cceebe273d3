"""Rows of all ranks are combined at once or by shares, with the same results on all ranks."""

from typing import Any

import pytest

from tests.library.distributed import launch
from tests.library.distributed.combined import KINDS, ROWS, SCORES, WIDTH

RANKS = [3, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 4))]
WAYS = "at once", "by shares"
S = ROWS * WIDTH * 4

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("ranks", RANKS)]


def found(ranks: int, way: str, kind: str) -> list[dict[str, Any]]:
    return [of_rank["combined"][way][kind] for of_rank in launch.found("tests.library.distributed.ranks", ranks)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_they_are_what_one_process_makes_of_all(ranks: int, way: str, kind: str):
    for of_rank in found(ranks, way, kind):
        assert max(of_rank["error"], of_rank["of gradient"]) <= 1e-6


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["summed", "merged"])
def test_all_ranks_have_the_same_bits(ranks: int, way: str, kind: str):
    assert len({of_rank["bits"] for of_rank in found(ranks, way, kind)}) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_by_shares_no_rank_sends_more_than_twice_its_rows(ranks: int, kind: str):
    for of_rank in found(ranks, "at once", kind):
        assert of_rank["calls"] == [1, 1]
        assert of_rank["bytes"] == [S * (ranks - 1)] * 2
    for of_rank in found(ranks, "by shares", kind):
        assert of_rank["calls"] == ([1, 1] if ranks == 2 else [2, 2])
        assert of_rank["bytes"] == [S if ranks == 2 else 2 * S * (ranks - 1) // ranks] * 2


@pytest.mark.parametrize("way", WAYS)
def test_rows_of_several_kinds_go_together(ranks: int, way: str):
    for of_rank in found(ranks, way, "mixed"):
        assert of_rank["error"] == 0
        assert of_rank["shapes"] == [[2, ROWS // 2, WIDTH], [1, 3]]
        assert of_rank["calls"] == [1 if way == "at once" or ranks == 2 else 2]


@pytest.mark.parametrize("way", WAYS)
def test_the_best_of_all_ranks_are_chosen_and_of_equal_ones_those_in_front(ranks: int, way: str):
    every = found(ranks, way, "chosen")
    for bucket, scores in enumerate(SCORES):
        order = sorted(
            (-score, rank, token)
            for rank, own in enumerate(scores[:ranks])
            for token, score in enumerate(own)
            if score > float("-inf")
        )[:5]
        empty = 5 - len(order)
        for rank, own in enumerate(every):
            assert own["rank"][bucket] == [each[1] for each in order] + [-1] * empty
            assert own["values"][bucket] == [-each[0] for each in order] + [0.0] * empty
            assert own["own"][bucket] == [token if of == rank else 4 for _, of, token in order] + [4] * empty
            assert own["mine"][bucket] == [(rank, token) in {each[1:] for each in order} for token in range(4)]
