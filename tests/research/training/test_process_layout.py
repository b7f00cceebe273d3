"""Tests of runs of several processes: settings, and what cannot run on a part of the tokens. One process is enough."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from subquad.core.errors import InputError
from subquad.research.training.models import (
    CausalLanguageModel,
    EncoderClassifier,
    EncoderConfig,
    LanguageConfig,
    Memory,
    MixtureModel,
    SetConfig,
    splitting,
)
from subquad.research.training.process_layout import Layout, ParallelSettings
from subquad.research.training.settings import read_overrides, settings_of
from subquad.research.training.trainer import arguments
from tests.research.training.split import MODELS, differences

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A group of this process alone."""
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("given", "count", "message"),
    [
        (
            "parallel.sequence=2",
            1,
            r"parallel.sequence=2 does not divide the number of processes, 1: .*nproc-per-node 2",
        ),
        ("parallel.sequence=3", 4, r"parallel.sequence=3 does not divide the number of processes, 4"),
        ("parallel.fsdp=true", 1, r"parallel.fsdp=true shares the weights among processes, but there is one"),
    ],
)
def test_too_few_processes_are_refused(given: str, count: int, message: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", str(count))
    layout = Layout(settings_of("masked-copy", read_overrides([given])).parallel)
    with pytest.raises(InputError, match=message):
        layout.check()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("parallel.sequence=0", "sequence=0, but it must be at least 1"),
        ("parallel.mode=all", "parallel.mode='all'"),
        ("parallel.timeout=0.5", "timeout=0.5, but it must be at least 1"),
        ("parallel.timeout=1e9", "timeout=1e.09, but it must be at most 1,000,000 seconds"),
        (
            "parallel.sequences=2",
            "parallel has no setting 'sequences'.*did you mean 'sequence'|parallel has no setting",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(given: str, message: str):
    with pytest.raises(InputError, match=message):
        settings_of("masked-copy", read_overrides([given]))


def test_processes_that_share_an_input_have_the_same_items(monkeypatch: pytest.MonkeyPatch, tmp_path: Any):
    monkeypatch.setenv("WORLD_SIZE", "6")
    places = []
    for number in range(6):
        monkeypatch.setenv("RANK", str(number))
        layout = Layout(ParallelSettings(sequence=2))
        places.append((layout.share, layout.part))
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    settings = settings_of("masked-copy", read_overrides(["training.batch=8"]))
    with pytest.raises(InputError, match=r"training.batch=8 does not divide among 3 groups of 2 processes"):
        arguments(settings.training, settings.task, tmp_path, "cpu", layout)


def refused(model: torch.nn.Module, mode: str = "auto") -> str:
    reason = Layout(ParallelSettings(sequence=2, mode=mode)).refusal(model, None)  # type: ignore[arg-type]
    assert reason is not None
    return reason


def test_models_that_cannot_run_on_a_part_of_the_tokens_are_refused_before_the_first_step(alone: None):
    def encoder(**how: Any) -> torch.nn.Module:
        return EncoderClassifier(EncoderConfig(**SMALL, **how))

    assert "not for models of sets" in refused(MixtureModel(SetConfig(**SMALL)))
    assert "model.attention_dropout=0.1" in refused(encoder(attention_dropout=0.1))
    assert "model.piece=8" in refused(CausalLanguageModel(LanguageConfig(**SMALL, piece=8)))
    assert "auxiliary loss" in refused(encoder(method="lha:buckets=2"))
    assert "mode='heads'" in refused(encoder(method="full"), "summary")
    assert "not for model.pretrained" in refused(torch.nn.Linear(2, 2))
    assert Layout(ParallelSettings(sequence=2)).refusal(encoder(method="full"), None) is None


def test_calls_that_do_not_go_with_split_tokens_are_refused(alone: None, monkeypatch: pytest.MonkeyPatch):
    model, ids = CausalLanguageModel(LanguageConfig(**SMALL)), torch.zeros(1, 5, dtype=torch.long)
    with splitting.over(dist.group.WORLD):
        with pytest.raises(ValueError, match="`position_ids` or a key-value cache is not supported with"):
            model(ids, position_ids=torch.arange(5)[None])
        with pytest.raises(ValueError, match="a key-value cache is not supported with"):
            model(ids, use_cache=True)
        with pytest.raises(ValueError, match="reads pieces or has a memory is not supported with"):
            model(ids, memory=Memory(3))
        with pytest.raises(ValueError, match="a model of sets is not supported with"):
            MixtureModel(SetConfig(**SMALL))(torch.zeros(1, 5, 2))
    with splitting.over(dist.group.WORLD):
        monkeypatch.setattr(splitting._ranks.get(), "ranks", 3)
        with pytest.raises(InputError, match="an input of 2 tokens does not go on 3 ranks"):
            model(ids[:, :2])


def test_learned_positions_are_counted_over_all_ranks(alone: None):
    config = EncoderConfig(**SMALL, positions="learned", max_position_embeddings=4)
    with splitting.over(dist.group.WORLD), pytest.raises(ValueError, match="the input has 5 positions"):
        EncoderClassifier(config)(torch.ones(1, 5, dtype=torch.long))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_on_one_rank_is_the_model(alone: None, name: str):
    assert differences(MODELS[name]) < 4e-5
