"""One module of learned parameters for all layers of a model."""

import torch
from safetensors.torch import load_file

import subquad as sq
from subquad.research.training.models import EncoderClassifier, EncoderConfig
from tests.library.hf.test_adapters import bert, outputs

ONE = "linformer:k=4,sharing=layerwise"


def learned(model):
    return [bound.learned for bound in sq.hf.bounds(model).values()]


def test_swap_gives_all_layers_one_module():
    model = bert()
    before = outputs(model)
    sq.hf.swap(model, ONE)
    first, second = learned(model)
    assert first is second
    assert len({p for module in learned(model) for p in module.parameters()}) == 2  # E = F, and the bias
    assert not torch.allclose(outputs(model), before, atol=1e-6)
    model(torch.arange(40)[None] % 30 + 5).last_hidden_state.square().sum().backward()
    assert first.key.grad.abs().max() > 0


def test_other_sharings_and_other_settings_stay_apart():
    model = bert()
    sq.hf.swap(model, "linformer:k=4")
    first, second = learned(model)
    assert first is not second
    sq.hf.swap(model, {0: ONE, 1: "linformer:k=5,sharing=layerwise"})
    first, second = learned(model)
    assert first is not second
    assert first.key.shape != second.key.shape


def test_an_adapter_comes_back_shared(tmp_path):
    model, other = bert(), bert()
    sq.hf.swap(model, ONE)
    learned(model)[0].key.data.mul_(1.5)
    sq.hf.save_adapter(model, tmp_path / "adapter")
    sq.hf.load_adapter(other, tmp_path / "adapter")
    first, second = learned(other)
    assert first is second
    assert torch.equal(first.key, learned(model)[0].key)
    assert torch.equal(outputs(other), outputs(model))


def test_a_saved_model_has_it_once_and_comes_back_shared(tmp_path):
    sizes = {"vocab_size": 20, "hidden_size": 32, "num_hidden_layers": 3, "max_position_embeddings": 64}
    model = EncoderClassifier(EncoderConfig(**sizes, method=ONE)).eval()
    learned(model)[0].key.data.mul_(1.5)
    model.save_pretrained(tmp_path)
    assert sum("learned.key" in name for name in load_file(tmp_path / "model.safetensors")) == 1
    other = EncoderClassifier.from_pretrained(tmp_path).eval()
    assert len({id(module) for module in learned(other)}) == 1
    before = model.state_dict()
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())
