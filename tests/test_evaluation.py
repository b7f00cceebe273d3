"""The LM Evaluation Harness takes a method by name, from its command line and in Python, on the tasks of examples/."""

import importlib
import json
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

import subquad as sq
import subquad.hf

lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install 'lm_eval[hf]'")

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
TASKS = ROOT / "examples" / "evaluate"
METHOD = "clustered:clusters=4,bits=15,iterations=3,block=16,last=2"
NAME = f"subquad:{METHOD}"
WORDS = ["attention", "query", "value", "cluster", "token", "layer", "model", "score", "tail", "prompt", "length"]
METADATA = {"characters": 900, "items": 3}
IMPORT = "import subquad.hf; "
HARNESS = "from lm_eval.__main__ import cli_evaluate; cli_evaluate()"


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> str:
    """Three documents of sentences of random words."""
    folder, chance = tmp_path_factory.mktemp("texts"), random.Random(0)
    for number in range(3):
        sentences = (" ".join(chance.choices(WORDS, k=chance.randint(4, 9))) for _ in range(60))
        (folder / f"{number}.txt").write_text(". ".join(sentences) + ". ", "utf-8")
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A small decoder with random weights, and a tokenizer of whole words."""
    path = tmp_path_factory.mktemp("model")
    tokens = ["[UNK]", "[BOS]", "[EOS]", ".", *WORDS]
    tokenizer = Tokenizer(WordLevel({token: number for number, token in enumerate(tokens)}, "[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    special = {"unk_token": "[UNK]", "bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[EOS]"}
    hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(path)
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=len(tokens), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=512, initializer_range=0.4, bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    hf.LlamaForCausalLM(config).save_pretrained(path)
    return str(path)


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))


def evaluated(model: Any, texts: str, *, batch: int = 1, **arguments: Any) -> dict[str, list[Any]]:
    """The harness's results for each request of both tasks."""
    metadata = METADATA | {"texts": texts}
    tasks = importlib.import_module("lm_eval.tasks")
    manager = tasks.TaskManager(include_path=str(TASKS), include_defaults=False, metadata=metadata)
    result = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments or None,
        tasks=["documents", "last_word"],
        task_manager=manager,
        batch_size=batch,
        device="cpu",
        log_samples=True,
        bootstrap_iters=0,
    )
    return {task: [each["resps"] for each in samples] for task, samples in result["samples"].items()}


def test_a_name_in_the_arguments_of_the_model_is_a_swap(folder, texts):
    answers = evaluated("hf", texts, pretrained=folder, attn_implementation=NAME)
    assert {task: len(each) for task, each in answers.items()} == {"documents": 3, "last_word": 3}
    exact = evaluated("hf", texts, pretrained=folder)
    assert answers["documents"] != exact["documents"]
    assert answers["last_word"] != exact["last_word"]
    swapped = hf.AutoModelForCausalLM.from_pretrained(folder).eval()
    sq.hf.swap(swapped, METHOD)
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    wrapped = importlib.import_module("lm_eval.models.huggingface").HFLM(pretrained=swapped, tokenizer=tokenizer)
    assert evaluated(wrapped, texts) == answers


def test_batches_are_padded_without_a_mask(folder, texts):
    """Check the warning of docs/how-to/evaluate.md: with exact attention nothing changes, with a method it does."""

    def likelihoods(name: str, batch: int) -> torch.Tensor:
        answers = evaluated("hf", texts, batch=batch, pretrained=folder, attn_implementation=name)
        return torch.tensor([float(choice[0][0]) for answer in answers["last_word"] for choice in answer])

    torch.testing.assert_close(likelihoods("sdpa", 3), likelihoods("sdpa", 1), atol=1e-4, rtol=1e-4)
    assert (likelihoods(NAME, 3) - likelihoods(NAME, 1)).abs().max() > 1e-3


def run(code: str, folder: str, texts: str, name: str, out: Path) -> subprocess.CompletedProcess:
    """The harness' command in a process of its own."""
    command = [sys.executable, "-c", code, "run", "--model", "hf", "--batch_size", "1", "--device", "cpu"]
    command += ["--model_args", f"pretrained={folder},dtype=float32,attn_implementation={name}"]
    command += ["--include_path", str(TASKS), "--tasks", "documents,last_word", "--output_path", str(out)]
    command += ["--metadata", json.dumps(METADATA | {"texts": texts})]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_after_the_import(folder, texts, tmp_path):
    done = run(IMPORT + HARNESS, folder, texts, NAME.replace(",", ";"), tmp_path / "method.json")
    assert done.returncode == 0, done.stderr
    (written,) = tmp_path.glob("method*.json")
    results = json.loads(written.read_text("utf-8"))["results"]
    likelihoods = [
        each[0][0] for each in evaluated("hf", texts, pretrained=folder, attn_implementation=NAME)["documents"]
    ]
    size = sum(len(path.read_text("utf-8")[: METADATA["characters"]]) for path in Path(texts).glob("*.txt"))
    bits = -sum(map(float, likelihoods)) / size / torch.log(torch.tensor(2.0)).item()
    assert results["documents"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-5)
    assert 0 <= results["last_word"]["acc,none"] <= 1


@pytest.mark.parametrize(
    ("code", "name", "message"),
    [
        (HARNESS, NAME.replace(",", ";"), 'Specified `attn_implementation="subquad:clustered:clusters=4;bits=15'),
        (IMPORT + HARNESS, "subquad:clusterd", "no method 'clusterd'; did you mean 'clustered'"),
        (IMPORT + HARNESS, "subquad:clustered:clustrs=4", "'clustrs'; did you mean 'clusters'"),
        (IMPORT + HARNESS, "subquad:smyrf", "smyrf"),
    ],
)
def test_what_ends_the_command(folder, texts, tmp_path, code, name, message):
    done = run(code, folder, texts, name, tmp_path / "none.json")
    assert done.returncode == 1
    assert message in done.stderr
    assert not list(tmp_path.glob("none*.json"))


@pytest.fixture
def script(monkeypatch) -> ModuleType:
    """benchmarks/harness.py."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")  # as for a script
    return importlib.import_module("harness")


def test_the_table_of_the_page(script, run_script, folder, texts, tmp_path, monkeypatch):
    sizes = ["--documents", "3", "--characters", "900", "--passages", "3", "--passage", "900"]
    words = ["--model", folder, "--texts", texts, *sizes, "--attention", f"sdpa {NAME}"]
    words += ["--keep", str(tmp_path / "kept")]
    run_script(script, *words, "--out", str(tmp_path / "first.md"))
    rows = [line for line in (tmp_path / "first.md").read_text("utf-8").splitlines() if line.startswith("| `")]
    assert [row.split("|")[1].strip() for row in rows[1:]] == ["`sdpa`", f"`{NAME}`"]  # below the heading
    assert all("of 3" in row for row in rows[1:])
    monkeypatch.setattr(script, "answers", None)  # what is kept is not computed again
    run_script(script, *words, "--out", str(tmp_path / "second.md"))
    assert rows == [line for line in (tmp_path / "second.md").read_text("utf-8").splitlines() if line in rows]

    other = tmp_path / "other.txt"
    other.write_text("Other words are here. " * 300, "utf-8")
    assert script.content(str(other)) != script.content(texts) == script.content(texts)
