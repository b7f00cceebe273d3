"""Weights that are not those of the model, and folders that want to run code of their own, are refused in one line."""

import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from subquad.core.errors import InputError
from subquad.tools.cli.main import app
from subquad.tools.models.pretrained import load

run = CliRunner().invoke


@pytest.fixture
def copy(model, tmp_path):
    """A model's folder of one's own, whose weights are changed by a function of their names and values."""

    def made(name, change=lambda weights: weights, **config):
        folder = tmp_path / "model"
        shutil.copytree(model(name), folder)
        weights = change(load_file(folder / "model.safetensors"))
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        there = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(there | config))
        return str(folder)

    return made


def renamed(prefix):
    return lambda weights: {prefix + name: weight for name, weight in weights.items()}


def without(part):
    return lambda weights: {name: weight for name, weight in weights.items() if part not in name}


@pytest.mark.parametrize(("name", "change", "config", "said"), [
    ("bert", renamed("encoder.inner."), {}, ["37 of the model's 39 weights", "embeddings.", "prefix 'encoder.inner.'"]),
    ("bert", renamed("module."), {}, ["prefix 'module.'", "save_pretrained"]),
    ("gpt2", renamed("_orig_mod."), {}, ["prefix '_orig_mod.'"]),
    ("bert", without("layer.1."), {}, ["16 of the model's", "encoder.layer.1.", "is not whole"]),
    ("bert", without("embeddings"), {}, ["5 of the model's", "embeddings.LayerNorm.bias", "is not whole"]),
    ("bert", lambda weights: weights, {"num_hidden_layers": 3}, ["16 of the model's", "encoder.layer.2."]),
    ("bert", lambda weights: weights, {"num_hidden_layers": 1}, ["16 weights of the file have no place", "layer.1."]),
    ("bert", lambda weights: weights, {"intermediate_size": 40}, ["have other shapes", "48", "40"]),
    ("masked", lambda weights: weights, {"num_hidden_layers": 1}, ["weights of the file have no place"]),
    ("masked", without("cls.predictions.transform"), {}, ["cls.predictions.transform"]),
    ("gpt2", without("ln_f"), {}, ["2 of the model's", "transformer.ln_f.bias"]),
])  # fmt: skip
def test_weights_that_are_not_the_models_are_refused(copy, name, change, config, said):
    folder = copy(name, change, **config)
    with pytest.raises(InputError) as error:
        load(folder)
    for words in [folder, *said]:
        assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "command",
    [
        ["compare"],
        ["inspect"],
        ["calibrate", "--method", "lha-tail"],
        ["reproduce", "spectrum", "--scale", "smoke", "--data-dir", "DATA", "--set", "texts=['t.txt']", "--set"],
    ],
)
def test_every_command_that_reads_a_model_refuses_them(copy, text, tmp_path, command):
    folder = copy("bert", renamed("encoder."))
    (tmp_path / "t.txt").write_text("some words to read. " * 200)
    command = [word.replace("DATA", str(tmp_path)) for word in command]
    given = [f"model={folder}"] if command[0] == "reproduce" else [folder, "--text", str(text)]
    done = run(app, [*command, *given, "--out", str(tmp_path / "out")])
    assert done.exit_code == 2, (done.output, done.exception)
    assert "would be random" in done.stderr
    assert done.stderr.count("error:") == 1


def test_a_missing_part_that_is_not_read_is_said(copy, text, short, tmp_path, caplog):
    folder = copy("bert", without("pooler"))
    assert load(folder).notes == ("Not in the model's file, and not read by what is measured: pooler.",)
    out = tmp_path / "out"
    done = run(app, ["compare", folder, "--text", str(text), "--methods", "local:window=4", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert load(folder).notes[0] in json.loads((out / "report.json").read_text())["notes"]
    assert f"{folder}: {load(folder).notes[0]}" in caplog.text  # on the standard error, where nobody listens
    done = run(app, ["inspect", folder, "--text", str(text), "--out", str(tmp_path / "in"), "--length", "32", "--json"])
    assert load(folder).notes[0] in json.loads(done.stdout)["notes"]
    fit = ["calibrate", folder, "--text", str(text), "--method", "lha-tail:keys=4", "--steps", "1"]
    done = run(app, [*fit, "--out", str(tmp_path / "fit")])
    assert done.exit_code == 0, done.output
    assert load(folder).notes[0] in (tmp_path / "fit" / "README.md").read_text()


def test_what_is_not_read_is_only_what_the_output_does_not_depend_on(copy):
    with pytest.raises(InputError, match=r"1 of the model's 39 weights .*embeddings\.LayerNorm\.bias"):
        load(copy("bert", without("embeddings.LayerNorm.bias")))


def test_a_head_that_is_not_measured_is_said(copy):
    folder = copy("bert", lambda weights: weights | {"classifier.weight": torch.zeros(2, 32)})
    assert load(folder).notes == (
        "Not part of the model that is measured, of the weights in its file: classifier.weight.",
    )


def test_the_demo_model_is_whole():
    pretrained = load(None)
    assert pretrained.notes == ()


# ---------------------------------------------------------------------- code and pickles

CODE = "from pathlib import Path\nPath({mark!r}).write_text('ran')\n"
CLASSES = """
from transformers import BertConfig, BertModel
class OwnConfig(BertConfig):
    model_type = "own"
class OwnModel(BertModel):
    config_class = OwnConfig
"""


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("stdin", ["yes\n", ""])
def test_a_folder_with_code_of_its_own_is_refused_and_nothing_is_asked(copy, text, tmp_path, known, stdin):
    own = {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"}
    folder = copy("bert", auto_map=own, model_type="bert" if known else "own")
    mark = tmp_path / "mark"
    Path(folder, "own.py").write_text(CODE.format(mark=str(mark)) + CLASSES)
    done = run(app, ["compare", folder, "--text", str(text), "--out", str(tmp_path / "out")], input=stdin)
    assert done.exit_code == 2
    assert done.stderr.count("error:") == 1
    assert "auto_map" in done.stderr
    assert "[y/N]" not in done.output
    assert not mark.exists()


def test_a_tokenizer_with_code_of_its_own_is_refused(copy, tmp_path):
    folder, mark = copy("bert"), tmp_path / "mark"
    Path(folder, "own.py").write_text(CODE.format(mark=str(mark)))
    for kind in ("PreTrainedTokenizerFast", "Own"):
        file = Path(folder, "tokenizer_config.json")
        given = json.loads(file.read_text()) | {
            "auto_map": {"AutoTokenizer": ["own.Own", None]},
            "tokenizer_class": kind,
        }
        file.write_text(json.dumps(given))
        with pytest.raises(InputError, match="code"):
            load(folder)
    assert not mark.exists()


def test_standard_input_that_is_closed_changes_nothing(copy, tmp_path):
    folder = copy("bert", auto_map={"AutoConfig": "own.Own"}, model_type="own")
    words = ["subquad", "compare", folder, "--out", str(tmp_path / "out")]
    script = (
        f"import runpy, sys; sys.argv = {words!r}; sys.stdin.close(); runpy.run_module('subquad', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    assert "auto_map" in done.stderr
    assert "Traceback" not in done.stderr


class Harm:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (Path(self.mark),)


def test_pickled_weights_are_read_as_tensors_alone(copy, tmp_path):
    folder, mark = Path(copy("bert")), tmp_path / "mark"
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    assert load(str(folder)).notes == ()
    torch.save(weights | {"harm": Harm(mark)}, folder / "pytorch_model.bin")
    with pytest.raises(InputError, match="cannot load model"):
        load(str(folder))
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Harm(mark)))
    with pytest.raises(InputError, match="cannot load model"):
        load(str(folder))
    assert not mark.exists()
