"""A part of a model that shares its config with other parts is swapped alone, and restored exactly."""

import copy
import json

import pytest
import torch
import transformers as hf

import subquad as sq
from subquad.hf import parts
from subquad.hf.parts import SHARED
from subquad.hf.trial import ORIGINAL
from tests.library.hf.models import TEXT, VOCAB, build

ROUGH, OTHER = "clustered:clusters=2", "linear"
SHARING = ["whisper", "bart", "marian", "mbart"]
SIZES = {
    "vocab_size": VOCAB, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip


@pytest.mark.parametrize("by_name", [False, True])
def test_a_model_that_shares_no_config_is_swapped_without_a_search_through_all_objects(monkeypatch, by_name):
    monkeypatch.setattr(parts, "_read_outside", lambda model, configs: pytest.fail("all objects were searched"))
    case = build("bert")
    if by_name:
        case.model.set_attn_implementation("subquad")
        case.model(**case.inputs)
    else:
        sq.hf.swap(case.model, ROUGH)
        sq.hf.swap(case.model, OTHER)
    assert sq.hf.describe(case.model).methods
    sq.hf.restore(case.model)


def made(name: str, implementation: str = "sdpa"):
    """An encoder-decoder and inputs for it."""
    torch.manual_seed(0)
    if name in ("whisper", "bart", "t5"):
        case = build(name)
        model, inputs = case.model.eval(), case.inputs
    else:
        cls, config = {
            "marian": (hf.MarianMTModel, hf.MarianConfig),
            "mbart": (hf.MBartForConditionalGeneration, hf.MBartConfig),
        }[name]
        model, inputs = cls(config(**SIZES)).eval(), build("bart").inputs
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(3.0)
    model.set_attn_implementation(implementation)
    return model, inputs


def halves(model, inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """The output of the encoder, and that of the decoder for encoder states that no encoder made."""
    encoder, decoder = model.get_encoder(), model.get_decoder()
    theirs = {name: value for name, value in inputs.items() if not name.startswith("decoder")}
    states = torch.linspace(-1, 1, 2 * 17 * 32).view(2, 17, 32)
    keys = {"encoder_attention_mask": inputs["attention_mask"]} if "attention_mask" in inputs else {}
    ids = inputs["decoder_input_ids"]
    mask = {"attention_mask": inputs["decoder_attention_mask"]} if "decoder_attention_mask" in inputs else {}
    with torch.inference_mode():
        return (
            encoder(**theirs).last_hidden_state,
            decoder(input_ids=ids, encoder_hidden_states=states, **keys, **mask).last_hidden_state,
        )


def logits(model, inputs) -> torch.Tensor:
    with torch.inference_mode():
        return model(**inputs).logits


def same(got, want) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def is_clean(model, config) -> bool:
    """Tell whether no module of a model has anything of a swap left, and its parts have this config again."""
    left = any({ORIGINAL, SHARED} & vars(module).keys() for module in model.modules())
    configs = {id(part.config) for part in model.modules() if isinstance(part, hf.PreTrainedModel)}
    return not left and configs == {id(config)} and "subquad" not in config.to_json_string()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", SHARING)
def test_the_encoder_is_swapped_alone(name, implementation):
    model, inputs = made(name, implementation)
    config, before, whole = model.config, halves(model, inputs), logits(model, inputs)
    sq.hf.swap(model.get_encoder(), ROUGH)
    encoded, decoded = halves(model, inputs)
    assert torch.equal(decoded, before[1])
    assert not torch.allclose(encoded, before[0], atol=1e-3)
    assert not torch.equal(logits(model, inputs), whole)
    if name != "whisper":
        assert model.generate(inputs["input_ids"], max_new_tokens=3).shape[0] == 2
    methods = sq.hf.describe(model).methods
    assert {str(method) for method in methods.values()} == {ROUGH}
    assert len(methods) == 2
    sq.hf.restore(model.get_encoder())
    assert is_clean(model, config)
    assert config._attn_implementation == implementation
    assert same(halves(model, inputs), before)
    assert torch.equal(logits(model, inputs), whole)


@pytest.mark.parametrize("name", SHARING)
def test_with_exact_attention_in_the_encoder_the_model_computes_what_it_did(name):
    model, inputs = made(name)
    want = logits(model, inputs)
    sq.hf.swap(model.get_encoder(), "full")
    torch.testing.assert_close(logits(model, inputs), want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["whisper", "bart"])
def test_the_decoder_is_swapped_alone(name):
    model, inputs = made(name)
    config, before = model.config, halves(model, inputs)
    sq.hf.swap(model.get_decoder(), {"*self_attn": OTHER})
    encoded, decoded = halves(model, inputs)
    assert torch.equal(encoded, before[0])
    assert not torch.allclose(decoded, before[1], atol=1e-3)
    sq.hf.restore(model)  # of the whole model
    assert is_clean(model, config)
    assert same(halves(model, inputs), before)


@pytest.mark.parametrize("encoder_first", [True, False])
@pytest.mark.parametrize("name", ["whisper", "bart"])
def test_two_parts_are_swapped_and_restored_in_either_order(name, encoder_first):
    model, inputs = made(name)
    before, config = halves(model, inputs), model.config
    sq.hf.swap(model.get_encoder(), ROUGH)
    sq.hf.swap(model.get_decoder(), OTHER)
    both = halves(model, inputs)
    assert not same(both[:1], before[:1])
    assert not same(both[1:], before[1:])
    order = (model.get_encoder(), model.get_decoder())
    first, second = order if encoder_first else order[::-1]
    sq.hf.restore(first)
    one = halves(model, inputs)
    assert same(one, (before[0], both[1]) if encoder_first else (both[0], before[1]))
    sq.hf.restore(second)
    assert same(halves(model, inputs), before)
    assert is_clean(model, config)


def test_the_whole_model_is_swapped_after_a_part():
    model, inputs = made("whisper")
    config, before = model.config, halves(model, inputs)
    sq.hf.swap(model.get_encoder(), ROUGH)
    sq.hf.swap(model, OTHER)
    assert {str(method) for method in sq.hf.describe(model).methods.values()} == {OTHER}
    assert model.get_encoder().config is model.config is config
    assert not same(halves(model, inputs)[1:], before[1:])
    sq.hf.restore(model)
    assert is_clean(model, config)
    assert same(halves(model, inputs), before)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_part_is_swapped_or_restored_after_the_whole_model(implementation):
    model, inputs = made("whisper", implementation)
    config, before = model.config, halves(model, inputs)
    sq.hf.swap(model, OTHER)
    whole = halves(model, inputs)
    sq.hf.swap(model.get_encoder(), ROUGH)
    encoded, decoded = halves(model, inputs)
    assert torch.equal(decoded, whole[1])
    assert not torch.allclose(encoded, whole[0], atol=1e-3)
    assert sorted(map(str, sq.hf.describe(model).methods.values())) == [ROUGH] * 2 + [OTHER] * 4
    sq.hf.restore(model.get_encoder())
    assert same(halves(model, inputs), (before[0], whole[1]))
    assert len(sq.hf.describe(model).methods) == 4
    sq.hf.restore(model)
    assert is_clean(model, config)
    assert config._attn_implementation == implementation
    assert same(halves(model, inputs), before)


def test_swapping_a_part_twice_and_restoring_it_leads_to_its_own_attention():
    model, inputs = made("bart")
    config, before = model.config, halves(model, inputs)
    for method in (ROUGH, "i-clustered:clusters=2,topk=2"):
        sq.hf.swap(model.get_encoder(), method)
    assert model.config is config
    sq.hf.restore(model.get_encoder())
    sq.hf.restore(model.get_encoder())
    assert is_clean(model, config)
    assert same(halves(model, inputs), before)


def test_a_refused_swap_changes_nothing():
    model, inputs = made("whisper")
    config, before = model.config, halves(model, inputs)
    with pytest.raises(ValueError, match="is not causal"):
        sq.hf.swap(model.get_decoder(), "smyrf")
    assert is_clean(model, config)
    assert same(halves(model, inputs), before)


def test_another_attention_that_is_set_in_the_whole_model_is_noticed_in_the_part():
    model, inputs = made("whisper")
    before = halves(model, inputs)
    sq.hf.swap(model.get_encoder(), ROUGH)
    model.set_attn_implementation("sdpa")
    assert sq.hf.describe(model).methods == {}
    with pytest.raises(ValueError, match=r"of this WhisperEncoder runs .* but attn_implementation='sdpa' was set"):
        halves(model, inputs)
    sq.hf.restore(model.get_encoder())
    assert same(halves(model, inputs), before)


def test_a_copy_of_a_model_with_a_swapped_part_is_restored_on_its_own():
    model, inputs = made("whisper")
    before = halves(model, inputs)
    sq.hf.swap(model.get_encoder(), ROUGH)
    swapped, copied = halves(model, inputs), copy.deepcopy(model)
    assert same(halves(copied, inputs), swapped)
    sq.hf.restore(copied.get_encoder())
    assert is_clean(copied, copied.config)
    assert copied.config is not model.config
    assert same(halves(copied, inputs), before)
    assert same(halves(model, inputs), swapped)


def test_models_made_from_one_config_are_swapped_one_by_one():
    torch.manual_seed(0)
    config = hf.BertConfig(**TEXT)
    one, other = hf.BertModel(config).eval(), hf.BertModel(config).eval()
    ids = torch.arange(5, 25)[None]
    before = one(ids).last_hidden_state, other(ids).last_hidden_state
    sq.hf.swap(one, ROUGH)
    assert not torch.equal(one(ids).last_hidden_state, before[0])
    assert torch.equal(other(ids).last_hidden_state, before[1])
    sq.hf.swap(other, OTHER)
    swapped = one(ids).last_hidden_state
    sq.hf.restore(other)
    assert same((one(ids).last_hidden_state, other(ids).last_hidden_state), (swapped, before[1]))
    sq.hf.restore(one)
    assert same((one(ids).last_hidden_state, other(ids).last_hidden_state), before)
    assert is_clean(one, config)
    assert is_clean(other, config)


def test_the_parts_of_t5_which_have_configs_of_their_own_keep_them():
    model, inputs = made("t5", "eager")
    before, configs = halves(model, inputs), [model.encoder.config, model.decoder.config]
    sq.hf.swap(model.encoder, "full")
    assert [model.encoder.config, model.decoder.config] == configs
    assert torch.equal(halves(model, inputs)[1], before[1])
    assert len(sq.hf.describe(model).methods) == 2
    sq.hf.restore(model.encoder)
    assert same(halves(model, inputs), before)


def test_what_is_changed_in_a_config_while_swapped_stays_changed():
    torch.manual_seed(0)
    config = hf.BertConfig(**TEXT)
    one, other = hf.BertModel(config), hf.BertModel(config)
    sq.hf.swap(one, ROUGH)
    sq.hf.extend_positions(one, 100)
    config.classifier_dropout = 0.5
    assert (one.config.max_position_embeddings, config.max_position_embeddings) == (100, 64)
    sq.hf.restore(one)
    assert one.config is other.config is config
    assert (config.max_position_embeddings, config.classifier_dropout) == (100, 0.5)


def test_a_base_model_whose_head_has_no_attention_keeps_the_config_of_both():
    torch.manual_seed(0)
    model = hf.BertForSequenceClassification(hf.BertConfig(**TEXT))
    sq.hf.swap(model.bert, ROUGH)
    assert model.bert.config is model.config
    assert model.config.subquad["layers"] == 2


@pytest.mark.slow
@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("case", ["encoder", "both", "part of whole", "restored part of whole"])
@pytest.mark.parametrize("name", ["whisper", "bart"])
def test_a_model_with_a_swapped_part_is_saved_and_comes_back(name, case, tmp_path):
    model, inputs = made(name)
    before = halves(model, inputs)
    if "whole" in case:
        sq.hf.swap(model, OTHER)
    if case == "restored part of whole":
        sq.hf.restore(model.get_encoder())
    else:
        sq.hf.swap(model.get_encoder(), ROUGH)
    if case == "both":
        sq.hf.swap(model.get_decoder(), OTHER)
    want, record = halves(model, inputs), copy.deepcopy(vars(model.config).get("subquad"))
    model.save_pretrained(tmp_path / "model")
    assert vars(model.config).get("subquad") == record  # the record of the parts is there while it is written only
    assert not hasattr(model.config, "attn_implementation") or "whole" in case
    loaded = type(model).from_pretrained(tmp_path / "model").eval()
    assert same(halves(loaded, inputs), want)
    assert sq.hf.describe(loaded).methods == sq.hf.describe(model).methods
    loaded.save_pretrained(tmp_path / "again")
    texts = [json.loads((tmp_path / each / "config.json").read_text()) for each in ("model", "again")]
    assert texts[0]["subquad"] == texts[1]["subquad"]
    sq.hf.restore(loaded)
    assert same(halves(loaded, inputs), before)
    own = type(model).from_pretrained(tmp_path / "model", attn_implementation="sdpa").eval()
    assert same(halves(own, inputs), before)
    sq.hf.reattach(own)
    assert same(halves(own, inputs), want)


def test_a_saved_part_that_cannot_come_back_does_not_run(tmp_path):
    model, inputs = made("whisper")
    sq.hf.swap(model.get_encoder(), ROUGH)
    for change, message in (
        ({"keep": "many"}, "record of a swap is damaged: ValueError: keep='many'"),
        ({"methods": {"0": {"no": 1}}}, "record of a swap is damaged"),
    ):
        record = model.get_encoder().config.subquad
        model.get_encoder().config.subquad = record | change
        model.save_pretrained(tmp_path)
        model.get_encoder().config.subquad = record
        with pytest.warns(UserWarning, match=message):
            loaded = type(model).from_pretrained(tmp_path)
        with pytest.raises(ValueError, match="no method is attached"):
            loaded(**inputs)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["subquad"]["parts"] = {"model.nobody": record}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.warns(UserWarning, match=r"record of a swap is damaged.*nobody"):
        type(model).from_pretrained(tmp_path)


def test_the_tower_of_a_model_of_images_and_text():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**sizes, image_size=32, patch_size=8),
        text_config=hf.LlamaConfig(**TEXT, num_key_value_heads=2),
        image_token_index=VOCAB - 1,
    )
    model = hf.LlavaForConditionalGeneration(config).eval()
    ids = torch.cat([torch.full((1, 16), VOCAB - 1), torch.arange(5, 12)[None]], 1)
    inputs = {"input_ids": ids, "pixel_values": torch.randn(1, 3, 32, 32)}
    text = {"input_ids": ids[:, 16:]}
    want, of_text = logits(model, inputs), logits(model, text)
    for part, untouched in ((model.model.vision_tower, text), (model.model.language_model, None)):
        method = ROUGH if untouched is not None else OTHER
        sq.hf.swap(part, method)
        assert not torch.allclose(logits(model, inputs), want, atol=1e-4)
        if untouched is not None:
            assert torch.equal(logits(model, untouched), of_text)
        sq.hf.restore(part)
        assert torch.equal(logits(model, inputs), want)


def test_a_single_layer_is_refused_with_what_is_expected():
    model, _ = made("whisper")
    with pytest.raises(TypeError, match="PreTrainedModel"):
        sq.hf.swap(model.get_encoder().layers[0], ROUGH)


def test_parts_that_were_edited_away_are_noticed(tmp_path):
    model, _ = made("bart")
    sq.hf.swap(model.get_encoder(), ROUGH)
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["subquad"]["parts"] = {}
    path.write_text(json.dumps(config))
    with pytest.warns(UserWarning, match="was edited since the model was saved: its swapped parts are gone"):
        type(model).from_pretrained(tmp_path)
