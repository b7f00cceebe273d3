"""Time and memory."""

import os
import time

import pytest
import torch

from subquad.measure.memory import peak_extra_mib
from subquad.measure.timing import cost, interleaved, stopwatch


def test_interleaved_runs_every_call_once_a_round():
    calls = []
    seconds = interleaved({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=3)
    assert calls == ["a", "b"] * 3
    assert [len(seconds[name]) for name in "ab"] == [3, 3]


def test_stopwatch_returns_time_and_result():
    seconds, result = stopwatch(lambda: time.sleep(0.02) or 5)
    assert seconds >= 0.02
    assert result == 5


def test_the_speedup_is_the_median_of_ratios_within_rounds():
    figures = cost([1.0, 10.0, 2.0], [2.0, 30.0, 2.0], extra_mib=7.0)
    assert figures["speedup"] == 2.0
    assert figures["ms"] == 2000.0
    assert (figures["ms_low"], figures["ms_high"]) == (1500.0, 6000.0)
    assert (figures["repeats"], figures["extra_mib"]) == (3, 7.0)
    assert cost([1.0], [3.0])["ms_low"] == 1000.0


@pytest.mark.parametrize("mib", [1, 8])
def test_peak_memory_counts_temporaries_at_their_highest(mib):
    numbers = mib * 2**20 // 4

    def call():
        first = torch.ones(numbers) * 2  # two at once
        del first
        return torch.ones(numbers)

    peak, returned = peak_extra_mib(call)
    assert peak == pytest.approx(2 * mib, rel=0.01)
    assert returned.shape == (numbers,)


def test_what_was_there_before_does_not_count():
    before = torch.ones(2**20)
    assert peak_extra_mib(lambda: before.sum())[0] < 0.1


def test_standard_error_works_again_afterwards(capfd):
    peak_extra_mib(lambda: torch.ones(3))
    os.write(2, b"still here")
    assert capfd.readouterr().err == "still here"
