"""The benchmark of longer positions: its documents, its ranks, and a small run."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch

from subquad.tools.models.pretrained import load

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
WORDS = (
    "whale", "ship", "sea", "captain", "harpoon", "rope", "sail", "storm",
    "island", "harbour", "sailor", "deck", "mast", "boat", "oar", "night",
)  # fmt: skip


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)  # as for a script
    return importlib.import_module("stretched_positions")


def book(seed: int) -> str:
    """Sentences of ten to twelve words each."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(WORDS), (400, 12), generator=generator).tolist()
    return " ".join(" ".join(WORDS[i] for i in each[: 10 + n % 3]) + "." for n, each in enumerate(drawn))


def test_a_question_is_not_in_its_document_and_documents_have_the_length(benchmark):
    model = load(None)
    made = benchmark.documents_of(model, [book(0), book(1)], 300, 5, 2)
    assert [len(each.tokens) for each in made] == [298] * 5
    for each in made:
        assert len(each.questions) == 2
        text = model.tokenizer.decode(each.tokens)
        assert not any(question.rstrip(".") in text for question in each.questions)


def test_ranks_count_the_documents_in_front(benchmark):
    scores = torch.tensor([[0.9, 0.5, 0.1], [0.2, 0.1, 0.3]])
    assert benchmark.ranks(scores, torch.tensor([0, 1])).tolist() == [0, 2]


def test_an_interval_surrounds_the_mean_and_is_a_point_without_variation(benchmark):
    right = torch.arange(40).repeat_interleave(3)
    assert benchmark.interval(torch.ones(120), right) == (1.0, 1.0)
    low, high = benchmark.interval((torch.arange(120) % 2).float(), right)
    assert low < 0.5 < high


def test_a_small_run(benchmark, run_script, monkeypatch, tmp_path):
    monkeypatch.setattr(benchmark, "texts", lambda folder: [book(2)])
    words = ["--lengths", "560", "--documents", "3", "--questions", "1", "--threads", str(torch.get_num_threads())]
    run_script(benchmark, *words, "--out", str(tmp_path / "out.md"))
    lines = (tmp_path / "out.md").read_text("utf-8").splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| 560")]
    assert [row[1] for row in rows] == list(benchmark.WAYS)
    assert "cosine to the original model at least 1.0000" in "\n".join(lines)
