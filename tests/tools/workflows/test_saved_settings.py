"""`--save`: the settings of the saved model are the original's; what differs is printed and stands in the card."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer

import subquad as sq
from subquad.tools.models.saved_settings import EmbeddedTexts, text_settings
from subquad.tools.plan import settings
from tests.tools.workflows import tiny
from tests.tools.workflows.planning.steady import make_steady
from tests.tools.workflows.test_saving import METHOD, card_of, command, compared, texts

PLANNED = ("--min-fidelity", "0.2", "--shift", "1", "--methods", "clustered:clusters=8")


@pytest.fixture(scope="module")
def sentences(tmp_path_factory, model) -> str:
    """A SentenceTransformer with settings other than the defaults; it cuts texts at 40 of the 64 tokens it could."""
    folder = tmp_path_factory.mktemp("sentences")
    inside = Transformer(model("bert"))
    width = inside.get_embedding_dimension()
    modules = [inside, Pooling(width, "cls", include_prompt=False), Dense(width, 8), Normalize()]
    made = SentenceTransformer(
        modules=modules,
        device="cpu",
        prompts={"query": "question: ", "document": "text: "},
        default_prompt_name="document",
        similarity_fn_name="dot",
    )
    made.max_seq_length = 40
    made.tokenizer.truncation_side = "left"
    made.save(str(folder))
    return str(folder)


def loaded(folder: str | Path) -> Any:
    return SentenceTransformer(str(folder), device="cpu")


def card(folder: Path) -> str:
    return card_of(folder)[0].partition("\n\n---\n\n# ")[0]


def differing(folder: str | Path, original: str) -> dict[str, tuple[Any, Any]]:
    before, after = (text_settings(loaded(each)) for each in (original, folder))
    assert before["prompts"]["query"] == "question: "
    return {name: (before[name], after[name]) for name in before if before[name] != after[name]}


@pytest.mark.usefixtures("short")
def test_a_sentence_transformer_keeps_its_longest_text(sentences, text, tmp_path, faster_at):
    """The method is recommended at 64 tokens, but nobody named a length over its 40."""
    faster_at(64)
    result = compared(sentences, text, tmp_path)
    shown = " ".join(result.output.split())
    assert "The saved model will keep max_seq_length 40 of the original; --lengths with a longer one raises it" in shown
    assert "accepts inputs of up to 40 tokens" in shown
    assert "Differs" not in shown
    assert differing(tmp_path / "saved", sentences) == {}
    assert "All settings are those of the original model, whose card follows." in card(tmp_path / "saved")
    assert set(sq.hf.describe(loaded(tmp_path / "saved")).methods.values()) == {sq.parse_method(METHOD)}
    cosine = re.search(r"on [3-8] texts of (?:\d+ to )?(\d+) tokens: (\S+) on average, (\S+) at least", shown)
    assert int(cosine[1]) <= 40
    assert cosine[0] in card(tmp_path / "saved")
    exact = loaded(tmp_path / "saved")
    sq.hf.restore(exact)
    wanted = loaded(sentences).encode(texts(), convert_to_tensor=True)
    torch.testing.assert_close(exact.encode(texts(), convert_to_tensor=True), wanted, atol=1e-6, rtol=1e-6)


@pytest.mark.usefixtures("short")
def test_a_longer_text_is_a_difference_that_is_told_with_its_cosine(sentences, text, tmp_path, faster_at):
    faster_at(64)
    result = compared(sentences, text, tmp_path, "--lengths", "64")
    assert differing(tmp_path / "saved", sentences) == {"max_seq_length": (40, 64)}
    line = "max_seq_length 40 → 64: embeddings of texts over 40 tokens differ from the original's"
    assert f"Differs from the original model: {line}\n" in result.output
    assert "will keep" not in result.output
    assert f"- {line}" in card(tmp_path / "saved")
    pattern = r"texts of (?:\d+ to )?(\d+) tokens: (\S+) on average, (\S+) at least"
    figures = re.findall(pattern, card(tmp_path / "saved"))
    assert [int(tokens) for tokens, _, _ in figures] == [40, 64]
    assert all(float(least) <= float(mean) < 0.9999 for _, mean, least in figures)
    assert all(f"{mean} on average" in result.output for _, mean, _ in figures)


def test_only_longer_texts_change_with_the_limit(sentences):
    changed = loaded(sentences)
    before = EmbeddedTexts(changed, lambda: tiny.documents(3, 20), 40, 64)
    changed.max_seq_length = 64
    short, long = before.compared(changed)
    assert short.endswith("1.0000 on average, 1.0000 at least.")
    assert "texts of 64 tokens: 0." in long


@pytest.mark.usefixtures("short")
def test_what_would_run_in_no_text_is_not_saved(sentences, text, tmp_path, faster_at):
    faster_at(96)
    shown = " ".join(compared(sentences, text, tmp_path).output.split())
    assert "what is recommended runs in longer inputs only than the model reads, because max_seq_length is 40" in shown
    assert "--lengths with a longer one raises it" in shown
    assert not (tmp_path / "saved").exists()


def test_lengths_that_a_plan_has_by_default_raise_no_limit(sentences, text, tmp_path, monkeypatch):
    make_steady(monkeypatch.setattr)
    monkeypatch.setattr(settings, "PLANNED_LENGTHS", (64,))
    line = ("plan", sentences, "--text", text, *PLANNED, "--minutes", "1")
    kept = command(*line, "--out", tmp_path / "out", "--save", tmp_path / "kept")
    assert "will keep max_seq_length 40 of the original" in " ".join(kept.output.split())
    assert differing(tmp_path / "kept", sentences) == {}


def test_the_dtype_of_a_plan_is_that_of_the_saved_model(sentences, text, tmp_path, monkeypatch):
    make_steady(monkeypatch.setattr)
    line = ("plan", sentences, "--text", text, *PLANNED, "--minutes", "1", "--lengths", "32", "--dtype", "bf16")
    result = command(*line, "--out", tmp_path / "out", "--save", tmp_path / "saved")
    again = loaded(tmp_path / "saved")
    assert {parameter.dtype for parameter in again.parameters()} == {torch.bfloat16}
    assert differing(tmp_path / "saved", sentences) == {"dtype": ("fp32", "bf16")}
    assert "Differs from the original model: dtype fp32 → bf16\n" in result.output
    assert "- dtype fp32 → bf16" in card(tmp_path / "saved")
    short = sq.load_plan(tmp_path / "out").made_on["short_texts"]
    assert all(0.5 < entry["fidelity"] < 0.999999 for entry in short.values())  # the original is in fp32


def test_a_plan_in_the_own_dtype_changes_none(model, text, tmp_path, monkeypatch):
    """A causal language model in bf16 stays in it, with its tokenizer's settings."""
    make_steady(monkeypatch.setattr)
    own = tmp_path / "own"
    made = transformers.AutoModelForCausalLM.from_pretrained(model("gpt2"), dtype=torch.bfloat16)
    made.save_pretrained(own)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model("gpt2"), padding_side="left", model_max_length=60)
    tokenizer.save_pretrained(own)
    line = ("plan", own, "--text", text, "--max-kl", "5", "--shift", "1", "--methods", "local:window=12")
    folders = ("--out", tmp_path / "out", "--save", tmp_path / "saved")
    result = command(*line, "--minutes", "1", "--lengths", "32", *folders)
    assert "Differs" not in result.output
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["dtype"] == "bfloat16"
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert (again.padding_side, again.model_max_length) == ("left", 60)
