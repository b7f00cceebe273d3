"""A model of `subquad train` that reads text: its card's recipe predicts, and the other commands take its folder."""

import json
import re
from pathlib import Path

import pytest
import torch
import transformers

import subquad as sq
from subquad.research.training.models import CausalLanguageModel, EncoderClassifier
from subquad.research.training.settings import read_toml, settings_of
from subquad.research.training.tasks.lm import Lm
from tests.tools.workflows import tiny
from tests.tools.workflows.test_saving import by_its_card, command, compared

pytest.importorskip("tensorboard")
pytestmark = pytest.mark.slow  # it trains two models
SMALL = ("model.layers=1", "model.heads=2", "model.width=16", "model.feed_forward=16", "training.batch=4")


def trained(folder: Path, task: str, method: str, *settings: str) -> Path:
    given = [word for each in (*SMALL, *settings) for word in ("--set", each)]
    assert command("train", task, "--method", method, *given, "--out", folder).exit_code == 0
    return folder


@pytest.fixture(scope="module")
def classifier(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    rows = [{"text": f"{word} {i}", "label": label} for i in range(20) for word, label in (("key", "a"), ("no", "b"))]
    (folder / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = (f"task.files={folder / 'mine.jsonl'}", "task.length=64", "training.steps=30", "task.pooling=class-token")
    return trained(folder / "mine", "text", "local:window=4", *given, "training.learning_rate=0.01")


@pytest.fixture(scope="module")
def language(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "book.txt").write_text("\n".join(tiny.documents(2)))
    given = (f"task.files={folder / 'book.txt'}", "task.length=64", "task.limit=60", "training.steps=2")
    return trained(folder / "mine", "lm", "linear", *given)


def recipe(run: Path, monkeypatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (run / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(run.parent)
    exec(code, {})


def test_the_recipe_of_a_classifier_predicts_what_was_measured(classifier, monkeypatch, capsys):
    recipe(classifier, monkeypatch)
    assert re.search(r"'label': '[ab]'", capsys.readouterr().out)
    splits = settings_of("text", read_toml(classifier / "settings.toml")).task.splits(None)
    classify = transformers.pipeline("text-classification", str(classifier / "model"), truncation=True)
    assert str(sq.hf.describe(classify).methods[0]) == "local:window=4"
    said = [found["label"] for found in classify(splits.test.texts)]
    right = [label == "ab"[wanted] for label, wanted in zip(said, splits.test.labels, strict=True)]
    record = json.loads((classifier / "results.json").read_text())
    assert sum(right) / len(right) == pytest.approx(record["test"]["accuracy"])
    assert sum(right) / len(right) > 0.7  # or all that is right is so by chance


def test_a_run_on_files_is_input_error_is_called_by_their_names(classifier):
    card, record = (classifier / "README.md").read_text(), json.loads((classifier / "results.json").read_text())
    assert record["task"]["summary"] == "bytes of the texts in mine.jsonl; accuracy of their labels"
    assert "\n\nBytes of the texts in mine.jsonl; accuracy of their labels. Attention: `local:window=4`." in card
    assert Lm(files=tuple("abcde")).title == "the next byte of a, b, c and 2 more; bits per byte"
    assert Lm(files="x/y.txt").title == "the next byte of y.txt; bits per byte"
    assert Lm().title == Lm.summary


def test_the_recipe_of_a_language_model_goes_on_with_a_text(language, monkeypatch, capsys):
    recipe(language, monkeypatch)
    assert "'generated_text': 'A text." in capsys.readouterr().out


def test_plan_reads_it(language, text, tmp_path):
    given = ("--lengths", "32", "--methods", "local:window=4", "--text", text, "--out", tmp_path / "plan")
    assert command("plan", language / "model", *given).exit_code == 0
    facts = json.loads((tmp_path / "plan" / "report.json").read_text())["model"]
    assert (facts["class"], facts["kind"]) == ("CausalLanguageModel", "causal-lm")


@pytest.mark.usefixtures("short")
def test_a_classifier_is_compared_by_its_hidden_states_and_saved_with_its_head(classifier, text, tmp_path, faster_at):
    faster_at(65)  # bytes, and the class token
    assert compared(classifier / "model", text, tmp_path, method="clustered:clusters=48").exit_code == 0
    facts = json.loads((tmp_path / "out" / "report.json").read_text())["model"]
    assert (facts["class"], facts["kind"], facts["pooling"]) == ("EncoderModel", "embedding", "cls")
    before = EncoderClassifier.from_pretrained(classifier / "model").eval()
    again = transformers.pipeline("text-classification", str(tmp_path / "saved")).model
    assert str(sq.hf.describe(again).methods[0]) == "clustered:clusters=48"
    assert torch.equal(again.head[2].weight, before.head[2].weight)
    sq.hf.swap(again, "full")
    sq.hf.swap(before, "full")
    ids = torch.arange(2, 42)[None]
    torch.testing.assert_close(again(ids).logits, before(ids).logits)


@pytest.mark.usefixtures("short")
def test_a_language_model_is_compared_and_saved(language, text, tmp_path, faster_at, monkeypatch):
    faster_at(64)
    floor = "--max-kl", "4"
    assert compared(language / "model", text, tmp_path, method="local:window=56", floor=floor).exit_code == 0
    again = by_its_card(tmp_path / "saved", monkeypatch)
    assert isinstance(again, CausalLanguageModel)
    assert str(sq.hf.describe(again).methods[0]) == "local:window=56"
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")("a")["input_ids"] == [256, 97]


def test_a_model_of_subquad_train_is_not_taken_for_a_pretrained_one(classifier, tmp_path):
    given = ("--set", f"model.pretrained={classifier / 'model'}", "--set", f"task.files={classifier}/../mine.jsonl")
    result = command("train", "text", *given, "--out", tmp_path / "run")
    assert result.exit_code == 2
    said = " ".join(result.output.split())
    assert "is a model of subquad train, but model.pretrained names a pretrained model" in said
