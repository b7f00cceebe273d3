"""Damage to what is read again is never silent: a few mutations of each file; `tests.mutations` makes thousands."""

import random

import pytest

from tests.mutations import KINDS, NOTICED, SETS, campaign, damaged


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
def test_damage_is_refused_in_one_line_or_changes_nothing(name, tmp_path):
    found = campaign(name, tmp_path / "here", count=20)
    assert found
    for tally in found.values():
        assert set(tally) <= NOTICED
        assert tally["refused"] + tally["warned"] > tally["the same"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_mutation_changes_the_bytes(kind):
    draw = random.Random(0)
    assert all(damaged(b"some bytes", kind, draw) != b"some bytes" for _ in range(50))
