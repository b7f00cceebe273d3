"""Tests of the growth of times with the length, and of a comparison's note on it."""

from dataclasses import replace

import pytest

import subquad as sq
from subquad.tools.compare.growth import crossing, curve, growth_note
from subquad.tools.compare.notes import notes_on_row
from subquad.tools.compare.schema import MethodReport
from subquad.tools.models.compare_rows import CompareRow
from subquad.tools.runs.floor import Floor
from subquad.tools.runs.records import from_plain

FLOOR = Floor("kl", 0.002)


def row(name, times, fidelity=1.0, **settings):
    method = name.partition(" ")[0].partition(":")[0]
    plain = {
        "method": name,
        "settings": {"name": method} | settings,
        "status": "exact" if name == "full" else "measured",
        "dtype": "bf16" if name.endswith(" in bf16") else "fp32",
        "fidelity": {str(n): fidelity for n in times},
        "model": {str(n): {"ms": ms} for n, ms in times.items()},
    }
    return from_plain(MethodReport, plain)


def timed(a, b, exponent, lengths=(2048, 8192)):
    return {n: a * n + b * n**exponent for n in lengths}


EXACT = row("full in bf16", timed(0.3, 3e-4, 2))
KERNEL = row("full:kernel=subquad in bf16", timed(0.3, 1e-4, 2), kernel="subquad")
TAIL = row("clustered-tail in bf16", timed(0.3, 6e-3, 1.5), 0.999)


@pytest.mark.parametrize("exponent", [1.5, 1.75, 2.0])
def test_a_curve_recovers_the_terms_that_made_the_times(exponent):
    made = curve(timed(0.25, 2e-4, exponent, (1000, 3000)), exponent)
    assert made(9000) == pytest.approx(0.25 * 9000 + 2e-4 * 9000**exponent)


@pytest.mark.parametrize("times", [{1000: 5.0, 2000: 8.0}, {1000: 1.0, 2000: 9.0}])
def test_neither_term_is_negative(times):
    """Times that grow more slowly than n, or faster than n²."""
    made = curve(times, 2.0)
    assert made(2000) == pytest.approx(times[2000])
    growth = made(4000) / made(2000)
    assert 2 - 1e-9 <= growth <= 4 + 1e-9


def test_the_two_longest_lengths_determine_a_curve_beyond_them():
    assert curve({10: 1e9, 1000: 3.0, 2000: 8.0}, 2.0)(4000) == pytest.approx(24)


@pytest.mark.parametrize("power", [1.5, 2.0])
@pytest.mark.parametrize(
    "times",
    [
        {2048: 1895.0, 8192: 12544.0, 16384: 46721.0},  # the exact kernel in benchmarks/results/compare-longer.md
        {2048: 1764.0, 8192: 10173.0, 16384: 26758.0},  # and clustered-tail
        {512: 9.0, 1024: 3.0, 2048: 900.0},
    ],
)
def test_a_curve_goes_through_all_measured_times(times, power):
    made = curve(times, power)
    assert [made(n) for n in times] == pytest.approx(list(times.values()))
    between = made(1448)  # nearer to its neighbours' times than to 0 or infinity
    assert min(times.values()) / 2 < between < max(times.values())


def test_a_crossing_is_where_the_curves_meet():
    assert crossing(lambda n: n**2, lambda n: 700 * n, 10, 10_000) == pytest.approx(700)
    assert crossing(lambda n: n**2, lambda n: 5 * n, 10, 10_000) == 10
    assert crossing(lambda n: n, lambda n: 2 * n, 10, 10_000) is None


def test_the_note_names_the_crossing_and_predicts_twice_the_longest_length():
    note = growth_note([row("full", {8192: 1e5}), EXACT, KERNEL, TAIL], [2048, 8192], FLOOR)
    assert note == (
        "clustered-tail in bf16 overtakes full:kernel=subquad in bf16, the fastest exact attention, at about 3,600 "
        "tokens (interpolated); at 16,384 tokens it is predicted to run 4.9× as fast as exact attention in bf16."
    )


def test_a_crossing_beyond_the_longest_length_is_predicted():
    slower = row("clustered-tail in bf16", timed(0.3, 1.2e-2, 1.5), 0.999)
    note = growth_note([EXACT, KERNEL, slower], [2048, 8192], FLOOR)
    assert "at about 14,000 tokens (predicted)" in note


@pytest.mark.parametrize(
    ("attention", "noise", "where"),
    [
        (1.2e-2, {}, "14,000 tokens (predicted);"),
        (1.2e-2, {2048: 1.001, 8192: 1.001}, "14,000 tokens (predicted);"),
        (1.2e-2, {512: 3.0, 2048: 1.01, 8192: 1.05}, "(predicted; with the noise of this run, 12,000 to 17,000);"),
        (1.2e-2, {2048: 1.3, 8192: 1.3}, "(predicted; with the noise of this run, 7,100 to 33,000);"),
        (1.2e-2, {8192: 4.0}, "(predicted; with the noise of this run, 3,700 or later, or never);"),
        (4e-3, {2048: 1.1, 8192: 1.1}, "1,600 tokens (interpolated; with the noise of this run, 1,100 to 2,400);"),
    ],
)
def test_noise_moves_a_crossing(attention, noise, where):
    lengths = [512, 2048, 8192, 8192]
    rows = [
        row("full in bf16", timed(0.3, 3e-4, 2, lengths)),
        row("full:kernel=subquad in bf16", timed(0.3, 1e-4, 2, lengths), kernel="subquad"),
        row("clustered-tail in bf16", timed(0.3, attention, 1.5, lengths), 0.999, block=64),
    ]
    assert where in growth_note(rows, lengths, FLOOR, noise)


def test_a_method_that_is_faster_everywhere_overtakes_nothing():
    faster = row("clustered-tail in bf16", timed(0.2, 1e-3, 1.5), 0.999, block=512)
    assert "at every length measured; at 16,384" in growth_note([EXACT, KERNEL, faster], [2048, 8192], FLOOR)


@pytest.mark.parametrize(
    ("at", "change", "where"),
    [
        (2048, {"verdict": "within the noise"}, "from 8,192 tokens on (at 2,048, the difference is within the noise);"),
        (512, {"verdict": "within the noise"}, "from 2,048 tokens on (at 512, the difference is within the noise);"),
    ],
)
def test_a_method_is_faster_from_the_first_length_on_after_which_all_are(at, change, where):
    lengths = sorted({at, 2048, 8192})
    rows = [
        row("full in bf16", timed(0.3, 3e-4, 2, lengths)),
        row("full:kernel=subquad in bf16", timed(0.3, 1e-4, 2, lengths), kernel="subquad"),
        row("clustered-tail in bf16", timed(0.2, 1e-3, 1.5, lengths), 0.999, block=256),
    ]
    rows[2].model[str(at)] = replace(rows[2].model[str(at)], **change)
    start = "clustered-tail in bf16 is faster than full:kernel=subquad in bf16, the fastest exact attention, "
    assert growth_note(rows, lengths, FLOOR).startswith(start + where)
    rows[2].model["8192"] = replace(rows[2].model["8192"], verdict="within the noise")
    assert growth_note(rows, lengths, FLOOR) == ""


def test_a_method_that_is_exact_up_to_some_length_is_faster_from_there_on():
    faster = row("clustered-tail in bf16", timed(0.2, 1e-3, 1.5), 0.999)
    note = growth_note([EXACT, KERNEL, faster], [2048, 8192], FLOOR)
    assert note.startswith(
        "clustered-tail in bf16 is exact attention up to 2,048 tokens, and beyond them it is faster than "
        "full:kernel=subquad in bf16, the fastest exact attention; at 16,384 tokens it is predicted to run"
    )


def test_a_method_that_is_faster_only_where_it_is_exact_overtakes_later():
    """Times of a processor with AMX, whose exact kernel is the faster one at 8,192 tokens."""
    rows = [
        row("full in bf16", {2048: 738.0, 8192: 5451.0}),
        row("full:kernel=subquad in bf16", {2048: 620.0, 8192: 3846.0}, kernel="subquad"),
        row("clustered-tail in bf16", {2048: 618.0, 8192: 4353.0}, 0.999),
    ]
    note = growth_note(rows, [2048, 8192], FLOOR)
    assert note.startswith(
        "clustered-tail in bf16 overtakes full:kernel=subquad in bf16, the fastest exact attention, at about 20,000 "
        "tokens (predicted)"
    )


@pytest.mark.parametrize(
    ("crossing", "at", "ms", "where"),
    [
        (900, 2048, 1e6, "at about 4,100 tokens (interpolated);"),
        (900, 512, 1.0, "at every length measured;"),
        (3600, 2048, 1.0, "at about 680 tokens (interpolated);"),
    ],
)
def test_a_crossing_lies_between_the_measured_lengths_around_it(crossing, at, ms, where):
    """Another time at one length moves the crossing there, also where the two longest lengths stay as they are."""
    lengths = (512, 2048, 4096, 8192)
    rows = [
        row("full in bf16", timed(0.3, 3e-4, 2, lengths)),
        row("full:kernel=subquad in bf16", timed(0.3, 1e-4, 2, lengths), kernel="subquad"),
        row("clustered-tail in bf16", timed(0.3, 1e-4 * crossing**0.5, 1.5, lengths), 0.999, block=256),
    ]
    assert f"at about {crossing:,} tokens (interpolated)" in growth_note(rows, lengths, FLOOR)
    rows[2].model[str(at)] = replace(rows[2].model[str(at)], ms=ms)
    assert f"the fastest exact attention, {where}" in growth_note(rows, lengths, FLOOR)


@pytest.mark.parametrize(
    ("methods", "lengths"),
    [
        ([EXACT, KERNEL, TAIL], [8192]),
        ([EXACT, KERNEL], [2048, 8192]),
        ([EXACT, KERNEL, row("clustered-tail in bf16", timed(0.3, 6e-3, 1.5), 0.9)], [2048, 8192]),
        ([EXACT, KERNEL, row("clustered-tail in bf16", {8192: 6000.0}, 0.999)], [2048, 8192]),
        ([EXACT, KERNEL, row("clustered-tail in bf16", timed(0.2, 1e-3, 1.5), 1.0, block=8192)], [2048, 8192]),
    ],
    ids=["one length", "no approximation", "none keeps the floor", "measured at one length", "exact at each length"],
)
def test_without_two_lengths_and_a_faithful_approximation_there_is_no_note(methods, lengths):
    assert growth_note(methods, lengths, FLOOR) == ""


def test_a_plan_is_not_exact_because_its_most_frequent_method_is():
    """Its other layers may run another method."""
    alone = row("clustered-tail in bf16", timed(0.2, 1e-3, 1.5), 0.999, block=8192)
    plan = replace(alone, method="plan:mine in bf16", plan="mine")
    assert growth_note([EXACT, KERNEL, alone], [2048, 8192], FLOOR) == ""
    assert "at every length measured" in growth_note([EXACT, KERNEL, plan], [2048, 8192], FLOOR)
    layers = {0: sq.ClusteredTail(), 1: sq.Local(window=8)}
    compared = CompareRow(sq.ClusteredTail(), [0, 1], plan="mine", planned=layers)
    assert notes_on_row(compared, 512, causal=True) == []
    exact = replace(compared, planned=dict.fromkeys(layers, sq.ClusteredTail()))
    assert notes_on_row(exact, 512, causal=True) == ["is exact attention on at most 1,024 tokens"]
