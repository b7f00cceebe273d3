"""`--save`: what is recommended, in a folder that loads with it."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from typer.testing import CliRunner

import subquad as sq
from subquad.tools.cli.main import app
from subquad.tools.compare import recommend
from subquad.tools.compare import run as compare
from tests.tools.workflows import tiny
from tests.tools.workflows.planning.steady import make_steady

METHOD = "clustered:clusters=4"
LOADED = """
import json, sys
import subquad.hf
from sentence_transformers import SentenceTransformer
model = SentenceTransformer(sys.argv[1])
print(json.dumps(model.encode(json.loads(sys.argv[2])).tolist()))
"""


@pytest.fixture(scope="module")
def sentences(tmp_path_factory, model) -> str:
    """A tiny SentenceTransformer that reads at most 40 of the 64 tokens of its positions."""
    folder = tmp_path_factory.mktemp("sentences")
    inside = Transformer(model("bert"))
    made = SentenceTransformer(modules=[inside, Pooling(inside.get_embedding_dimension(), "cls")], device="cpu")
    made.max_seq_length = 40
    made.save(str(folder))
    return str(folder)


def command(*args):
    result = CliRunner().invoke(app, [*map(str, args)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def compared(model, text, tmp_path, *more, method=METHOD, floor=("--min-fidelity", "0.01")):
    given = ("--text", text, "--methods", method, *floor, "--out", tmp_path / "out")
    return command("compare", model, *given, "--save", tmp_path / "saved", *more)


def texts() -> list[str]:
    return [document[:n] for document, n in zip(tiny.documents(3, 20), (4000, 300, 40), strict=True)]


def card_of(folder: Path) -> tuple[str, str]:
    """The card of a saved model, without its lines of Python, and those."""
    card = (folder / "README.md").read_text()
    lines = re.search(r"```python\n(.*?)```\n", card, re.DOTALL)
    return card.replace(lines[0], ""), lines[1]


def by_its_card(folder: Path, monkeypatch) -> Any:
    """The model, loaded by the lines of its card."""
    monkeypatch.chdir(folder.parent)
    _, lines = card_of(folder)
    assert len([line for line in lines.splitlines() if line.strip()]) <= 3
    made: dict[str, Any] = {}
    exec(lines, made)
    return made["model"]


def encoded_elsewhere(folder: Path, texts: list[str]) -> torch.Tensor:
    line = [sys.executable, "-c", LOADED, str(folder), json.dumps(texts)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return torch.tensor(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.usefixtures("short")
def test_a_sentence_transformer_is_saved_whole_and_loads_in_another_process(sentences, text, tmp_path, faster_at):
    faster_at(96)
    result = compared(sentences, text, tmp_path, "--lengths", "96")
    assert "recommended at 96 tokens\nThe model accepts inputs of up to 96 tokens, and loads" in result.output
    wanted = SentenceTransformer(sentences, device="cpu")
    sq.hf.extend_positions(wanted, 96)
    steps = json.loads((tmp_path / "saved" / "config.json").read_text())["subquad"]["methods"]["0"]["steps"]
    start = int(steps.removeprefix("0:full+").partition(":")[0])
    assert 65 <= start <= 96
    assert f"with full below {start} tokens and {METHOD} from {start} tokens on;" in result.output
    sq.hf.swap(wanted, sq.ByLength({0: "full", start: METHOD}))
    found = encoded_elsewhere(tmp_path / "saved", texts())
    torch.testing.assert_close(found, wanted.encode(texts(), convert_to_tensor=True), atol=1e-6, rtol=1e-6)
    again = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert again.max_seq_length == sq.hf.position_limit(again) == 96
    assert again[1].pooling_mode == wanted[1].pooling_mode
    sq.hf.restore(again)
    long = again.encode(texts(), convert_to_tensor=True)
    assert not torch.allclose(long[0], found[0], atol=1e-3)
    torch.testing.assert_close(long[2], found[2], atol=1e-6, rtol=1e-6)  # a short one is exact


@pytest.mark.usefixtures("short")
def test_a_method_for_the_main_length_runs_at_all_lengths(sentences, text, tmp_path, faster_at, monkeypatch):
    faster_at(64)
    compared(sentences, text, tmp_path, "--lengths", "64")
    assert SentenceTransformer(str(tmp_path / "saved"), device="cpu").max_seq_length == 64  # and not 40
    again = by_its_card(tmp_path / "saved", monkeypatch)
    assert isinstance(again, SentenceTransformer)
    assert {str(method) for method in sq.hf.describe(again).methods.values()} == {METHOD}
    assert again.max_seq_length == sq.hf.position_limit(again) == 64


@pytest.mark.usefixtures("short", "undisturbed")
def test_each_length_is_saved_with_what_is_recommended_there(model, text, tmp_path, monkeypatch):
    """The method of the longer length is saved too, and the terminal tells which runs where; so does the code."""
    longer = "local:window=9"
    fast = {(METHOD, "64"), (longer, "96")}
    monkeypatch.setattr(recommend, "is_faster", lambda method, length: (method.method, length) in fast)
    result = compared(model("bert"), text, tmp_path, "--methods", longer, "--lengths", "64,96")
    shown = " ".join(result.output.split())
    assert f"with {METHOD} below 96 tokens and {longer} from 96 tokens on; recommended at 64 and 96 tokens" in shown
    advice = json.loads((tmp_path / "out" / "report.json").read_text())["recommendation"]
    assert advice["by_length"] == {"64": METHOD, "96": longer}
    again = transformers.AutoModel.from_pretrained(tmp_path / "saved")
    steps = sq.ByLength({0: METHOD, 96: longer})
    made: dict[str, Any] = {}
    exec(advice["code"], made)
    for either in (again, made["model"]):
        assert set(sq.hf.describe(either).methods.values()) == {steps}
        assert sq.hf.position_limit(either) == 96
    ids = torch.arange(96)[None] % 60 + 5
    with torch.inference_mode():
        torch.testing.assert_close(made["model"](input_ids=ids)[0], again(input_ids=ids)[0], atol=1e-6, rtol=1e-6)
    assert made["tokenizer"].model_max_length >= 96


@pytest.mark.usefixtures("short")
def test_nothing_is_saved_from_a_machine_that_was_too_busy(model, text, tmp_path, faster_at, monkeypatch):
    faster_at(64, 96)
    monkeypatch.setattr(recommend, "TOO_NOISY", 0.0)
    result = compared(model("bert"), text, tmp_path)
    shown = " ".join(result.output.replace("│", " ").split())
    assert "No recommendation: the times were too noisy, and the speeds at 64 and 96 tokens are not reliable." in shown
    assert "Nothing saved" in shown
    assert "too noisy to compare speeds at 64 and 96 tokens; repeat the command with --again" in shown
    assert not (tmp_path / "saved").exists()
    page = (tmp_path / "out" / "report.html").read_text()
    box = page[page.index('class="advice"') : page.index("</section>")]
    assert "No recommendation: the times were too noisy" in box


@pytest.mark.usefixtures("short", "quick")
def test_learned_parameters_come_along(model, text, other_text, tmp_path, faster_at):
    faster_at(64, 96)
    compared(model("bert"), text, tmp_path, "--calibrate", other_text, "--lengths", "96", method="lha:buckets=4")
    again = transformers.AutoModel.from_pretrained(tmp_path / "saved")
    (adapter,) = (tmp_path / "out" / "adapters").iterdir()
    wanted = transformers.AutoModel.from_pretrained(model("bert"))
    sq.hf.load_adapter(sq.hf.extend_positions(wanted, 96), adapter)
    ids = torch.arange(90)[None] % 60 + 5
    with torch.inference_mode():
        torch.testing.assert_close(again(input_ids=ids)[0], wanted(input_ids=ids)[0], atol=1e-6, rtol=1e-6)
    settings = tmp_path / "saved" / "subquad-adapter" / "adapter.json"
    settings.write_text(settings.read_text().replace('"buckets": 4', '"buckets": 5'))
    with pytest.warns(UserWarning, match="adapter.json"):
        transformers.AutoModel.from_pretrained(tmp_path / "saved")


@pytest.mark.usefixtures("short")
def test_a_model_keeps_its_head_its_tokenizer_and_its_card(model, text, tmp_path, faster_at, monkeypatch):
    faster_at(64)
    whole = transformers.BertForSequenceClassification(transformers.BertConfig(**tiny.BERT))
    whole.save_pretrained(tmp_path / "whole")
    tiny.tokenizer(special=True).save_pretrained(tmp_path / "whole")
    (tmp_path / "whole" / "README.md").write_text("---\nlicense: mit\n---\n\n# Whole\n\nIts own words.\n")
    compared(tmp_path / "whole", text, tmp_path)
    again = by_its_card(tmp_path / "saved", monkeypatch)
    assert isinstance(again, transformers.BertForSequenceClassification)
    card, _ = card_of(tmp_path / "saved")
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    figures = next(m for m in report["methods"] if m["method"] == METHOD)
    assert card.startswith("---\nlicense: mit\n---\n\n# saved: a model with sub-quadratic attention")
    assert card.endswith("\n---\n\n# Whole\n\nIts own words.\n")
    assert f"- `{METHOD}` in layers 0, 1\n" in card
    assert f"64 tokens: {figures['model']['64']['speedup']:.2f}× the speed of exact attention" in card
    assert "For retrieval" not in card  # the model's own positions are not exceeded
    assert f"fidelity {figures['fidelity']['64']:.3f}." in card
    assert f"```sh\n{report['command']}\n```" in card
    assert "dtype fp32" in card
    assert {str(method) for method in sq.hf.describe(again).methods.values()} == {METHOD}
    assert torch.equal(again.classifier.weight, whole.classifier.weight)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert tokenizer("the key").input_ids == tiny.tokenizer(special=True)("the key").input_ids


@pytest.mark.usefixtures("short")
def test_where_exact_attention_is_recommended_nothing_is_saved(model, text, tmp_path, faster_at):
    faster_at()
    result = compared(model("bert"), text, tmp_path, "--json")
    assert json.loads(result.stdout)["recommendation"]["choice"] == "full"
    assert "Nothing saved" in result.stderr
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("kind", ["compare", "plan"])
def test_what_cannot_be_saved_is_refused_before_anything_is_measured(kind, model, text, tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "measure", None)
    monkeypatch.setattr("subquad.tools.plan.run.make", None)
    full = tmp_path / "full"
    full.mkdir()
    (full / "notes.txt").write_text("mine")
    given = (kind, model("bert"), "--text", text)

    def refused(save: Path, out: Path) -> str:
        result = command(*given, "--save", save, "--out", out)
        assert result.exit_code == 2
        assert not out.exists()
        return " ".join(result.stderr.split())

    assert "the folder is not empty" in refused(full, tmp_path / "out")
    assert "is a file" in refused(full / "notes.txt", tmp_path / "out")
    assert "a file is in its place" in refused(full / "notes.txt" / "below", tmp_path / "out")
    assert "cannot write /proc/subquad" in refused(Path("/proc/subquad"), tmp_path / "out")
    for out in (tmp_path / "new", tmp_path / "new" / "inside"):
        assert "must not be the folder of --out" in refused(tmp_path / "new", out)
    own = tmp_path / "own"
    transformers.BertModel(transformers.BertConfig(**tiny.BERT)).save_pretrained(own)
    (own / "modules.json").write_text(json.dumps([{"idx": 0, "name": "0", "path": "", "type": "mine.Module"}]))
    result = command(kind, own, "--text", text, "--save", tmp_path / "new", "--out", tmp_path / "out")
    assert "names the module 'mine.Module', whose code is not run here" in " ".join(result.stderr.split())


def test_a_plan_is_saved_with_the_model_that_it_is_for(sentences, text, tmp_path, monkeypatch):
    make_steady(monkeypatch.setattr)
    given = ("--lengths", "32,80", "--min-fidelity", "0.2", "--shift", "1", "--methods", "clustered:clusters=8")
    result = command("plan", sentences, "--text", text, *given, "--out", tmp_path / "out", "--save", tmp_path / "saved")
    assert "Saved" in result.output
    for difference in ("positions 64 → 80\n", "max_seq_length 40 → 80: embeddings of texts over 40 tokens differ"):
        assert f"Differs from the original model: {difference}" in result.output
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["next"] == (
        f"subquad compare {sentences} --text {text} --plan {tmp_path / 'out'} --lengths 32,80 --min-fidelity 0.2 "
        "--dtype fp32"
    )
    assert report["next"] in result.output.replace("\n", "")
    card = card_of(tmp_path / "saved")[0]
    assert "at confidence 0.95" in card
    short = sq.load_plan(tmp_path / "out").made_on["short_texts"]
    assert list(short) == ["16", "64"]
    sentences_of_both = (
        f"Fidelity on short texts to the original model, with its own positions and its exact attention: "
        f"{short['16']['fidelity']:.4f} at 16 tokens and {short['64']['fidelity']:.4f} at 64 tokens",
        "For retrieval, do not embed longer inputs whole",
    )
    for sentence in sentences_of_both:
        assert sentence in card
        assert any(sentence in note for note in report["notes"])
    wanted = SentenceTransformer(sentences, device="cpu")
    sq.hf.extend_positions(wanted, 80)
    sq.hf.swap(wanted, sq.load_plan(tmp_path / "out"))
    again = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert sq.hf.describe(again).methods == sq.hf.describe(wanted).methods
    assert again.max_seq_length == 80
    plan, saved = sq.load_plan(tmp_path / "out"), sq.hf.provenance(again)
    assert saved == sq.hf.provenance(wanted)
    assert (saved["floor"], saved["verified"]) == (plan.floor, plan.verified)
    assert saved["versions"]["torch"] == plan.made_on["versions"]["torch"]
    torch.testing.assert_close(
        again.encode(texts(), convert_to_tensor=True), wanted.encode(texts(), convert_to_tensor=True), atol=0, rtol=0
    )


def test_an_exact_plan_saves_nothing(model, text, tmp_path, monkeypatch):
    make_steady(monkeypatch.setattr)
    given = ("--lengths", "32", "--min-fidelity", "1", "--methods", "local:window=2")
    save = ("--out", tmp_path / "out", "--save", tmp_path / "saved")
    result = command("plan", model("bert"), "--text", text, *given, *save)
    assert "exact attention is recommended" in result.output
    assert "next" not in json.loads((tmp_path / "out" / "report.json").read_text())
    assert not (tmp_path / "saved").exists()
