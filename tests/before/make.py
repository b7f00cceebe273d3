"""Write the files of this folder with an earlier version of subquad; `tests/test_before.py` reads them with this one.

They were made from commit 94e2d35, before the ops, methods, workflows and papers were put into new rooms:

    PYTHONPATH=<a checkout of 94e2d35>/src:. python tests/before/make.py

Files of a later format are added to another folder like this one; these stay as they are. Machines and versions are
made up, so that runs are resumed wherever the tests run.
"""

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import BertModel
from typer.testing import CliRunner

import subquad as sq
from subquad.cli import app
from subquad.experiments import load, run
from subquad.report.experiment_write import write_results
from subquad.report.write import write_report
from subquad.training import settings as training_settings
from subquad.training.run import train
from subquad.workflows import calibrate, compare, inspect, machine
from subquad.workflows import train as train_workflow
from subquad.workflows.compare_report import report_of
from tests.before.inputs import (
    COMPARISON,
    EXPERIMENTS,
    FIT,
    FITTED,
    INSPECTION,
    LAYERS,
    METHODS,
    SWAPPED,
    TRAINING,
    attention_inputs,
    hardware,
    hidden,
    tokens,
    versions,
)
from tests.workflows import tiny

HERE = Path(__file__).parent
for module in (machine, run, train_workflow):
    module.versions = versions
    module.hardware = hardware


class Killed(BaseException):
    """As sudden as a signal that no handler sees."""


def killed_at(name: str, done: int):
    """A progress callback that kills the run before a unit of this name, after as many."""

    def progress(what: str, so_far: int, total: int) -> None:
        if what.startswith(name) and so_far >= done:
            raise Killed

    return progress


def until_killed(call, *given, **options) -> None:
    try:
        call(*given, **options)
    except Killed:
        return
    raise AssertionError("it was never killed")


def command(*words: str) -> None:
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output


def write_json(path: str, data: object) -> None:
    Path(path).write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")


def moved(bounds) -> None:
    """Give learned parameters other values than those that they start with."""
    for bound in bounds:
        for parameter in bound.parameters():
            parameter.data.add_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter) / 2)


def model() -> BertModel:
    return BertModel.from_pretrained("bert").eval()


def outputs(model: BertModel) -> torch.Tensor:
    with torch.inference_mode():
        return model(**tokens()).last_hidden_state.contiguous()


def make_inputs() -> None:
    tiny.save("bert", Path("bert"))
    Path("text").mkdir()
    for i, document in enumerate(tiny.documents(6)):
        Path("text", f"{i}.txt").write_text(document)


def make_methods() -> None:
    """Each method as plain data and as text, and what it gives for the same inputs."""
    written = {}
    results = {}
    for text in METHODS:
        method = sq.parse_method(text)
        written[text] = {"to_dict": method.to_dict(), "text": str(method), "default": type(method)().to_dict()}
        with torch.no_grad(), sq.use_backend("reference"):
            bound = method.bind(heads=2, head_dim=8, max_length=24).eval()
            results[text] = bound(*attention_inputs()).contiguous()
    write_json("methods.json", written)
    save_file(results, "attention.safetensors")


def make_layers() -> None:
    """State dicts of layers, with what they give."""
    tensors = {}
    for text in LAYERS:
        torch.manual_seed(0)
        layer = sq.nn.MultiheadAttention(16, 2, method=text, max_length=24).eval()
        moved([layer])
        with torch.no_grad():
            out = layer(hidden())
        tensors |= {f"{text}/{name}": tensor.clone() for name, tensor in layer.state_dict().items()}
        tensors[f"{text}//out"] = out.contiguous()
    save_file(tensors, "layers.safetensors")


def make_adapters() -> None:
    results = {}
    for name, method in FITTED.items():
        adapted = model()
        sq.hf.swap(adapted, method)
        moved(sq.hf.bounds(adapted).values())
        sq.hf.save_adapter(adapted, f"adapters/{name}", record={"steps": 3}, card="# a card")
        results[f"adapters/{name}"] = outputs(adapted)
        if name == "lha":
            adapted.save_pretrained("swapped-learned")
    swapped = model()
    sq.hf.swap(swapped, dict(enumerate(SWAPPED)))
    results["swapped"] = outputs(swapped)
    swapped.save_pretrained("swapped")
    save_file(results, "outputs.safetensors")


def make_compare() -> None:
    settings = compare.CompareSettings(model="bert", text=(Path("text"),), **COMPARISON)
    until_killed(compare.measure, settings, Path("compare-cut"), killed_at("stretch/96", 0))
    write_report(report_of(compare.measure(settings, Path("compare"))), Path("compare"))
    shutil.rmtree("compare/.progress")
    for path in Path("compare").iterdir():
        if path.name != "report.json":
            path.unlink()


def make_bench() -> None:
    words = ("bench", "--methods", "clustered:clusters=4 lha:buckets=2", "--lengths", "32,64", "--quick")
    command(*words, "--out", "bench")
    for path in Path("bench").iterdir():
        if path.name != "bench.json":
            path.unlink()


def make_calibrate() -> None:
    calibrate.EVERY = 10
    settings = calibrate.CalibrateSettings(model="bert", text=(Path("text"),), **FIT)
    until_killed(calibrate.calibrate, settings, Path("calibrate-cut"), killed_at("", 25))
    fitted = calibrate.calibrate(settings, Path("calibrate"))
    calibrate.save(fitted, Path("calibrate"))


def make_inspect() -> None:
    settings = inspect.InspectSettings(model="bert", text=(Path("text"),), **INSPECTION)
    until_killed(inspect.measure, settings, Path("inspect-cut"), killed_at("layer/1", 2))


def make_train() -> None:
    settings = training_settings.settings_of("masked-copy", training_settings.read_overrides(TRAINING))
    train_workflow.run(settings, Path("train"), data=None, device="cpu", resume=False, progress=killed_at("", 10**9))
    Path("train-cut").mkdir()
    shutil.copy("train/settings.toml", "train-cut")
    until_killed(train, settings, Path("train-cut"), progress=killed_at("", 20))
    for path in Path("train").iterdir():
        if path.name.startswith(("checkpoint", "tensorboard")):
            shutil.rmtree(path)
    shutil.rmtree("train-cut/tensorboard")


def make_experiments() -> None:
    for name in EXPERIMENTS:
        out = Path("reproduce", name)
        header, results, cells = run.reproduce(load(name), "smoke", out)
        write_results(header, results, cells, out)
        for path in out.rglob("*"):
            if path.is_file() and path.suffix != ".json":
                path.unlink()


def main() -> None:
    torch.set_num_threads(1)
    os.chdir(HERE)
    for path in HERE.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
    make_inputs()
    make_methods()
    make_layers()
    make_adapters()
    make_compare()
    make_bench()
    make_calibrate()
    make_inspect()
    make_train()
    make_experiments()


if __name__ == "__main__":
    main()
