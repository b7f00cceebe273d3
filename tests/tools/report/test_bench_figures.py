"""Exponents and crossovers, on times whose growth is known."""

from dataclasses import replace

import pytest

from subquad.tools.bench.crossovers import by_length, cells_of, crossing, crossovers, growth, names, panels
from tests.tools.report import sample_bench

PANEL = ("float32", "forward")


@pytest.mark.parametrize("power", [1, 2])
def test_growth_of_a_power_is_its_exponent(power):
    exponents = growth({n: 3e-6 * n**power for n in (384, 256, 1024, 65536)})
    assert list(exponents) == [384, 1024, 65536]
    assert list(exponents.values()) == pytest.approx([power] * 3, abs=1e-12)


def test_one_length_has_no_growth():
    assert growth({256: 1.0}) == growth({}) == {}


@pytest.mark.parametrize(("speedups", "state", "tokens"), [
    ({256: 0.5, 1024: 2.0}, "at", 512),
    ({256: 0.5, 512: 1.5, 1024: 0.5, 4096: 2.0}, "at", 2048),
    ({256: 1.01, 1024: 2.0}, "below the shortest", None),
    ({256: 0.5, 1024: 0.9}, "not reached", None),
    ({256: 2.0, 1024: 0.9}, "not reached", None),
    ({256: 0.5, 1024: 1.0}, "not reached", None),
    ({256: 1.0, 1024: 2.0}, "at", 256),
    ({}, "unknown", None),
])  # fmt: skip
def test_crossing(speedups, state, tokens):
    found = crossing(speedups)
    assert found["state"] == state
    assert found["tokens"] == (None if tokens is None else pytest.approx(tokens))
    if speedups:
        assert (found["shortest"], found["longest"]) == (256, max(speedups))


def test_crossovers_are_told_for_every_method_and_panel_but_sdpa():
    found = {(c.method, c.dtype, c.passes): c for c in crossovers(sample_bench.report().cells)}
    assert len(found) == 2 * 3
    assert found["clustered", *PANEL].state == "below the shortest"
    assert found["i-clustered:clusters=25,topk=64", *PANEL].tokens == pytest.approx(1000)


def test_a_length_without_sdpa_does_not_move_the_crossover():
    cells = sample_bench.report(not_run=[("full", 2048), ("full", 4096)]).cells
    found = next(c for c in crossovers(cells) if c.method.startswith("i-") and c.dtype == "float32")
    assert (found.state, found.longest) == ("at", 1024)
    assert found.tokens == pytest.approx(1000)


def crossover_of(**ties):
    """That of the method that crosses at 1,000 tokens; `at_512=1.1` puts a tie with that speed-up there."""
    cells = sample_bench.report().cells
    for i, cell in enumerate(cells):
        speedup = ties.get(f"at_{cell.length}")
        if speedup and (cell.method, cell.dtype, cell.passes) == ("i-clustered:clusters=25,topk=64", *PANEL):
            cells[i] = replace(cell, speedup=speedup, verdict="within the noise")
    return next(c for c in crossovers(cells) if c.method.startswith("i-"))


def test_a_tie_is_no_crossover():
    assert crossover_of().ties is None
    for tie in (0.99, 1.1):
        hidden = crossover_of(at_512=tie)
        assert (hidden.state, hidden.tokens, hidden.ties) == ("at or below", 1024, [512])
    shorter = crossover_of(at_256=1.1)
    assert (shorter.state, shorter.ties) == ("at", [256])
    assert shorter.tokens == pytest.approx(1000)
    never = crossover_of(at_1024=1.01, at_2048=1.02, at_4096=1.02)
    assert (never.state, never.tokens, never.ties) == ("not reached", None, [1024, 2048, 4096])
    everywhere = crossover_of(**{f"at_{n}": 1.03 for n in sample_bench.LENGTHS})
    assert everywhere.state == "not reached"


def test_cells_are_found_shortest_first_and_sdpa_leads():
    cells = sample_bench.report(not_run=[("clustered", 512)]).cells[::-1]
    assert panels(cells) == sample_bench.PANELS[::-1]
    assert names(cells)[0] == "full"
    assert [cell.length for cell in cells_of(cells, PANEL, "clustered")] == list(sample_bench.LENGTHS)
    assert list(by_length(cells, PANEL, "clustered", "ms")) == [256, 1024, 2048, 4096]
