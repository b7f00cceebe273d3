"""The experiment `lra`: its methods run on padded batches, and its tables say what the cells found."""

import pytest
import torch

from subquad.research.papers.experiments.lra import COLUMNS, LHA, PUBLISHED, ROWS, SCALES, TINY, _step, key, results
from subquad.research.papers.tasks.listops import TO_BEAT
from subquad.research.training.settings import settings_of
from subquad.research.training.tasks import TASKS

SCALE = SCALES["smoke"]


def found(accuracy):
    """Made-up results of the cells of `smoke`, with models of this accuracy."""
    test = {"accuracy": accuracy, "accuracy_MAX": 0.5, "loss": 1.0}
    base = {name: {"accuracy": value, "accuracy_MAX": value} for name, value in (("majority", 0.2), (TO_BEAT, 0.5))}
    timed = {"32": {"seconds": 0.01, "relative": 0.75, "rounds": 3}}
    return {
        "listops baselines": {"baselines": base, "items": 100},
        "throughput": dict.fromkeys(SCALE.methods, timed),
        **{key("listops", row, 0): {"test": test} for row in SCALE.methods},
    }


@pytest.mark.parametrize(("accuracy", "verdict"), [(0.55, "no"), (0.65, "yes")])
def test_a_model_solves_something_only_above_the_root_and_its_digits(accuracy, verdict):
    table = results(SCALE, found(accuracy)).tables[1]
    column = list(table.columns).index("solves something")
    assert {row[0]: row[column] for row in table.rows}["LHA"] == verdict


@pytest.mark.parametrize(("accuracy", "said"), [
    (0.25, "listops: no model knows more than the majority (20.0 %), the best baseline root and its digits (50.0 %)."),
    (0.6, "listops: the best model is Transformer (60.0 %), the best baseline root and its digits (50.0 %)."),
])  # fmt: skip
def test_the_summary_names_a_model_only_where_it_knows_more_than_a_guess(accuracy, said):
    assert results(SCALE, found(accuracy)).summary == said


def test_a_timed_step_reaches_every_parameter_of_the_hash_functions(monkeypatch):
    models = []
    built = TASKS["text"].model
    monkeypatch.setattr(TASKS["text"], "model", lambda *given: models.append(built(*given)) or models[-1])
    _step(SCALE, LHA, 32, torch.device("cpu"))()
    missing = [name for name, parameter in models[0].named_parameters() if parameter.grad is None]
    assert missing == []


def test_ours_stand_beside_the_published_and_the_baselines():
    accuracy, _, speed = results(SCALE, found(0.4)).tables
    rows = {row[0]: row for row in accuracy.rows}
    assert rows["LHA"] == ["LHA", ROWS["LHA"], "40.0", "37.9"]
    assert rows["Synthesizer"][1:] == ["not run", None, "37.0"]
    assert rows["BigBird"][1:] == ["not run", None, "36.0"]
    assert rows[f"*{TO_BEAT}*"][2:] == ["50.0", None]
    assert speed.rows[1][2].startswith("0.75 (10 ms)")


def test_the_published_table_is_whole():
    """Its last column of accuracies, Avg., is their mean: no figure is mistyped."""
    means = {"Transformer": 50.2, "Linformer": 45.1, "Reformer": 46.2, "Sparse Transformer": 46.1, "BigBird": 50.0,
             "Sinkhorn Transformer": 47.5, "Synthesizer": 48.8, "Linear Transformer": 44.4, "Performer": 45.0,
             "LHA": 53.1}  # fmt: skip
    for row, mean in means.items():
        assert sum(PUBLISHED[row][: len(COLUMNS)]) / 4 == pytest.approx(mean, abs=0.076), row
    assert set(PUBLISHED) == set(ROWS) - {"local", "improved clustered"}


@pytest.mark.parametrize("row", ROWS)
def test_each_method_of_the_table_runs_on_padded_texts(row):
    settings = settings_of("text", {"task": {"length": 300}, "model": {**TINY, "method": ROWS[row]}})
    batch = settings.task.encode(["a" * 300, "bc"])
    output = settings.task.model(settings.model)(**batch, labels=torch.tensor([0, 1]))
    output.loss.backward()
    assert torch.isfinite(output.loss)
    assert output.logits.shape == (2, 2)
