from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from subquad.core.errors import InputError
from subquad.research.papers.data.tones import tones
from subquad.research.training.models.ctc_encoder import CTCEncoder, SpeechConfig
from subquad.research.training.run import begin_with, train
from subquad.research.training.settings import settings_of

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def model_of(seed: int, **more: object) -> CTCEncoder:
    torch.manual_seed(seed)
    return CTCEncoder(SpeechConfig(**{**SIZES, "hidden_dropout": 0.0, **more})).eval()


@pytest.mark.parametrize("method", ["full", "i-clustered:clusters=100", "performer", "linformer"])
def test_a_model_takes_the_weights_of_one_with_another_attention(method: str, tmp_path: Path) -> None:
    before, model = model_of(0), model_of(1, method=method)
    before.save_pretrained(tmp_path)
    begin_with(model, tmp_path)
    for name, tensor in before.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)
    if method in ("full", "i-clustered:clusters=100"):  # as many clusters as tokens: exact
        features = torch.randn(1, 30, 40)
        torch.testing.assert_close(model(features).logits, before(features).logits, rtol=1e-4, atol=1e-5)


def test_other_sizes_and_missing_models_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no saved model in"):
        begin_with(model_of(0), tmp_path)
    model_of(0, num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"has other sizes than this one, in stack\.blocks\.1"):
        begin_with(model_of(0), tmp_path)


def test_a_saved_model_without_all_of_its_weights_is_refused(tmp_path: Path) -> None:
    model_of(0).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({name: w for name, w in weights.items() if "blocks.1" not in name}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"are not in the file and would be random \(stack\.blocks\.1"):
        begin_with(model_of(1), tmp_path)


def test_a_run_starts_from_a_saved_model(tmp_path: Path) -> None:
    given = {
        "task": {"fewest": 1, "most": 2, "subsample": 4, "validation_examples": 1, "test_examples": 2},
        "model": {"layers": 1, "heads": 1, "width": 8},
        "training": {"steps": 1, "batch": 1, "learning_rate": 1e-9, "warmup": 0, "seed": 0},
    }
    data = tones(tmp_path / "data")
    first = train(settings_of("speech", given), tmp_path / "first", data=data)
    first.model.save_pretrained(tmp_path / "model")
    given["training"]["seed"] = 1
    again = train(settings_of("speech", given), tmp_path / "again", data=data, start_from=tmp_path / "model")
    other = train(settings_of("speech", given), tmp_path / "other", data=data)
    weight = first.model.head.weight
    torch.testing.assert_close(again.model.head.weight, weight)
    assert not torch.allclose(other.model.head.weight, weight, atol=1e-3)
