"""A run that was killed and goes on ends as one that was not."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from subquad.core.errors import InputError
from subquad.research.papers.tasks.image import Image, Pixels
from subquad.research.papers.tasks.match import Match, Pairs
from subquad.research.training.checkpoints import check_sealed, discard_all, newest, write_checksums
from subquad.research.training.run import train
from subquad.research.training.same_data import check_same_data, mark_of
from subquad.research.training.tasks import Splits
from subquad.research.training.tasks.text_classification import Text, Texts
from subquad.research.training.tasks.windows import DrawnWindows, Windows, with_start
from tests.research.training.small import Killed, assert_same_weights, interrupted, killed_at, small, without_times

VARIANTS = {
    "dropout, several passes through the data": (
        "model.method=i-clustered:clusters=4,topk=4",
        "model.dropout=0.2",
        "task.examples=70",
        "training.schedule=halving",
    ),
    "an auxiliary loss, of accumulated passes": ("model.method=lha:buckets=2", "training.accumulate=2"),
    "features that are redrawn, bf16": (
        "model.method=performer:features=8,redraw=5",
        "training.precision=bf16",
        "training.schedule=cosine",
        "training.warmup=5",
    ),
    "centroids that move, checkpoints of the clock": (
        "model.method=routing:clusters=2",
        "training.checkpoint_minutes=1e-9",
        "training.every=0",
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_figures_and_log_are_those_of_an_uninterrupted_run(variant: str, tmp_path: Path):
    settings = small(*VARIANTS[variant])
    whole = train(settings, tmp_path / "whole")
    kills = (13, 22) if "passes through" in variant else (13,)
    parts = interrupted(settings, tmp_path / "parts", *kills)
    assert_same_weights(whole.model, parts.model)
    assert parts.test == whole.test
    assert parts.validation == whole.validation
    assert parts.best_step == whole.best_step
    assert without_times(parts.history) == without_times(whole.history)


def test_seconds_add_up(tmp_path: Path):
    outcome = interrupted(small(), tmp_path, 13)
    seconds = [entry["seconds"] for entry in outcome.history]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0
    assert outcome.seconds >= seconds[-1] - 1e-3  # the log rounds
    before = next(entry["seconds"] for entry in outcome.history if entry["step"] == 8)
    after = next(entry["seconds"] for entry in outcome.history if entry["step"] == 20)
    assert after > before


def test_a_run_that_ended_is_only_measured_again(tmp_path: Path):
    settings = small()
    first = train(settings, tmp_path)
    steps: list[int] = []
    again = train(settings, tmp_path, progress=lambda what, done, total: steps.append(done))
    assert steps == []
    assert_same_weights(first.model, again.model)
    assert (again.test, again.validation, again.steps) == (first.test, first.validation, first.steps)


def test_patience_is_counted_across_an_interruption(tmp_path: Path):
    settings = small("training.every=2", "training.patience=3", "training.learning_rate=1e-12")
    whole = train(settings, tmp_path / "whole")
    assert whole.steps == 8  # the best is the first; then three that are not better
    parts = interrupted(settings, tmp_path / "parts", 7)
    assert parts.steps == 8
    assert without_times(parts.history) == without_times(whole.history)
    ended = train(settings, tmp_path / "parts")
    assert ended.steps == 8


def test_the_best_weights_are_found_where_the_run_was_moved_to(tmp_path: Path):
    settings = small("training.learning_rate=1e-12")  # the first validation stays the best
    with pytest.raises(Killed):
        train(settings, tmp_path / "here", progress=killed_at(17))
    (tmp_path / "here").rename(tmp_path / "there")
    outcome = train(settings, tmp_path / "there")
    assert outcome.best_step == 8
    weights = torch.load(tmp_path / "there" / "checkpoint-8" / "optimizer.pt", weights_only=True)
    assert weights["state"]
    whole = train(settings, tmp_path / "whole")
    assert_same_weights(outcome.model, whole.model)


def test_a_checkpoint_that_was_cut_off_is_passed_over(tmp_path: Path):
    settings = small()
    with pytest.raises(Killed):
        train(settings, tmp_path / "parts", progress=killed_at(17))
    cut = tmp_path / "parts" / "checkpoint-16"
    (cut / "seal.json").unlink()
    (cut / "optimizer.pt").write_bytes(b"half of i")
    parts = train(settings, tmp_path / "parts")
    assert_same_weights(parts.model, train(settings, tmp_path / "whole").model)


def test_killed_before_the_first_checkpoint_it_starts_again(tmp_path: Path):
    settings = small()
    parts = interrupted(settings, tmp_path / "parts", 3)
    assert_same_weights(parts.model, train(settings, tmp_path / "whole").model)


def test_curves_have_each_step_once(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    interrupted(small("training.every=5"), tmp_path, 14)  # the curve has a point at 10, the checkpoint too
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *sorted(f"checkpoint-{step}" for step in (15, 20, 24, 5, 10) if (tmp_path / f"checkpoint-{step}").exists()),
        "data.json",
        "tensorboard",
    ]
    curves = EventAccumulator(str(tmp_path / "tensorboard"))
    curves.Reload()
    assert [event.step for event in curves.Scalars("train/loss")] == [10, 20]
    assert [event.step for event in curves.Scalars("eval/accuracy")] == [5, 10, 15, 20, 24]
    assert [event.step for event in curves.Scalars("test/accuracy")] == [24]


# ---------------------------------------------------------------------- damage


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "is not what was written":
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1 :])
    elif how == "is missing":
        path.unlink()
    else:
        path.write_bytes(content[:100])


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stopped")
    with pytest.raises(Killed):
        train(small(), out, progress=killed_at(17))
    return out


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.pt", "rng_state.pth", "trainer_state.json"])
@pytest.mark.parametrize("how", ["is not what was written", "is missing", "has 100 bytes instead of"])
def test_damage_is_named_and_the_remedy_works(file: str, how: str, stopped: Path, tmp_path: Path):
    out = tmp_path / "run"
    shutil.copytree(stopped, out)
    damage(out / "checkpoint-16" / file, how)
    with pytest.raises(InputError, match=f"checkpoint-16 is damaged .{file} {how}.*to resume from checkpoint-8"):
        train(small(), out)
    if (file, how) == ("optimizer.pt", "is missing"):
        shutil.rmtree(out / "checkpoint-16")
        assert train(small(), out).steps == 24


def test_a_damaged_seal_is_damage(stopped: Path, tmp_path: Path):
    out = tmp_path / "run"
    shutil.copytree(stopped, out)
    seal = out / "checkpoint-16" / "seal.json"
    for content in ("[1, 2", "{}", '{"files": {}}', seal.read_text().replace("optimizer.pt", "optimizer.py")):
        seal.write_text(content)
        with pytest.raises(InputError, match=r"checkpoint-16 is damaged .seal\.json is not what was written"):
            train(small(), out)


def test_a_seal_of_an_earlier_version_is_read(stopped: Path, tmp_path: Path):
    shutil.copytree(stopped, tmp_path / "run")
    seal = tmp_path / "run" / "checkpoint-16" / "seal.json"
    seal.write_text(json.dumps(json.loads(seal.read_text())["files"]))
    assert newest(tmp_path / "run") == seal.parent
    damage(seal.parent / "optimizer.pt", "is not what was written")
    with pytest.raises(InputError, match=r"optimizer\.pt is not what was written"):
        newest(tmp_path / "run")


def test_checkpoints_of_another_program_are_refused_and_stay(tmp_path: Path):
    theirs = tmp_path / "checkpoint-500" / "model.safetensors"
    theirs.parent.mkdir()
    theirs.write_text("weights of a week")
    with pytest.raises(InputError, match="contains checkpoints that subquad did not write; give another folder"):
        train(small(), tmp_path)
    assert theirs.read_text() == "weights of a week"
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-500"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"train": 5}', '{"train": {}, "digest": "0"}', "\0"])
def test_a_damaged_memory_of_the_data_is_named_and_the_remedy_works(content: str, stopped: Path, tmp_path: Path):
    shutil.copytree(stopped, tmp_path / "run")
    data = tmp_path / "run" / "data.json"
    data.write_text(content)
    splits = small().task.splits(None)
    with pytest.raises(InputError, match=r"data\.json is damaged: .*; remove this file to continue on the data"):
        check_same_data(splits, {}, tmp_path / "run")
    data.unlink()
    check_same_data(splits, {}, tmp_path / "run")
    assert data.exists()


def of_texts(texts: list[str]) -> Any:
    return Texts(Text(length=8), [(text, "a") for text in texts], ["a"])


def of_windows(texts: list[str]) -> Any:
    return Windows([with_start(np.frombuffer(text.encode(), np.uint8), 256) for text in texts], 8)


def of_drawn_windows(texts: list[str]) -> Any:
    return DrawnWindows(of_windows(texts).sequences, 8, 70, seed=0)


def of_pairs(texts: list[str]) -> Any:
    return Pairs(Match(length=4), 0, [text.encode() for text in texts], 70)


def of_images(texts: list[str]) -> Any:
    images = np.zeros((len(texts), 28, 28), np.uint8)
    images[:, 0, 0] = [text == OTHER for text in texts]
    return Pixels(Image(), images, np.zeros(len(texts), np.uint8))


OTHER = "something else"


@pytest.mark.parametrize("make", [of_texts, of_windows, of_drawn_windows, of_pairs, of_images])
def test_any_change_of_data_in_memory_is_noticed(make: Callable[[list[str]], Any], stopped: Path, tmp_path: Path):
    texts = [f"this is text {i}" for i in range(1000)]
    splits = [Splits(*[make(part)] * 3) for part in (texts, [*texts[:1], OTHER, *texts[2:]])]
    before, changed = (mark_of(part.train) for part in splits)
    assert before.pop("contents") != changed.pop("contents")
    assert before == changed  # the text is not in one of the items that are looked at
    shutil.copytree(stopped, tmp_path / "run")
    data = tmp_path / "run" / "data.json"
    data.unlink()
    check_same_data(splits[0], {}, tmp_path / "run")
    check_same_data(splits[0], {}, tmp_path / "run")
    with pytest.raises(InputError, match="other items in train; give the same data, or another folder"):
        check_same_data(splits[1], {}, tmp_path / "run")


def test_what_is_removed_is_not_taken_for_whole_when_it_is_cut_off(
    stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shutil.copytree(stopped, tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(Killed):
            discard_all(tmp_path / "run")
    assert newest(tmp_path / "run") in (None, tmp_path / "run" / "checkpoint-8", tmp_path / "run" / "checkpoint-16")
    discard_all(tmp_path / "run")
    assert not list((tmp_path / "run").glob("checkpoint-*"))


def killed(path: Path) -> None:
    (path / "model.safetensors").unlink()
    raise Killed


def test_damaged_best_weights_are_told_before_more_is_trained(tmp_path: Path):
    settings = small("training.learning_rate=1e-12")
    with pytest.raises(Killed):
        train(settings, tmp_path, progress=killed_at(17))
    assert json.loads((tmp_path / "checkpoint-16" / "trainer_state.json").read_text())["best_global_step"] == 8
    damage(tmp_path / "checkpoint-8" / "model.safetensors", "is not what was written")
    with pytest.raises(InputError, match="checkpoint-8, which has the best weights so far, is damaged"):
        train(settings, tmp_path)


def test_a_run_ends_when_its_figure_is_good_enough(tmp_path: Path):
    settings = small("training.stop_at=0.0")
    whole = train(settings, tmp_path / "whole")
    assert whole.steps == 8  # the first validation
    parts = interrupted(settings, tmp_path / "parts", 7)
    assert parts.steps == 8
    assert train(settings, tmp_path / "parts").steps == 8
    assert train(small("training.stop_at=1.1"), tmp_path / "never").steps == 24


def test_a_figure_to_stop_at_needs_validations():
    with pytest.raises(InputError, match="stop_at looks at validations: give every"):
        small("training.every=0", "training.stop_at=0.9")


def test_another_folder_can_be_sealed_too(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(InputError, match=r"seal\.json is missing; make it again"):
        check_sealed(tmp_path, "make it again")
    write_checksums(tmp_path)
    assert check_sealed(tmp_path, "make it again") == tmp_path
    (tmp_path / "model.safetensors").write_bytes(b"weighty")
    with pytest.raises(InputError, match=r"model\.safetensors is not what was written; make it again"):
        check_sealed(tmp_path, "make it again")
