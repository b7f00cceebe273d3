"""A model's folder: what is damaged in it is named in one line, and how it pools is what its files say."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import transformers

from subquad.core.errors import InputError
from subquad.hf.model_files import pooling_of, read_tokenizer
from subquad.tools.models.pretrained import load


@pytest.fixture
def folder(model, tmp_path):
    """A model's folder of one's own, with a way of pooling."""
    shutil.copytree(model("bert"), tmp_path / "model")
    (tmp_path / "model" / "1_Pooling").mkdir()
    return tmp_path / "model"


@pytest.mark.parametrize(("given", "way"), [
    ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
    ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, "mean"),
    ({"pooling_mode": "cls"}, "cls"),
    ({"pooling_mode": ["mean"]}, "mean"),
    (None, "mean"),
])  # fmt: skip
def test_pooling_is_what_the_folder_says(folder, given, way):
    if given is not None:
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(given))
    assert load(str(folder)).pooling == way


@pytest.mark.parametrize(("content", "message"), [
    ("{oops", "is not JSON"),
    ("", "is not JSON"),
    ("[" * 100_000, "nested too deeply"),
    ("[]", "must be an object with named fields, not a list"),
    ('{"pooling_mode_cls_token": "yes"}', "'pooling_mode_cls_token' must be true or false, not 'yes'"),
    ('{"pooling_mode_max_tokens": true}', "pools max_tokens, but the mean"),
    ('{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": true}', "pools cls_token and mean_tokens"),
    ('{"pooling_mode_cls_token": false}', "pools nothing"),
    ('{"pooling_mode": "lasttoken"}', "pools lasttoken"),
    ('{"pooling_mode": 5}', "pools 5"),
])  # fmt: skip
def test_another_way_of_pooling_is_refused(folder, content, message):
    (folder / "1_Pooling" / "config.json").write_text(content)
    with pytest.raises(InputError, match=message) as error:
        load(str(folder))
    assert "1_Pooling" in str(error.value)


def test_an_embedding_model_may_name_the_language_model_that_it_was_made_from(model, tmp_path):
    """The file of all-mpnet-base-v2, for example, has no weights of a language model's head."""
    shutil.copytree(model("mpnet"), tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": ["MPNetForMaskedLM"]}))
    with pytest.raises(InputError, match=r"weights are not in the file and would be random \(lm_head"):
        load(str(tmp_path / "model"))
    (tmp_path / "model" / "1_Pooling").mkdir()
    (tmp_path / "model" / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    assert load(str(tmp_path / "model")).kind == "embedding"


def test_a_language_model_is_not_pooled(model, tmp_path):
    shutil.copytree(model("gpt2"), tmp_path / "model")
    (tmp_path / "model" / "1_Pooling").mkdir()
    (tmp_path / "model" / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    assert load(str(tmp_path / "model")).kind == "causal-lm"


@pytest.mark.parametrize("name", ["bert", "mpnet", "gpt2", "t5"])
def test_a_model_without_a_tokenizer_is_refused(model, tmp_path, name):
    """transformers makes a tokenizer without words from the config alone."""
    shutil.copytree(model(name), tmp_path / "model", ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(InputError, match=r"no tokenizer in .*; save it there with tokenizer.save_pretrained"):
        read_tokenizer(str(tmp_path / "model"))


@pytest.mark.parametrize(("config", "tokenizer"), [
    (transformers.CanineConfig(), None),
    (transformers.T5Config(), transformers.ByT5Tokenizer()),
])  # fmt: skip
def test_tokenizers_of_characters_and_bytes_have_no_vocabulary_files(tmp_path, config, tokenizer):
    config.save_pretrained(tmp_path)
    if tokenizer is not None:
        tokenizer.save_pretrained(tmp_path)
    assert len(read_tokenizer(str(tmp_path))("a query")["input_ids"]) > 7


def test_pooling_of_a_hub_id_is_read_as_well(tmp_path):
    """A cache as the hub's client leaves it; the client reads where that is when it is imported."""
    there = tmp_path / "models--some--encoder"
    (there / "refs").mkdir(parents=True)
    (there / "refs" / "main").write_text("0" * 40)
    pooling = there / "snapshots" / ("0" * 40) / "1_Pooling" / "config.json"
    pooling.parent.mkdir(parents=True)
    pooling.write_text('{"pooling_mode_cls_token": true}')
    script = "from subquad.hf.model_files import pooling_of; print(pooling_of('some/encoder'))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"},
    )
    assert done.stdout == "cls\n", done.stderr


def test_a_folder_without_pooling_takes_the_mean(folder):
    assert pooling_of(str(folder)) == "mean"


@pytest.mark.parametrize(("content", "message"), [
    ('{"architectures": [5]}', "'architectures' in its config.json must be a list of names, not [5]"),
    ('{"architectures": "BertModel"}', "must be a list of names"),
    ("[1, 2]", "must be an object with named fields, not a list"),
    ("5", "must be an object with named fields, not a int"),
    ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
    ('{"a":' * 100_000, "nested too deeply"),
    ("", "is not JSON"),
    ('{"model_type": "nosuch"}', "cannot load config"),
])  # fmt: skip
def test_a_damaged_config_is_named(folder, content, message):
    (folder / "config.json").write_text(content)
    with pytest.raises(InputError) as error:
        load(str(folder))
    assert message in str(error.value)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name", ["", " ", "x" * 300, "a/" + "b" * 300, "a\nb", "a\0b", "\x1b[31m", "\ud800", "a/b/c", "~/none"]
)
def test_names_that_no_model_has(name):
    with pytest.raises(InputError) as error:
        load(name)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_files_without_an_end_are_not_read(folder, file):
    (folder / file).unlink()
    (folder / file).symlink_to("/dev/zero")
    with pytest.raises(InputError, match="is a device"):
        load(str(folder))


def test_a_file_is_no_folder(folder):
    with pytest.raises(InputError, match="it is a file; give the folder that it is in"):
        load(str(folder / "config.json"))


def test_a_tokenizer_of_another_model_is_named(folder):
    vocabulary = json.loads((folder / "tokenizer.json").read_text())
    vocabulary["model"]["vocab"] = {word: 7 * number for word, number in vocabulary["model"]["vocab"].items()}
    for token in vocabulary["added_tokens"]:
        token["id"] = vocabulary["model"]["vocab"][token["content"]]
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
    pretrained = load(str(folder))
    with pytest.raises(InputError, match=r"its tokenizer gives token [\d,]+, but the model knows 200"):
        pretrained.embed([pretrained.content_ids("attention key value query cluster softmax token model layer head")])


def test_inputs_past_the_positions_are_named(model):
    pretrained = load(model("bert"))
    with pytest.raises(InputError, match="65 tokens are past the 64 positions"):
        pretrained.embed([[5] * 65])
