import pytest
import torch

import subquad as sq
from subquad.methods import parse_method
from subquad.research.papers import speech
from subquad.research.papers.experiments import approximation_matrix as matrix
from subquad.research.papers.experiments.approximation_matrix import PUBLISHED, SCALES, TRAINED, key, pairs
from subquad.research.training.models.ctc_encoder import CTCEncoder, SpeechConfig


def test_the_paper_leaves_out_what_shares_no_keys() -> None:
    found = pairs(SCALES["paper"])
    assert len(found) == 42
    assert ("full", "shared-full") not in found
    assert ("full", "lsh-1") not in found
    assert ("lsh-1", "full") not in found
    assert all(len(values) == len(TRAINED) for values in PUBLISHED.values())


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("full", "full"),
        ("shared-full", "shared-full"),
        ("lsh-4", "reformer:rounds=4"),
        ("clustered-200", "clustered:clusters=200"),
        ("i-clustered-100", "i-clustered:clusters=100,topk=32"),
        ("oracle-top", "oracle-top:topk=32"),
        ("oracle-top:topk=4", "oracle-top:topk=4"),
    ],
)
def test_methods_by_the_names_of_the_paper(name: str, method: str) -> None:
    assert parse_method(speech.method_of(name)) == parse_method(method)


def test_shared_keys_make_full_attention_that_of_shared_full() -> None:
    torch.manual_seed(0)
    config = SpeechConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, method="shared-full", initializer_range=0.5
    )
    model, features = CTCEncoder(config).eval(), torch.randn(1, 20, 40)
    before = model(features).logits
    sq.hf.swap(model, "full")
    assert not torch.allclose(model(features).logits, before, atol=1e-5)
    speech.share_keys(model)
    torch.testing.assert_close(model(features).logits, before, rtol=1e-4, atol=1e-5)


def test_convergence_is_the_first_validation_near_the_best() -> None:
    record = {"rates": [[10, 1.0, 0.5, 2.0], [20, 2.0, 0.105, 1.0], [30, 3.0, 0.2, 1.0], [40, 4.0, 0.1, 1.0]]}
    assert speech.converged(record) == 20
    assert speech.converged(record, within=0.001) == 40


def test_models_that_start_alike_share_their_first_part() -> None:
    cells = [cell.key for cell in speech.model_cells(speech.SMALL, TRAINED, 3)]
    first = [name for name in cells if "short" in name]
    assert first == ["train full short utterances seed=3", "train shared-full short utterances seed=3"]
    assert len(cells) == len(TRAINED) + 2
    assert [cell.key for cell in speech.model_cells(speech.PAPER, ["full"], 0)] == ["train full seed=0"]


def test_the_first_part_is_exact_for_100_clusters() -> None:
    settings = speech.SMALL.first_settings("clustered-100", 0)
    task = settings.task.to_dict() if hasattr(settings.task, "to_dict") else settings.to_dict()["task"]
    assert settings.model.method == "full"
    assert task["longest"] / task["subsample"] <= 100
    assert speech.SMALL.first_settings("lsh-4", 0).model.method == "shared-full"


def test_the_table_shows_ours_beside_the_published_and_points_lost() -> None:
    scale = SCALES["smoke"]
    rates = {"full": 0.05, "i-clustered-100": 0.055, "clustered-100": 0.3, "oracle-top": 0.12}
    found = {
        key(column, row, 0): {speech.RATE: rates.get(row, 0.5), speech.HELD_OUT: 0.6} for column, row in pairs(scale)
    }
    table = matrix._matrix(scale, found, ["full", "lsh-1"], speech.RATE, "t")
    assert table.rows[0][1:] == ["5.0 (5.14)", None]
    assert matrix._points_lost(scale, found, "i-clustered-100") == "0.5"
    lost = {row[0]: row for row in matrix._lost(scale, found, list(PUBLISHED)).rows}
    assert lost["clustered-100"] == ["clustered-100", "25.0", "0.0", "39.7"]
    assert "full" not in lost
    assert "0.5 with i-clustered-100, 25.0 with clustered-100, 7.0 with oracle-top" in matrix.summary(scale, found)
