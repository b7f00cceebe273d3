"""The longest prompts of a comparison: few rows, one text, and early."""

import math
from dataclasses import replace

import pytest

from subquad.tools.compare import comparison
from subquad.tools.compare.compare_jobs import SEQUENCE, STEPS
from subquad.tools.compare.comparison import Comparison
from subquad.tools.compare.run import measure, prepare
from subquad.tools.compare.settings import COMPARED, LONG_BLOCKS, CompareSettings
from subquad.tools.measure.noise import ASSUMED_NOISE
from subquad.tools.models.pretrained import MAIN_LENGTH
from tests.tools.workflows.reports import report_of

pytestmark = pytest.mark.usefixtures("undisturbed")
KERNEL, HALVES = "full:kernel=subquad", "clustered:clusters=4,block=16,last=4"
LENGTH, INSTEAD, LONGEST = 48, 64, 96


@pytest.fixture
def settings(model, text, monkeypatch):
    """Those of a comparison whose default lengths are as short as the model needs."""
    monkeypatch.setitem(MAIN_LENGTH, "causal-lm", LENGTH)
    for name, value in (("LONGEST", LONGEST), ("INSTEAD", INSTEAD), ("LONG", LONGEST)):
        monkeypatch.setattr(comparison, name, value)

    def make(**changed):
        small = CompareSettings(
            model=model("llama"), text=(text,), methods=(KERNEL, HALVES), op_lengths=(32,), dtype="bf16", new_tokens=9
        )
        return replace(small, **changed)

    return make


@pytest.fixture
def compared(settings, tmp_path):
    return measure(settings(), tmp_path)


def rows_of(report):
    return {method["method"]: method for method in report["methods"]}


def test_exact_attention_in_fp32_runs_once_at_a_long_length(compared):
    report, at = report_of(compared), str(LONGEST)
    rows = rows_of(report)
    assert rows["full"]["model"][at]["repeats"] == 1
    assert rows["full"]["model"][str(LENGTH)]["repeats"] == 4
    for name in ("full in bf16", f"{KERNEL} in bf16", f"{HALVES} in bf16"):
        cost = rows[name]["model"][at]
        assert cost["repeats"] == 5
        assert cost["speedup_fp32"] > 0
        assert rows[name]["quality"][at]["kl"] >= 0
        assert rows[name]["step"][at]["repeats"] == 5
        assert rows[name]["request"][at]["ms"] > cost["ms"]
        assert "speedup_fp32" not in rows[name]["request"][at]
    assert "request" not in rows["full"] or at not in rows["full"]["request"]
    assert report["settings"]["sequences"] == {str(LENGTH): 5, at: 1}
    assert any(f"At {LONGEST} tokens, all turns read one text, exact attention in fp32 ran once" in note
               for note in report["notes"])  # fmt: skip


def test_all_turns_of_a_long_length_read_one_text(compared):
    turns = [compared.results[SEQUENCE(LONGEST, i)] for i in range(5)]
    assert all(turn.tokens == LONGEST for turn in turns)
    assert set(turns[0].rows) == {"full", "full in bf16", f"{KERNEL} in bf16", f"{HALVES} in bf16"}
    for turn in turns[1:]:
        assert set(turn.rows) == set(turns[0].rows) - {"full"}
        assert all(not each.output for each in turn.rows.values())
    assert set(compared.results[STEPS(LONGEST)].times.rows) >= set(turns[1].rows)


def test_the_noise_of_a_long_length_is_how_far_its_speedups_differ(compared, settings, tmp_path, monkeypatch):
    assert 1.0 <= report_of(compared)["noise"]["model"][str(LONGEST)] < math.inf
    monkeypatch.setattr(Comparison, "sequence_count", lambda self, length: 1)
    once = measure(settings(), tmp_path / "once")
    assert report_of(once)["noise"]["model"][str(LONGEST)] == ASSUMED_NOISE


def test_the_longest_length_comes_after_one_batch_of_the_shortest(settings):
    keys = [job.key for job in prepare(settings()).jobs()]
    first = ((LENGTH, 0), (LONGEST, 0), (LONGEST, 1), (INSTEAD, 0), (LENGTH, 1))
    assert keys[:5] == [SEQUENCE(n, i) for n, i in first]
    named = [job.key for job in prepare(settings(lengths=(32, 80, LONGEST))).jobs()]
    assert named[:5] == [SEQUENCE(n, i) for n, i in ((32, 0), (LONGEST, 0), (LONGEST, 1), (80, 0), (32, 1))]
    assert len({*keys}) == len(keys)
    third = keys.index(SEQUENCE(LONGEST, 2))  # after the requests of the shortest length alone
    assert keys.index(STEPS(LENGTH)) < third < keys.index(STEPS(LONGEST))


def test_a_shorter_length_runs_where_there_is_no_time_for_the_longest(settings, tmp_path, monkeypatch):
    predicted = Comparison._predicted

    def slow(self, kind, arguments):
        return math.inf if arguments.startswith(str(LONGEST)) else predicted(self, kind, arguments)

    monkeypatch.setattr(Comparison, "_predicted", slow)
    report = report_of(measure(settings(), tmp_path))
    assert report["settings"]["lengths"] == [LENGTH, INSTEAD]
    assert f"5 of 5 turns of {LONGEST} tokens" in report["cautions"][0]


def test_a_shorter_length_does_not_run_where_the_longest_did(compared):
    assert compared.lengths == compared.lengths_done == [LENGTH, LONGEST]
    assert compared.is_finished


def test_by_default_the_closest_methods_run_at_a_long_length(settings):
    prepared = prepare(settings(methods=COMPARED, dtype="fp32"))
    everywhere, few = ({row.name for row in prepared.rows_at(n, 0)} for n in (LENGTH, LONGEST))
    assert few == {"full", KERNEL, "clustered-tail"}
    assert few < everywhere


def test_a_shorter_maximum_or_fewer_positions_limit_the_longest_length(settings):
    assert prepare(settings(max_length=80)).lengths == [LENGTH, 80]
    assert prepare(settings(max_length=LENGTH)).lengths == [LENGTH]
    assert prepare(settings(max_length=32)).lengths == [32]


@pytest.mark.parametrize(("able", "changed", "there"), [
    (True, {"dtype": "auto"}, True),
    (True, {"dtype": "bf16"}, True),
    (True, {"dtype": "fp32"}, False),
    (True, {"dtype": "auto", "max_length": LENGTH}, False),
    (True, {"dtype": "auto", "methods": (KERNEL,)}, False),
    (False, {"dtype": "auto"}, False),
])  # fmt: skip
def test_longer_exact_blocks_are_tried_with_amx(settings, monkeypatch, able, changed, there):
    monkeypatch.setattr("subquad.tools.compare.run.has_products", lambda device, dtype: True)
    monkeypatch.setattr("subquad.tools.compare.run.has_tiles", lambda device, dtype: able and dtype == "bf16")
    prepared = prepare(settings(**{"methods": COMPARED} | changed))
    name = f"{LONG_BLOCKS} in bf16"
    assert [row.name for row in prepared.rows].count(name) == int(there)
    assert [row.name for row in prepared.rows_at(LONGEST, 1)].count(name) == int(there)
