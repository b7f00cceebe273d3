"""Calibration on tiny models: it fits, it goes on after an interruption, and it names what does not fit."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from subquad import hf
from subquad.core import files
from subquad.core.errors import InputError, NothingToLearn
from subquad.tools.calibrate import run as module
from subquad.tools.calibrate.run import calibrate, mean_at, save
from subquad.tools.calibrate.settings import CalibrateSettings
from subquad.tools.cli.main import app
from subquad.tools.data.texts import read_documents
from subquad.tools.models.pieces import cut
from subquad.tools.models.pretrained import load
from subquad.tools.runs.alone import BEGUN

LHA = "lha:buckets=3,hidden=16"


@pytest.fixture
def settings(model, text, monkeypatch):
    monkeypatch.setattr(module, "EVERY", 10)
    return CalibrateSettings(method=LHA, text=(text,), model=model("bert"), steps=40, max_length=48)


@pytest.fixture
def command(model, text):
    def run(*words, **options):
        given = {"--method": LHA, "--text": str(text), "--max-length": "48", "--steps": "2"} | options
        listed = [word for pair in given.items() if pair[1] is not None for word in pair]
        return CliRunner().invoke(app, ["calibrate", *words, *listed])

    return run


def parameters(fitted):
    return [p for bound in fitted.bounds.values() for p in bound.state_dict().values()]


@pytest.mark.parametrize(
    ("method", "metric"),
    [
        (LHA, "utility"),
        pytest.param("lha-tail:buckets=3,keys=12,cells=2", "error", marks=pytest.mark.long),
        pytest.param("tilted-pool:pools=6,window=2", "error", marks=pytest.mark.long),
        ("learned-feature-map:features=8,window=2", "error"),
    ],
)
def test_it_fits_every_layer_better_than_at_the_start(settings, tmp_path, method, metric):
    fitted = calibrate(replace(settings, method=method), tmp_path)
    history = fitted.record["history"]
    assert [entry["step"] for entry in history] == [0, 10, 20, 30, 40]
    assert set(fitted.bounds) == {0, 1}
    for number in ("0", "1"):
        best = {entry["step"]: entry for entry in history}[fitted.record["best"][number]]
        before, after = (entry["layers"][number][metric] for entry in (history[0], best))
        assert after > before if metric == "utility" else after < before
    assert fitted.record["metric"] == metric
    assert "loss" in history[1]["layers"]["0"]
    assert ("kl_query" in history[1]["layers"]["0"]) == (metric == "utility")


def test_progress_tells_every_layers_held_out_figure(settings, tmp_path):
    lines = []
    fitted = calibrate(settings, tmp_path, lambda what, done, total: lines.append((what, done, total)))
    first, last = (entry["layers"] for entry in (fitted.record["history"][0], fitted.record["history"][-1]))
    assert lines[1][0].endswith(f"by layer {first['0']['utility']:.2f} {first['1']['utility']:.2f}")
    assert "utility at step 0:" in lines[1][0]
    assert f"{last['0']['utility']:.2f}" in lines[-1][0]
    assert lines[-1][1:] == (40, 40)


def test_the_model_is_left_as_it_was(settings, tmp_path):
    before = load(settings.model).model.state_dict()
    fitted = calibrate(settings, tmp_path)
    after = fitted.pretrained.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert hf.describe(fitted.pretrained.model).methods == {}


def test_an_interrupted_run_goes_on_and_ends_with_the_same_parameters(settings, tmp_path):
    wanted = calibrate(settings, tmp_path / "whole")

    def interrupt(what, done, total):
        if done == 27:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(settings, tmp_path / "cut", interrupt)
    steps = []
    resumed = calibrate(settings, tmp_path / "cut", lambda what, done, total: steps.append(done))
    assert steps[:2] == [0, 20]  # loading, then on from the last measurement
    assert all(torch.equal(a, b) for a, b in zip(parameters(wanted), parameters(resumed), strict=True))
    assert [e["step"] for e in resumed.record["history"]] == [0, 10, 20, 30, 40]


def interrupted_at(step, settings, out):
    """The checkpoint of a run that is interrupted at this step, and the steps that it was told of."""
    steps = []

    def interrupt(what, done, total):
        steps.append(done)
        if done == step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(settings, out, interrupt)
    return next(out.rglob("checkpoint.pt")), steps


def test_a_text_that_was_changed_is_not_gone_on_with(settings, tmp_path):
    _, steps = interrupted_at(27, settings, tmp_path / "cut")
    assert steps[-1] == 27
    (text,) = settings.text
    first = min(text.glob("*.txt")) if text.is_dir() else text
    first.write_text(first.read_text()[::-1])  # as many letters as before
    calls = []
    calibrate(settings, tmp_path / "cut", lambda what, done, total: calls.append(done))
    assert calls[:2] == [0, 0]


def turn_a_bit(data):
    return data[:-40] + bytes([data[-40] ^ 4]) + data[-39:]


@pytest.mark.parametrize("damage", [turn_a_bit, lambda data: data[:200], lambda data: b"", lambda data: data[80:]])
def test_a_damaged_checkpoint_is_named_and_the_remedy_works(settings, tmp_path, damage):
    checkpoint, _ = interrupted_at(1, settings, tmp_path / "cut")
    checkpoint.write_bytes(damage(checkpoint.read_bytes()))
    with pytest.raises(InputError, match=r"checkpoint\.pt is damaged: .*; remove this file to start the calibration"):
        calibrate(settings, tmp_path / "cut")
    checkpoint.unlink()
    assert interrupted_at(2, settings, tmp_path / "cut")[1] == [0, 0, 1, 2]


def test_a_full_disk_leaves_the_earlier_checkpoint(settings, tmp_path, monkeypatch):
    checkpoint, _ = interrupted_at(1, settings, tmp_path / "cut")
    before = checkpoint.read_bytes()
    monkeypatch.setattr(files, "_to_disk", no_room)
    with pytest.raises(InputError, match=r"cannot write .*checkpoint\.pt: No space left on device; free some space"):
        calibrate(settings, tmp_path / "cut")
    assert checkpoint.read_bytes() == before


def no_room(path, data):
    path.write_bytes(data[: len(data) // 2])
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("changed", [{"seed": 1}, {"steps": 30}, {"method": "lha:buckets=4,hidden=16"}])
def test_a_run_with_other_settings_starts_anew(settings, tmp_path, changed):
    interrupted_at(12, settings, tmp_path)
    assert interrupted_at(11, settings, tmp_path)[1] == [0, 10, 11]
    assert interrupted_at(1, replace(settings, **changed), tmp_path)[1] == [0, 0, 1]


def test_it_ends_when_nothing_becomes_better(settings, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "GAIN", 10.0)
    fitted = calibrate(replace(settings, steps=200), tmp_path)
    assert fitted.record["ended"] == f"no better for {module.PATIENCE * 10} steps"
    assert fitted.record["history"][-1]["step"] == module.PATIENCE * 10


def test_each_layer_keeps_its_best_parameters(settings, tmp_path):
    fitted = calibrate(settings, tmp_path)
    again = module.Trainer(
        fitted.pretrained,
        cut(module.read_documents(settings.text), 48, settings.held_out, settings.seed),
        "",
        fitted.bounds,
        fitted.method.traits.fit,
        1,
        48,
        settings,
    )
    again._measure(tmp_path / "checkpoint.pt", {})
    for number, step in fitted.record["best"].items():
        history = {entry["step"]: entry["layers"][number] for entry in fitted.record["history"]}
        assert again.history[0]["layers"][number]["utility"] == pytest.approx(history[step]["utility"], abs=1e-5)
        assert history[step]["utility"] == max(figures["utility"] for figures in history.values())


def test_pieces_kept_apart_are_not_trained_on():
    documents = ["word " * 500, "other " * 300, "short"]
    pieces = cut(documents, 16, held_out=3, seed=0)
    assert len(pieces.held_out) == 3
    assert not set(pieces.held_out) & set(pieces.train)
    assert all(document < 2 for document, _, _ in pieces.train)
    spans = pieces.train + pieces.held_out
    assert sum(end - start for _, start, end in spans) == pytest.approx(2500 + 1800, abs=100)
    read = [span for step in range(len(pieces.train)) for span in pieces.order(step, 1, seed=5)]
    assert sorted(read) == sorted(pieces.train)
    assert pieces.order(len(pieces.train), 1, seed=5) == pieces.order(len(pieces.train), 1, seed=5)


def test_the_saved_adapter_loads(settings, tmp_path):
    fitted = calibrate(settings, tmp_path / "run")
    save(fitted, tmp_path / "adapter")
    assert sorted(p.name for p in (tmp_path / "adapter").iterdir()) == [
        "README.md",
        "adapter.json",
        "adapter.safetensors",
    ]
    model = load(settings.model).model
    hf.load_adapter(model, tmp_path / "adapter")
    loaded = [p for bound in hf.bounds(model).values() for p in bound.state_dict().values()]
    assert all(torch.equal(a, b) for a, b in zip(parameters(fitted), loaded, strict=True))
    card = (tmp_path / "adapter" / "README.md").read_text()
    assert "`buckets=3`" in card
    assert f'sq.hf.load_adapter(model, "{(tmp_path / "adapter").name}")' in card
    assert f"→ {mean_at(fitted.record['history'][-1], 'utility'):.1f}"[:4] in card


def test_layers_that_cannot_run_the_method_are_left_out_and_named(settings, model, tmp_path):
    fitted = calibrate(replace(settings, model=model("modernbert"), steps=2), tmp_path)
    assert set(fitted.bounds) == {0}
    assert set(fitted.refused) == {1, 2}
    assert "window" in fitted.refused[1]


def test_a_causal_model_takes_strictly_causal_buckets_only(settings, model, tmp_path):
    with pytest.raises(InputError, match=r"no layer of .* can run lha.*not causal and this layer is"):
        calibrate(replace(settings, model=model("gpt2")), tmp_path)
    strict = replace(settings, model=model("gpt2"), method="lha:buckets=3,hidden=16,selection=argmax", steps=3)
    assert set(calibrate(strict, tmp_path).bounds) == {0, 1}


# ---------------------------------------------------------------------- the command


def test_the_command_writes_an_adapter_and_a_table(command, model, tmp_path):
    result = command(model("bert"), "-o", str(tmp_path / "made"))
    assert result.exit_code == 0, result.output
    assert "mean" in result.output
    names = ["README.md", "adapter.json", "adapter.safetensors"]  # and no checkpoints
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == names


@pytest.mark.parametrize(
    ("method", "length", "says"),
    [("linformer:k=8", "48", True), ("linformer:k=8", "64", False), ("tilted-pool:pools=6,window=2", "48", False)],
)
def test_positions_that_no_passage_reached_are_named(command, model, tmp_path, method, length, says):
    result = command(model("bert"), "-o", str(tmp_path / "made"), **{"--method": method, "--max-length": length})
    assert result.exit_code == 0, result.output
    line = "for at most 64 tokens, and no passage was longer than 48: parameters of later positions have their"
    for text in (result.output, (tmp_path / "made" / "README.md").read_text()):
        assert (line in " ".join(text.split())) is says


def test_the_command_prints_its_record_as_json(command, model, tmp_path):
    result = command(model("bert"), "--json", "-o", str(tmp_path / "made"))
    assert json.loads(result.stdout)["method"]["name"] == "lha"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"--text": None}, "no text to fit on: give --text"),
        ({"--text": "nowhere.txt"}, "nowhere.txt"),
        ({"--method": "clustered"}, "'clustered' has nothing to calibrate: it has no learned parameters"),
        ({"--method": "lah"}, "no method 'lah'; did you mean"),
        ({"--method": "lha:buckets=0"}, "buckets=0 takes their number from bucket_size"),
        ({"--max-length": "4096"}, "max-length 4096 is past the 64 positions"),
        ({"--steps": "0"}, "steps 0 is too few: give 1 or more"),
        ({"--batch": "-1"}, "batch -1 is too few: give 1 or more"),
        ({"--max-length": "3"}, "max-length 3 is too short: passages have 16 tokens or more"),
        ({"--max-length": "0"}, "max-length 0 is too short: passages have 16 tokens or more"),
        ({"--method": "routing"}, "learn in training, by the task's own loss"),
        ({"--method": "lha-tail:keys=48"}, "is exact attention on passages of at most 48 tokens"),
        ({"--device": "nope"}, "nope"),
    ],
)
def test_mistakes_end_in_one_line_and_again_when_repeated(command, model, tmp_path, options, says):
    for _ in range(2):
        result = command(model("bert"), "-o", str(tmp_path / "made"), **options)
        assert result.exit_code == 2
        assert says in " ".join(result.stderr.split())
    assert not (tmp_path / "made" / "adapter.json").exists()


def test_what_lies_in_the_folder_is_not_replaced(command, model, tmp_path):
    (tmp_path / "README.md").write_text("mine")
    result = command(model("bert"), "-o", str(tmp_path))
    assert result.exit_code == 2
    assert "has a README.md" in " ".join(result.stderr.split())
    assert command(model("bert"), "-o", str(tmp_path / "made")).exit_code == 0
    before = (tmp_path / "made" / "adapter.safetensors").read_bytes()
    other = {"--method": "lha:buckets=5"}
    refused = command(model("bert"), "-o", str(tmp_path / "made"), **other)
    assert refused.exit_code == 2
    assert f"with --method '{LHA}' (now 'lha:buckets=5')" in " ".join(refused.stderr.split())
    assert (tmp_path / "made" / "adapter.safetensors").read_bytes() == before


def test_a_finished_run_is_shown_again_and_replaced_only_if_that_is_asked_for(command, model, text, tmp_path):
    out, options = ("-o", str(tmp_path)), {"--method": "lha:buckets=5"}
    first, again = (command(model("bert"), *out, "--json") for _ in range(2))
    assert "contains this run, finished on 20" in again.stderr
    assert json.loads(again.stdout) == json.loads(first.stdout)
    before = hf.read_adapter(tmp_path)
    replaced = command(model("bert"), *out, "--again", **options)
    assert replaced.exit_code == 0, replaced.output
    after = hf.read_adapter(tmp_path)
    assert [str(adapter.methods[0]) for adapter in (before, after)] == [LHA, "lha:buckets=5"]
    assert command(model("bert"), *out, **options).exit_code == 0
    mistaken = command(model("bert"), *out, **{"--method": "lah"})
    assert "no method 'lah'" in " ".join(mistaken.stderr.split())  # before anything against the folder
    later = (tmp_path / "adapter.json").stat().st_mtime + 5
    os.utime(text, (later, later))
    assert f"warning: {text} has changed since" in " ".join(command(model("bert"), *out, **options).stderr.split())


def test_an_interrupted_run_again_leaves_the_earlier_adapter(command, model, tmp_path, monkeypatch):
    def contents():
        return {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file() and path.name != BEGUN}

    def interrupt(self):
        raise KeyboardInterrupt

    out, options = ("-o", str(tmp_path)), {"--method": "lha:buckets=5"}
    assert command(model("bert"), *out).exit_code == 0
    before = contents()
    with monkeypatch.context() as patch:
        patch.setattr(module.Trainer, "take_best", interrupt)  # after the last step
        interrupted = command(model("bert"), *out, "--again", **options)
    assert interrupted.exit_code == 130
    assert contents() == before
    assert str(hf.read_adapter(tmp_path).methods[0]) == LHA
    with monkeypatch.context() as patch:
        patch.setattr(module.Trainer, "_step", None)
        resumed = command(model("bert"), *out, "--again", **options)
    assert resumed.exit_code == 0, resumed.output
    assert str(hf.read_adapter(tmp_path).methods[0]) == "lha:buckets=5"


@pytest.mark.parametrize("again", [(), ("--again",)])
def test_an_adapter_that_no_command_made_is_never_replaced(command, model, tmp_path, again):
    swapped = load(model("bert")).model
    hf.swap(swapped, "lha:buckets=3")
    hf.save_adapter(swapped, tmp_path)
    before = (tmp_path / "adapter.safetensors").read_bytes()
    refused = command(model("bert"), "-o", str(tmp_path), *again)
    assert refused.exit_code == 2
    message = "contains an adapter that sq.hf.save_adapter saved (adapter.json); give another folder with --out"
    assert message in " ".join(refused.stderr.split())
    assert (tmp_path / "adapter.safetensors").read_bytes() == before


def test_a_layer_that_runs_several_times_in_a_pass_has_means_over_its_runs(settings, model, tmp_path):
    fitted = calibrate(replace(settings, model=model("albert"), steps=10), tmp_path)
    first, last = (entry["layers"] for entry in fitted.record["history"])
    assert list(first) == list(last) == ["0"]
    assert 1 <= first["0"]["keys"] <= 48
    assert 0 < first["0"]["utility"] <= 1
    assert last["0"]["loss"] > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_method_that_is_exact_on_these_passages_is_told_in_any_dtype(settings, tmp_path, dtype):
    pretrained = load(settings.model)
    pretrained.model.to(dtype).save_pretrained(tmp_path / "model")
    pretrained.tokenizer.save_pretrained(tmp_path / "model")
    exact = replace(settings, method="lha-tail", max_length=64, model=str(tmp_path / "model"))
    with pytest.raises(NothingToLearn, match="is exact attention on passages of at most 64 tokens"):
        calibrate(exact, tmp_path / "out")


def test_paths_that_overlap_leave_nothing_held_out_that_is_fitted_on(settings, text):
    some = next(text.glob("*.txt"))
    documents = read_documents((text, some, text))
    pieces = cut(documents, 16, held_out=20, seed=0)
    fitted_on, apart = ({documents[n][a:b] for n, a, b in spans} for spans in (pieces.train, pieces.held_out))
    assert apart
    assert not apart & fitted_on


def test_a_mix_of_methods_is_fitted_by_its_error(settings, tmp_path):
    mixed = replace(settings, method="mixed-heads:methods=local:window=4+lha:buckets=3;hidden=16")
    fitted = calibrate(mixed, tmp_path)
    assert fitted.record["metric"] == "error"
    assert mean_at(fitted.record["history"][-1], "error") < mean_at(fitted.record["history"][0], "error")


def test_too_little_text_is_named(command, model, tmp_path):
    (tmp_path / "short.txt").write_text("A few words only, and then no more.")
    result = command(model("bert"), "-o", str(tmp_path / "made"), **{"--text": str(tmp_path / "short.txt")})
    assert result.exit_code == 2
    assert "the text is too short" in result.stderr


def test_a_file_is_no_folder_for_an_adapter(command, model, tmp_path):
    (tmp_path / "file").write_text("")
    result = command(model("bert"), "-o", str(tmp_path / "file"))
    assert result.exit_code == 2
    assert Path(tmp_path / "file").read_text() == ""
