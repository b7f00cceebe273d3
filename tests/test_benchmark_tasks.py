"""The tasks run at small sizes, their figures are those of plain definitions, and bad input ends in one sentence."""

import importlib
import itertools
import json
import math
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from subquad.core.errors import InputError
from subquad.tools.runs.jobs import silent

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SMALL = ["--documents", "3", "--queries", "1", "--reviews", "10", "--tokens", "600", "--prompts", "1"]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    """One of the scripts, as a module."""
    monkeypatch.syspath_prepend(BENCHMARKS)  # as for a script
    return importlib.import_module


@pytest.fixture
def run(script, run_script, tmp_path: Path):
    """Run the script as from the command line; what it wrote."""

    def result(*words: str) -> str:
        run_script(script("tasks"), "--cache", str(tmp_path / "cache"), *words, "--out", str(tmp_path / "out.md"))
        return (tmp_path / "out.md").read_text("utf-8")

    return result


def rows(written: str, name: str) -> list[list[str]]:
    """The cells of each row of this name, one row for each table that has it."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in written.splitlines() if line[:1] == "|"]
    return [cells[1:] for cells in lines if cells[0] == name]


# ---------------------------------------------------------------------- intervals


def test_an_interval_has_the_mean_and_about_the_normal_width(script):
    values = np.random.default_rng(5).normal(3.0, 2.0, 400)
    found = script("task_cells").interval(values.tolist())
    half = 1.96 * values.std() / math.sqrt(400)
    assert found.mean == pytest.approx(values.mean())
    assert (found.low, found.high) == pytest.approx((found.mean - half, found.mean + half), abs=0.1 * half)


def test_values_of_a_group_are_resampled_together(script):
    """Ten groups of equal values are ten observations, not a hundred."""
    groups = np.random.default_rng(6).normal(size=10)
    cells = script("task_cells")
    together, alone = cells.interval(groups.repeat(10).tolist(), 10), cells.interval(groups.tolist())
    assert together == pytest.approx(alone)
    apart = cells.interval(groups.repeat(10).tolist())
    assert apart.high - apart.low < 0.5 * (together.high - together.low)


def test_a_difference_is_paired(script):
    """A shift of values that vary by much is certain, which intervals of either alone do not show."""
    exact = np.random.default_rng(7).normal(size=50)
    cells = script("task_cells")
    found = cells.difference((exact - 0.1).tolist(), exact.tolist())
    assert found == pytest.approx((-0.1, -0.1, -0.1))
    assert cells.interval(exact.tolist()).low < found.low
    assert cells.difference(exact.tolist(), exact.tolist()).text(cells.points) == "0.0 % [0.0 %, 0.0 %]"


def test_figures_have_their_signs(script):
    cells = script("task_cells")
    assert [cells.points(share) for share in (0.012, -0.003, -0.0001)] == ["+1.2 %", "−0.3 %", "0.0 %"]
    assert [cells.signed(number) for number in (0.0123, -0.5, -1e-6)] == ["+0.0123", "−0.5000", "0.0000"]
    assert cells.percent(0.4125) == "41.2 %"


# ---------------------------------------------------------------------- what the tasks compute


def words(count: int) -> str:
    return "".join(
        f"Sentence {n} names the item {n} and nothing of the kind {n + 7} at all here. " for n in range(count)
    )


def tokenizer(texts, **options):
    """A token for each word, numbered by its text."""
    one = [
        [sum(map(ord, word)) % 997 for word in text.split()] for text in ([texts] if isinstance(texts, str) else texts)
    ]
    return {"input_ids": one[0] if isinstance(texts, str) else one}


def reader(**others) -> SimpleNamespace:
    """A model with two special tokens around an input of at most 16, as far as cutting texts needs one."""
    return SimpleNamespace(
        tokenizer=tokenizer,
        wrap=lambda ids, length: [1, *list(ids)[: length - 2], 2],
        length=lambda asked, option: 16,
        **others,
    )


def test_documents_have_the_kept_sentences_and_not_the_removed(script):
    retrieval = script("task_retrieval")
    documents = retrieval.documents(reader(), [retrieval.source_of(reader(), words(100))], 102, 4, 2, seed=0)
    assert len(documents) == 4
    for document in documents:
        assert len(document.tokens) == 100
        joined = " ".join(map(str, document.tokens))
        for sentences, inside in ((document.kept, True), (document.removed, False)):
            assert len(sentences) == 2
            for sentence in sentences:
                tokens = " ".join(map(str, tokenizer(sentence)["input_ids"]))
                assert (tokens in joined) == inside
    tokens = [tuple(document.tokens) for document in documents]
    assert len(set(tokens)) == len(tokens)


def test_texts_with_too_few_documents_are_refused(script):
    retrieval = script("task_retrieval")
    short = [retrieval.source_of(reader(), words(13))]
    with pytest.raises(InputError, match=r"the texts have 1 documents of 102 tokens with 4 sentences .* 2 are asked"):
        retrieval.documents(reader(), short, 102, 2, 2, seed=0)


@pytest.fixture
def three_documents(script) -> ModuleType:
    retrieval = script("task_retrieval")
    documents = [retrieval.Document([1], ["kept"], ["removed"]) for _ in range(12)]
    return retrieval.Retrieval(reader(), ("m",), 16, documents)


def test_metrics_are_those_of_the_rank_of_the_querys_own_document(three_documents):
    """The kept query of document d has d better ones before it; the removed one has its own as the best."""
    scores = [[0.0] * 12 for _ in range(24)]
    for document in range(12):
        scores[2 * document][document] = 0.5
        for other in range(12):
            if other != document:
                better = (other - document) % 12 <= document
                scores[2 * document][other] = 0.9 if better else 0.1
        scores[2 * document + 1][document] = 0.5
    kept, removed = (three_documents.metrics(scores, kind) for kind in ("kept", "removed"))
    ranks = [1 + min(document, 11) for document in range(12)]
    assert kept["recall@1"] == [float(rank == 1) for rank in ranks]
    assert kept["recall@10"] == [float(rank <= 10) for rank in ranks]
    assert kept["nDCG@10"] == pytest.approx([1 / math.log2(r + 1) if r <= 10 else 0.0 for r in ranks])
    assert set(removed["nDCG@10"]) == {1.0}


def test_a_tie_counts_against_the_query(three_documents):
    scores = [[1.0] * 12 for _ in range(24)]
    assert set(three_documents.metrics(scores, "kept")["recall@10"]) == {0.0}


def test_chunks_are_equal_parts_that_hold_the_whole_text(script):
    seen: list[list[int]] = []

    def embed_all(items):
        seen.extend(items)
        return torch.ones(len(items), 3)

    vectors = script("task_retrieval").chunk_vectors(reader(embed_all=embed_all), range(10, 40))
    assert vectors.shape == (3, 3)  # 14 content tokens at most
    torch.testing.assert_close(vectors.norm(dim=-1), torch.ones(3))
    assert [len(item) for item in seen] == [12, 12, 12]
    assert list(itertools.chain(*(item[1:-1] for item in seen))) == list(range(10, 40))


def test_a_probe_never_learns_from_what_it_labels(script):
    """Each review's embedding tells its own number alone, so that a probe without it cannot know the label."""
    module = script("task_reviews")
    reviews = [module.LabelledReview([1], label) for _ in range(10) for label in module.LABELS]
    task = module.Classification(reader(), (), 16, reviews)
    alone = task.predicted(torch.eye(20).tolist())
    assert sum(mine == review.label for mine, review in zip(alone, reviews, strict=True)) < 20
    told = task.predicted([[float(review.label == "pos"), 1.0] for review in reviews])
    assert told == [review.label for review in reviews]


def test_losses_are_resampled_in_whole_blocks(script):
    module = script("task_decoders")
    losses = [*[1.0] * module.BLOCK, *[3.0] * module.BLOCK, 100.0]
    assert module.block_means([losses, losses[: module.BLOCK + 1]]) == [1.0, 3.0, 1.0]


def test_cells_are_kept_until_inputs_change_and_late_ones_are_left_out(script, tmp_path: Path):
    cells, asked = script("task_cells"), []

    def task(content: str) -> SimpleNamespace:
        return SimpleNamespace(
            name="task",
            pretrained=SimpleNamespace(identity=lambda: ["model"]),
            rows=["exact", "m"],
            inputs=lambda: content,
            measure=lambda row, progress: asked.append(row) or [[float(len(asked))]],
        )

    def measured(content: str, late: bool) -> dict:
        return cells.measured(task(content), tmp_path, lambda row: silent, lambda: late)

    assert measured("a", late=True) == {}
    first = measured("a", late=False)
    assert (first, asked) == ({"exact": [[1.0]], "m": [[2.0]]}, ["exact", "m"])
    assert measured("a", late=True) == first
    assert measured("b", late=False) == {"exact": [[3.0]], "m": [[4.0]]}


# ---------------------------------------------------------------------- the command


def refusal(run, *arguments: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        run(*arguments)
    message = str(stopped.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "retreival"], "no task 'retreival'"),
        (["--data", ""], "set the environment variable SUBQUAD_DATA"),
        (["--data", "nowhere"], "no file or folder at nowhere"),
        (["--data", __file__], "is not a folder"),
        (["--lengths", "512,8"], "--lengths has 8, but a text needs 32 tokens or more"),
        (["--queries", "0"], "--queries 0 must be at least 1"),
        (["--prompts", "0"], "--prompts 0 must be at least 1"),
    ],
)
def test_mistakes_are_one_sentence_before_a_model_is_loaded(run, arguments: list[str], message: str, tmp_path: Path):
    assert message in refusal(run, "--data", str(tmp_path), *arguments)


@pytest.fixture
def no_models(script, monkeypatch: pytest.MonkeyPatch):
    """Models of a kind alone."""

    def of_kind(kind: str) -> None:
        monkeypatch.setattr(script("tasks"), "load", lambda name: SimpleNamespace(kind=kind, name=str(name)))

    return of_kind


def test_a_decoder_in_an_encoders_task_and_the_reverse(run, no_models, tmp_path: Path):
    data = ["--data", str(tmp_path)]
    no_models("causal-lm")
    for task in ("retrieval", "classification"):
        message = refusal(run, *data, "--tasks", task, "--encoder", "gpt")
        assert message == (
            f"gpt is of the kind causal-lm, but the task {task} needs an encoder that gives embeddings; give one as "
            "--encoder"
        )
    for kind, task in (("embedding", "perplexity"), ("masked-lm", "needle")):
        no_models(kind)
        message = refusal(run, *data, "--tasks", task, "--decoder", "bert")
        assert f"bert is of the kind {kind}, but the task {task} needs a causal language model" in message


@pytest.mark.data
@pytest.mark.slow
def test_texts_that_are_too_short_and_methods_that_need_fitting_are_refused(run):
    classification = ["--tasks", "classification", "--reviews", "10"]
    assert "the longest review has 3,253 tokens, fewer than 4,096" in refusal(run, *classification, "--lengths", "4096")
    assert "--reviews 4 is too few" in refusal(run, "--tasks", "classification", "--reviews", "4")
    few = refusal(run, "--tasks", "retrieval", "--lengths", "512", "--documents", "9000")
    assert "documents of 512 tokens" in few
    assert "9,000 are asked for" in few
    assert "lha-tail has parameters to fit first" in refusal(run, *classification, "--methods", "lha-tail")
    assert "no method 'clusterd'" in refusal(run, *classification, "--methods", "clusterd")


@pytest.mark.data
@pytest.mark.long
def test_passages_are_as_many_as_the_tokens_allow(run):
    assert "--tokens 100 is less than one passage of 200 tokens" in refusal(
        run, "--tasks", "perplexity", "--lengths", "200", "--tokens", "100"
    )
    assert "is more than the 2,000 that passages of 200 have" in refusal(
        run, "--tasks", "perplexity", "--lengths", "200", "--tokens", "9000"
    )
    assert "is past the 8192 positions" in refusal(run, "--tasks", "perplexity", "--lengths", "9000")


@pytest.mark.data
@pytest.mark.slow
def test_tasks_of_encoders(run):
    """Past 512 tokens; exact attention by another kernel changes nothing."""
    size = ["--lengths", "600", "--methods", "full:kernel=subquad local:window=1"]
    written = run("--tasks", "retrieval classification", *size, *SMALL)
    assert "## Retrieval, 600 tokens" in written
    assert "## Classification, 600 tokens" in written
    for name in ("exact", "first 512 tokens", "mean of chunks", "local:window=1"):
        assert len(rows(written, name if name[:5] != "local" else f"`{name}`")) == 3
    assert len(rows(written, "best chunk")) == 2
    for cells in rows(written, "`full:kernel=subquad`"):
        assert cells[1] == "0.0 % [0.0 %, 0.0 %]"
        assert cells[-1] == "100.0 % [100.0 %, 100.0 %]"


@pytest.mark.data
@pytest.mark.long
def test_tasks_of_decoders_resume_after_their_minutes(run):
    size = ["--tasks", "perplexity needle", "--lengths", "200", "--methods", "local:window=4", *SMALL]
    assert run(*size, "--minutes", "0").count("Not measured.") == 2
    written = run(*size)
    assert "ot measured" not in written
    perplexity, needle = rows(written, "`local:window=4`")
    assert perplexity[1].startswith("+")
    assert needle[3].startswith("−")
    assert run(*size, "--minutes", "0").splitlines()[:-1] == written.splitlines()[:-1]


def test_the_page_and_the_report_have_the_figures_of_the_records(script):
    page, report = script("tasks_page"), (BENCHMARKS / "results" / "tasks.md").read_text("utf-8")
    records = json.loads(page.RESULTS.read_text("utf-8"))
    assert f"\n\n{page.short_tables(records)}\n\n<!-- tables:end -->" in page.PAGE.read_text("utf-8")
    assert [record["task"] for record in records if script("tasks").section(record) not in report] == []


def test_a_short_table_has_the_value_of_exact_and_differences_of_the_others(script):
    def figures(value: float, difference: float) -> dict[str, list[float]]:
        return {"a": [0.5] * 3, "b": [value] * 3, "b, difference": [difference] * 3}

    rows = {"exact": figures(0.2, 0.0), "x": figures(0.4, 0.03), "y": None}
    assert script("tasks_page").short({512: rows}, ("x", "absent", "y"), "b", "b, difference").splitlines()[-3:] == [
        "| exact | 20.0 % [20.0 %, 20.0 %] |",
        "| `x` | +3.0 % [+3.0 %, +3.0 %] |",
        "| `y` | not measured |",
    ]


def test_a_table_has_no_difference_of_exact_attention_to_itself(script):
    cells = script("task_cells")
    task = SimpleNamespace(
        rows=["exact", "m", "late"], figures=lambda cell, exact: {"T": cells.compared("a", cell, exact)}
    )
    assert cells.markdown(cells.tables_of(task, {"exact": [1.0], "m": [0.0]})).splitlines() == [
        "T:",
        "",
        "| attention | a | difference |",
        "| :--- | ---: | ---: |",
        "| exact | 100.0 % [100.0 %, 100.0 %] | – |",
        "| `m` | 0.0 % [0.0 %, 0.0 %] | −100.0 % [−100.0 %, −100.0 %] |",
        "| `late` | not measured | not measured |",
    ]
