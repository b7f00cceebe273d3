"""`subquad compare` and `plan` on two ranks: what one process finds, in one report, and how a run ends."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tests.libraries  # noqa: F401
from subquad.core.errors import InputError
from subquad.distributed import Ranks
from subquad.distributed.failures import RankLost
from subquad.hf import bind, find_layers
from subquad.methods import Full, parse_method
from subquad.tools.cli import torchrun
from subquad.tools.measure.group import ALONE, MeasuringGroup
from subquad.tools.models.compare_rows import CompareRow, row_of
from subquad.tools.models.pretrained import load
from subquad.tools.models.split_methods import check_not_fitted, split, split_refusals
from subquad.tools.runs.launcher import Stopped
from tests.library.distributed import commands, launch
from tests.tools.workflows import tiny

pytestmark = pytest.mark.slow
SAME = {"abs": 1e-4, "rel": 1e-4}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    commands.make_inputs(folder)
    return folder


@pytest.fixture(scope="module")
def said(inputs: Path) -> list[dict[str, Any]]:
    """The messages of each of two ranks, by the name of the case."""
    return launch.found("tests.library.distributed.commands", 2, str(inputs), start=launch.ran)


@pytest.fixture(scope="module")
def report(inputs: Path, said: Any) -> Any:
    """A report that two ranks wrote."""
    folder, _ = launch.ran("tests.library.distributed.commands", 2, str(inputs))
    return lambda name: json.loads((folder / name / "report.json").read_text())


def of_one(inputs: Path, out: Path, *words: str) -> Any:
    """The report of one process."""
    done = commands.run(inputs, *words, "--out", str(out))
    assert done["code"] == 0, done
    return json.loads((out / "report.json").read_text())


@pytest.mark.parametrize(("name", "words"), [("compare", commands.COMPARED), ("causal", commands.CAUSAL)])
def test_a_comparison_finds_what_one_process_finds(
    name: str, words: list[str], inputs: Path, said: Any, report: Any, tmp_path: Path
):
    assert [rank[name]["code"] for rank in said] == [0, 0], said
    assert said[1][name]["out"] == said[1][name]["err"] == ""  # one speaks
    have, want = report(name), of_one(inputs, tmp_path, *words)
    assert have["settings"]["ranks"] == 2
    assert have["command"].startswith("torchrun --nproc-per-node 2 -m subquad compare")
    assert any("split over 2 ranks" in note for note in have["notes"])
    assert [row["method"] for row in have["methods"]] == [row["method"] for row in want["methods"]]
    for row, whole in zip(have["methods"], want["methods"], strict=True):
        assert row["fidelity"] == pytest.approx(whole["fidelity"], **SAME)
        found, expected = (each["quality"]["30"] for each in (row, whole))
        assert found.pop("layer_error", {}) == pytest.approx(expected.pop("layer_error", {}), **SAME)
        expected.pop("weights_l1", None)  # not measured on ranks
        assert found == pytest.approx(expected, **SAME)
        assert all(cost["ms"] > 0 for part in ("model", "op") for cost in row[part].values())


def test_a_report_says_what_ranks_exchange(report: Any):
    rows = {row["method"]: row for row in report("compare")["methods"]}
    sent = {name: row["parallel"] for name, row in rows.items()}
    assert sent == {
        "full": ["heads"], "clustered:clusters=4": ["summary"], "lsh": ["heads"], "linformer": ["summary"],
    }  # fmt: skip
    assert "its ranks exchange summaries of their keys" in rows["linformer"]["remarks"]


def test_a_finished_run_is_read_again_and_other_ranks_do_not_overwrite_it(inputs: Path, said: Any, report: Any):
    assert [rank["again"]["code"] for rank in said] == [0, 0], said
    assert "contains this run, finished on" in said[0]["again"]["err"]
    assert report("compare")["settings"]["min_fidelity"] == 0.5
    folder, _ = launch.ran("tests.library.distributed.commands", 2, str(inputs))
    other = commands.run(inputs, *commands.COMPARED, "--out", str(folder / "compare"))
    assert other["code"] == 2
    assert "with ranks 2 (now 1)" in other["err"]


def test_one_rank_that_fails_says_why_and_the_run_resumes(said: Any, report: Any):
    cut, resumed = ([rank[name] for rank in said] for name in ("cut off", "resumed"))
    assert [rank["code"] for rank in cut] == [2, 2], cut
    assert "error: rank 1: no room for the hidden states" in cut[1]["err"]
    assert "error:" not in cut[0]["err"]
    assert [rank["code"] for rank in resumed] == [0, 0], resumed
    assert any("units come from an earlier, interrupted run" in note for note in report("resumed")["notes"])


def test_a_plan_measures_what_one_process_measures(inputs: Path, said: Any, report: Any, tmp_path: Path):
    assert [rank["plan"]["code"] for rank in said] == [0, 0], said
    have, want = report("plan"), of_one(inputs, tmp_path, *commands.PLANNED)
    assert any("split over 2 ranks" in note for note in have["notes"])
    assert have["command"].startswith("torchrun --nproc-per-node 2 -m subquad plan")
    (found,), (expected,) = have["lengths"], want["lengths"]
    assert found["tried"] == expected["tried"] == 2
    assert found.get("exact_because") == expected.get("exact_because")
    assert found["layers"].keys() == expected["layers"].keys()
    methods = {number: layer.pop("method") for number, layer in found["layers"].items()}
    assert methods == {number: layer.pop("method") for number, layer in expected["layers"].items()}
    assert set(methods.values()) != {"full"}
    for number, layer in found["layers"].items():
        assert layer == pytest.approx(expected["layers"][number], **SAME)


def test_methods_that_cannot_be_split_are_rows_with_their_reason(alone: None, tmp_path: Path):
    pretrained = load(str(tiny.save("bert", tmp_path)), group=MeasuringGroup(Ranks()))
    method = parse_method("lha:buckets=4")
    (row, exact), layers = (row_of(pretrained, each) for each in (method, Full())), find_layers(pretrained.model)
    assert split(exact, pretrained).modes == split(row, pretrained).modes == ("heads",)
    bound = bind(layers[1], method)
    bound.learned = nn.Linear(3, 3)  # parameters of no head
    own = CompareRow(method, [0, 1], bounds={1: bound})
    refused = split(own, pretrained)
    assert refused.layers == []
    assert "mode='heads' does not know which heads of 'lha' the parameter 'weight' belongs to" in refused.reason
    assert split_refusals(layers, method, pretrained.group) == split_refusals(layers, method, ALONE) == {}


def test_a_team_of_one_rank_agrees_with_itself(alone: None):
    group = MeasuringGroup(Ranks())
    assert (group.count, group.is_main, ALONE.count, ALONE.is_main) == (1, True, 1, True)
    for each in (group, ALONE):
        assert each.broadcast_from_main(lambda: {"a": 1}) == {"a": 1}
        assert each.sums(1.5, 2.0) == [1.5, 2.0]
        assert each.maximum(3.5) == 3.5
        assert each.local_tokens(7) == 7
        each.barrier()
    assert dist.is_initialized()


@pytest.mark.parametrize(
    ("device", "gpus", "found"),
    [
        ("cpu", 0, "gloo"),
        ("cuda", 0, "gloo"),  # refused where the device is checked
        ("cuda", 2, "cpu:gloo,cuda:nccl"),
        ("cuda", 1, "torchrun started 2 processes on this machine, which has 1 GPU; start 1"),
        ("cuda:1", 2, "--device cuda:1 is one GPU, but torchrun started 2 processes; give --device cuda"),
    ],
)
def test_each_rank_takes_a_gpu_of_its_own(device: str, gpus: int, found: str, monkeypatch: pytest.MonkeyPatch):
    taken: list[int] = []
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "1"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    if found.startswith(("cpu", "gloo")):
        assert torchrun._backend(device) == found
    else:
        with pytest.raises(InputError, match=found):
            torchrun._backend(device)
    assert taken == ([1] if "nccl" in found else [])


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            RankLost("rank 1 of 2 waited for rank 0 in vain"),
            "waited for rank 0 in vain; the same command resumes from here",
        ),
        (Stopped(), "the launcher stopped the run, because a process of 2 has ended; the same command resumes"),
        (InputError("no room"), "rank 1: no room"),
    ],
)
def test_the_rank_that_says_why_all_end_does_so_in_one_line(
    error: BaseException, line: str, monkeypatch: pytest.MonkeyPatch
):
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=line):
        torchrun._say(error)


def test_fitting_is_refused_on_several_ranks(alone: None, monkeypatch: pytest.MonkeyPatch):
    check_not_fitted([Path("text")], ALONE)
    two = Ranks()
    monkeypatch.setattr(two, "ranks", 2)
    check_not_fitted([], MeasuringGroup(two))
    with pytest.raises(InputError, match="--calibrate text fits in one process, but there are 2: run subquad calib"):
        check_not_fitted([Path("text")], MeasuringGroup(two))
