"""A step of by-length that starts at a measured crossover, and the file of crossovers that it is read from."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import subquad as sq
from subquad import ByLength
from subquad.core import checksums
from subquad.core.files import cache_folder
from subquad.methods.core import measured_crossovers
from subquad.methods.core.measured_crossovers import MeasuredCrossover, measured_start, read_all, read_local, store
from subquad.testing.oracle import qkv

MACHINE = measured_crossovers.machine()


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "crossovers.json"


def measured(method="clustered", tokens=811.3, state="at", **changes):
    settings = {"machine": MACHINE, "dtype": "float32", "heads": 12, "head_dim": 64, "causal": False}
    ends = {"shortest": 128, "longest": 8192}
    return MeasuredCrossover(method=method, tokens=tokens, state=state, **(settings | ends | changes))


# ---------------------------------------------------------------------- the step


def test_the_method_that_is_made_has_the_number():
    store([measured("clustered-tail")])
    method = sq.parse_method("by-length:steps=0:full:kernel=subquad + measured :clustered-tail")
    assert method.steps == "0:full:kernel=subquad+812:clustered-tail"
    assert method == ByLength({0: "full:kernel=subquad", 812: "clustered-tail"})
    assert method == ByLength({0: "full:kernel=subquad", "measured": "clustered-tail"})
    assert sq.from_dict(method.to_dict()) == method
    assert [str(method.method_at(keys)) for keys in (811, 812)] == ["full:kernel=subquad", "clustered-tail"]


def test_a_later_measurement_does_not_change_a_method_that_was_made():
    store([measured()])
    method = ByLength("0:full+measured:clustered")
    store([measured(tokens=300.0)])
    assert sq.parse_method(str(method)).steps == "0:full+812:clustered"
    assert ByLength("0:full+measured:clustered").steps == "0:full+300:clustered"


def test_the_crossover_is_that_of_the_settings():
    store([measured("i-clustered", 300.0), measured("i-clustered:clusters=5,topk=4", 9.0)])
    method = ByLength("0:full+measured:i-clustered:topk=4;clusters=5+measured:i-clustered")
    assert method.steps == "0:full+9:i-clustered:clusters=5;topk=4+300:i-clustered"
    inputs = qkv(20)
    assert method(*inputs).equal(sq.attention(*inputs, method="i-clustered:clusters=5,topk=4"))


@pytest.mark.parametrize(
    ("state", "tokens", "start"), [("at", 811.3, 812), ("at or below", 1024.0, 1024), ("below the shortest", None, 128)]
)
def test_where_a_step_starts(state, tokens, start):
    store([measured(state=state, tokens=tokens)])
    assert measured_start("clustered") == start


def test_of_several_crossovers_the_largest_counts():
    store([measured(), measured(tokens=2500.0, causal=True), measured(tokens=1024.0, dtype="bfloat16")])
    assert measured_start("clustered") == 2500


def test_a_measured_start_obeys_the_rules_of_steps():
    store([measured()])
    with pytest.raises(ValueError, match="start at 812 keys, but they must start at 0"):
        ByLength("measured:clustered")
    with pytest.raises(ValueError, match="start at 0, 900, 812 keys"):
        ByLength("0:full+900:local+measured:clustered")


def test_a_crossover_that_was_not_reached_is_refused_with_its_conditions():
    store([measured(), measured(state="not reached", tokens=None, causal=True, dtype="bfloat16")])
    with pytest.raises(ValueError, match="not faster than exact attention on this machine up to 8,192 tokens") as error:
        ByLength("0:full+measured:clustered")
    assert "(bfloat16, causal, 12 heads of 64)" in str(error.value)
    assert "`subquad doctor --measure --methods clustered`" in str(error.value)
    store([measured()])  # only what is run
    assert ByLength("0:full+measured:clustered").steps == "0:full+812:clustered"


def test_a_method_that_was_not_measured_is_refused_with_the_command(cache):
    with pytest.raises(ValueError, match="no crossover of 'clustered-tail' was measured on this machine; run") as error:
        sq.parse_method("by-length:steps=0:full+measured:clustered-tail")
    assert str(error.value).startswith("'by-length': steps='0:full+measured:clustered-tail': ")
    assert str(error.value).endswith("run `subquad doctor --measure --methods clustered-tail`")
    with pytest.raises(ValueError, match=r"--methods local\+keep`"):
        ByLength("0:full+measured:(local+keep)")
    assert not cache.exists()


# ---------------------------------------------------------------------- what a crossover depends on


@pytest.mark.parametrize("name", MACHINE)
def test_a_crossover_of_another_machine_is_not_used(name):
    store([measured(machine=MACHINE | {name: "other"})])
    assert read_local() == []
    with pytest.raises(ValueError, match="was measured on this machine") as error:
        ByLength("0:full+measured:clustered")
    assert f"(it was with {name} other; here: {name} {MACHINE[name]})" in str(error.value)


def test_the_machine_is_what_decides_about_speed(monkeypatch):
    assert set(MACHINE) == {"processor", "instructions", "threads", "torch", "subquad", "device"}
    assert MACHINE["device"] == "cpu"
    store([measured()])
    monkeypatch.setattr("torch.get_num_threads", lambda: 77)
    with pytest.raises(ValueError, match="here: threads 77"):
        measured_start("clustered")


def test_a_measurement_replaces_all_earlier_ones_of_its_method_here():
    elsewhere = measured(machine=MACHINE | {"threads": "64"})
    other, new = measured("i-clustered"), measured(tokens=200.0, causal=True)
    store([elsewhere, other, measured(), measured(dtype="bfloat16")])
    store([new])
    assert read_all() == [elsewhere, other, new]
    assert read_local() == [other, new]


# ---------------------------------------------------------------------- the file


def damages():
    yield "truncated", lambda data: data[:-20], "it is not JSON"
    yield "edited", lambda data: data.replace(b"811.3", b"100.5"), "its contents differ from what was written"
    yield "empty", lambda data: b"", "it is not JSON"
    yield "a list", lambda data: b"[]", "it is not a JSON object"
    yield "foreign", lambda data: b'{"crossovers": []}', "it has no digest"
    for content in ({"crossovers": [{"method": "clustered"}]}, {"crossovers": 3}, {}):
        sealed = checksums.sealed_json(content)
        yield json.dumps(content), lambda _, sealed=sealed: sealed, "not contain crossovers of this version of subquad"


@pytest.mark.parametrize(("change", "reason"), [pytest.param(*rest, id=name) for name, *rest in damages()])
def test_a_damaged_file_is_refused_and_replaced(cache, change, reason):
    store([measured()])
    cache.write_bytes(change(cache.read_bytes()))
    with pytest.raises(ValueError, match=r"crossovers\.json is damaged: ") as error:
        ByLength("0:full+measured:clustered")
    assert reason in str(error.value)
    assert "`subquad doctor --measure` measures again" in str(error.value)
    inputs = qkv(5)
    assert sq.attention(*inputs, method="by-length:steps=0:full+9:clustered").isfinite().all()
    store([measured()])
    assert read_all() == [measured()]


def test_what_is_read_is_what_was_stored():
    every = [measured(), measured("linear", None, "not reached"), replace(measured("lsh"), causal=True, heads=1)]
    assert store(every) == cache_folder() / "crossovers.json"
    assert read_all() == every


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch):
    def missing():
        raise RuntimeError

    monkeypatch.delenv("SUBQUAD_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", missing)
    with pytest.raises(ValueError, match="no home folder; set SUBQUAD_CACHE"):
        ByLength("0:full+measured:clustered")


def test_a_file_that_cannot_be_read_is_refused(cache, monkeypatch):
    cache.mkdir(parents=True)
    with pytest.raises(ValueError, match=r"crossovers\.json is damaged: it cannot be read"):
        ByLength("0:full+measured:clustered")
    monkeypatch.setenv("SUBQUAD_CACHE", "x" * 300)  # longer than a name may be, so that the system refuses to look
    with pytest.raises(ValueError, match=r"crossovers\.json cannot be read: File name too long"):
        ByLength("0:full+measured:clustered")


@pytest.mark.parametrize(
    "changes",
    [
        {"machine": None},
        {"machine": {**MACHINE, "threads": 2}},
        {"method": ["clustered"]},
        {"heads": "12"},
        {"causal": 0},
        {"tokens": "811"},
        {"tokens": float("nan")},
        {"longest": None},
    ],
)
def test_values_of_another_type_are_damage_even_under_their_digest(cache, changes):
    store([measured()])
    (entry,) = checksums.read_json(cache, "")["crossovers"]
    cache.write_bytes(checksums.sealed_json({"crossovers": [entry | changes]}))
    for read in (read_all, read_local, lambda: measured_start("clustered")):
        with pytest.raises(checksums.Damaged, match="it does not contain crossovers of this version"):
            read()
    store([measured(tokens=300.0)])  # which replaces the file
    assert measured_start("clustered") == 300
