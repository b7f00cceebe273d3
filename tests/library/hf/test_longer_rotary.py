"""Past the rotary positions: YaRN for long items, the model's own frequencies for the others."""

import copy
import json
import pickle
import subprocess
import sys

import pytest
import torch
import transformers as hf
from torch import Tensor

import subquad as sq
from subquad.hf.item_rotary import ItemRotary
from subquad.hf.positions import extended_positions
from tests.forks import output_of
from tests.library.hf.models import TEXT, VOCAB, build
from tests.library.hf.test_rotary_trial import BANDS, LAYERS, SCALED

NAMES = ["llama", "qwen3", "phi", "gpt-neox", "gemma3"]
ROWS, REACH, LONG = 64, 128, 100
STRICT = "clustered-tail:block=16,last=0,queries=earlier"
METHODS = ["full", "clustered-tail:block=16,last=4", STRICT]
MORE = {"do_sample": False, "use_cache": True}


def plain(name: str) -> hf.PreTrainedModel:
    """A random decoder of 64 positions, with attention that depends on them."""
    torch.manual_seed(0)
    if name == "gpt-neox":
        model = hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**TEXT, rotary_pct=0.5)).eval()
    elif name == "gemma3":
        layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 20}
        config = hf.Gemma3TextConfig(**TEXT, head_dim=8, num_key_value_heads=2, rope_parameters=LAYERS, **layers)
        model = hf.Gemma3ForCausalLM(config).eval()
    else:
        model = build(name).model
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(3.0)
    return model


def extended(name: str, length: int = REACH) -> hf.PreTrainedModel:
    return sq.hf.extend_positions(plain(name), length)


def of_transformers(name: str, length: int = REACH) -> hf.PreTrainedModel:
    """The model with transformers' own YaRN, in all items."""
    model = plain(name)
    config = copy.deepcopy(model.config)
    yarn = {"rope_type": "yarn", "factor": length / ROWS, "original_max_position_embeddings": ROWS}
    parameters = config.rope_parameters
    if "full_attention" in parameters:
        parameters["full_attention"] |= yarn
    else:
        parameters |= yarn
    config.rope_parameters, config.max_position_embeddings = parameters, length
    other = type(model)(config).eval()
    other.load_state_dict(model.state_dict())
    return other


def tokens(*lengths: int, side: str = "left") -> tuple[Tensor, Tensor]:
    """Random items of these lengths, and their mask."""
    most = max(lengths)
    mask = (torch.arange(most) < torch.tensor(lengths)[:, None]).long()
    mask = mask.flip(1) if side == "left" else mask
    return torch.randint(5, VOCAB, mask.shape, generator=torch.Generator().manual_seed(1)) * mask, mask


@torch.no_grad()
def logits(model: hf.PreTrainedModel, ids: Tensor, **inputs: Tensor) -> Tensor:
    return model(input_ids=ids, **inputs).logits


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_short_items_are_as_they_were_and_long_ones_are_transformers_yarn(name):
    model, before, yarn = extended(name), plain(name), of_transformers(name)
    short, long = tokens(ROWS)[0], tokens(LONG)[0]
    assert torch.equal(logits(model, short), logits(before, short))
    assert torch.equal(logits(model, long), logits(yarn, long))
    assert not torch.allclose(logits(model, long), logits(before, long), atol=1e-3)
    assert sq.hf.rotary_limit(model) == model.config.max_position_embeddings == REACH
    with pytest.raises(ValueError, match="an item has 129 positions, but the model was extended to 128"):
        logits(model, tokens(REACH + 1)[0])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", NAMES)
def test_each_item_of_a_padded_batch_is_read_by_its_length(name, side):
    model, before, yarn = extended(name), plain(name), of_transformers(name)
    ids, mask = tokens(LONG, ROWS, 70, 3, side=side)
    together = logits(model, ids, attention_mask=mask)
    for item, other in zip(range(4), (yarn, before, yarn, before), strict=True):
        valid = mask[item].bool()
        close(together[item, valid], logits(other, ids, attention_mask=mask)[item, valid])


def test_position_ids_show_packed_sequences():
    model, before, yarn = extended("llama"), plain("llama"), of_transformers("llama")
    ids, position = tokens(110)[0], torch.cat([torch.arange(80), torch.arange(30)])[None]
    packed = logits(model, ids, position_ids=position, use_cache=False)
    close(packed[:, :80], logits(yarn, ids[:, :80]))
    close(packed[:, 80:], logits(before, ids[:, 80:]))


@pytest.mark.parametrize("name", NAMES)
def test_steps_on_a_cache_are_those_of_the_whole_request(name):
    model = extended(name)
    ids, mask = tokens(LONG, LONG - 35)
    whole = logits(model, ids, attention_mask=mask)
    with torch.no_grad(), sq.hf.reaching(model, LONG):
        cache = model(input_ids=ids[:, :50], attention_mask=mask[:, :50], use_cache=True).past_key_values
    with torch.no_grad():
        for end in range(51, LONG + 1):
            step = model(input_ids=ids[:, end - 1 : end], attention_mask=mask[:, :end], past_key_values=cache)
    close(step.logits[:, -1], whole[:, -1])


def test_a_step_past_the_own_positions_on_a_cache_of_theirs_is_an_error():
    model, ids = extended("llama"), tokens(LONG)[0]
    with torch.no_grad():
        cache = model(input_ids=ids[:, : ROWS - 1], use_cache=True).past_key_values
        model(input_ids=ids[:, :1], past_key_values=cache)
        with pytest.raises(ValueError, match=r"own 64 positions.*sq\.hf\.reaching\(model, length\)"):
            model(input_ids=ids[:, :1], past_key_values=cache)


def test_a_cache_that_another_model_filled_is_an_error():
    model, ids = extended("llama"), tokens(20)[0]
    with torch.no_grad():
        cache = plain("llama")(input_ids=ids, use_cache=True).past_key_values
        with pytest.raises(ValueError, match="not filled by this model since its positions were extended"):
            model(input_ids=ids, past_key_values=cache)


def test_a_cache_of_both_kinds_serves_the_items_that_filled_it():
    model = extended("llama")
    ids, mask = tokens(LONG, 10)
    with torch.no_grad():
        cache = model(input_ids=ids, attention_mask=mask, use_cache=True).past_key_values
        for layer in cache.layers:
            layer.batch_select_indices(torch.tensor([1]))
        with pytest.raises(ValueError, match=r"filled with 2 items, some longer.* is used with 1"):
            model(input_ids=ids[1:, :1], past_key_values=cache)


CHANGES = {
    "reordered": ("reorder_cache", torch.tensor([1, 0]), [1, 0]),
    "selected": ("batch_select_indices", torch.tensor([1]), [1]),
    "one twice": ("batch_select_indices", torch.tensor([0, 0]), [0, 0]),
    "repeated": ("batch_repeat_interleave", 2, [0, 0, 1, 1]),
}


@pytest.mark.parametrize("growing", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_items_of_both_kinds_are_reordered_selected_and_repeated(change, growing):
    model = extended("llama")
    ids, mask = tokens(40, 10)
    ids, mask = torch.cat([ids, tokens(3, 3)[0]], 1), torch.cat([mask, torch.ones(2, 3).long()], 1)
    name, argument, items = CHANGES[change]
    cache = sq.hf.GrowingCache(model) if growing else hf.DynamicCache(config=model.config)
    with torch.no_grad(), sq.hf.reaching(model, 90):  # the first item will have 90 tokens, the second 60
        want = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[items, 40:]
        model(input_ids=ids[:, :40], attention_mask=mask[:, :40], past_key_values=cache)
        getattr(cache, name)(argument)
        have = model(input_ids=ids[items, 40:], attention_mask=mask[items], past_key_values=cache).logits
    close(have, want)


CACHES = {
    "dynamic": lambda model: None,
    "growing": sq.hf.GrowingCache,
    "static": lambda model: hf.StaticCache(config=model.config, max_cache_len=REACH),
}


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prefill_chunk_size": 16}], ids=str)
def test_generate_reads_a_prompt_as_the_start_of_its_request(kind, options):
    model, yarn, before = extended("llama"), of_transformers("llama"), plain("llama")
    ids, mask = tokens(50, 20)
    for new, others in ((40, (yarn, before)), (10, (before, before))):
        mine = model.generate(
            ids, attention_mask=mask, past_key_values=CACHES[kind](model), max_new_tokens=new, min_new_tokens=new,
            **MORE, **options,
        )  # fmt: skip
        for item, other in enumerate(others):
            wanted = other.generate(
                ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new,
                **MORE, **({"num_beams": options["num_beams"]} if "num_beams" in options else {}),
            )  # fmt: skip
            assert torch.equal(mine[item], wanted[item])


def test_an_assistant_reads_the_request_of_its_main_model():
    model, ids = extended("llama"), tokens(50)[0]
    new = {"max_new_tokens": 40, "do_sample": False}
    assert torch.equal(model.generate(ids, **new, assistant_model=extended("llama")), model.generate(ids, **new))


@pytest.mark.parametrize("order", ["swap first", "extend first"])
@pytest.mark.parametrize("method", METHODS)
def test_swapped_models_have_the_frequencies_of_each_item(method, order):
    model, before, yarn = plain("llama"), plain("llama"), of_transformers("llama")
    if order == "swap first":
        sq.hf.swap(model, method)
    sq.hf.extend_positions(model, REACH)
    for each in (before, yarn, *([model] if order == "extend first" else [])):
        sq.hf.swap(each, method)
    short, long = tokens(ROWS)[0], tokens(LONG)[0]
    assert torch.equal(logits(model, short), logits(before, short))
    assert torch.equal(logits(model, long), logits(yarn, long))
    ids, mask = tokens(LONG, 60)
    together = logits(model, ids, attention_mask=mask)
    close(together[:1], logits(yarn, ids[:1]))
    close(together[1:, -60:], logits(before, ids[1:, -60:]))
    sq.hf.restore(model)
    close(logits(model, long), logits(of_transformers("llama"), long))


def test_a_layer_that_runs_outside_of_its_model_is_an_error():
    model = extended("llama")
    sq.hf.swap(model, STRICT)
    layer = model.model.layers[0].self_attn.subquad
    with pytest.raises(ValueError, match="outside of a forward pass of its model"):
        layer.rotary.now()


def test_packed_sequences_of_both_kinds_are_refused_where_queries_are_turned():
    model = extended("llama")
    sq.hf.swap(model, STRICT)
    position = torch.cat([torch.arange(80), torch.arange(30)])[None]
    with pytest.raises(ValueError, match="packed sequences of which some are longer"):
        logits(model, tokens(110)[0], position_ids=position, use_cache=False)


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_model_loads_as_it_was_saved(name, tmp_path):
    model = extended(name)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["max_position_embeddings"], model.config.max_position_embeddings) == (ROWS, REACH)
    assert list(config["subquad_positions"].values()) == [{"length": REACH, "mode": "yarn"}]
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    for length in (30, LONG):
        close(logits(again, tokens(length)[0]), logits(model, tokens(length)[0]))
    assert extended_positions(again) == extended_positions(model)
    inside = hf.AutoModel.from_pretrained(tmp_path)
    assert sq.hf.rotary_limit(inside) == REACH


def test_a_saved_swapped_model_has_both(tmp_path):
    model = extended("llama")
    sq.hf.swap(model, METHODS[1])
    model.save_pretrained(tmp_path)
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    close(logits(again, tokens(LONG)[0]), logits(model, tokens(LONG)[0]))


def test_without_subquad_a_saved_model_is_the_original(tmp_path):
    extended("llama").save_pretrained(tmp_path)
    code = (
        "import sys, torch, transformers\n"
        "model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "assert 'subquad' not in sys.modules and model.config.max_position_embeddings == 64\n"
        "assert model.config.rope_parameters['rope_type'] == 'default'\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


def test_copies_and_pickles_are_extended_for_themselves():
    model, ids = extended("llama"), tokens(LONG)[0]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(other, ids), logits(model, ids))
        sq.hf.extend_positions(other, 4 * ROWS)
        assert (sq.hf.rotary_limit(other), sq.hf.rotary_limit(model)) == (4 * ROWS, REACH)
        assert torch.equal(logits(other, ids), logits(of_transformers("llama", 4 * ROWS), ids))


def test_a_pickled_model_works_where_nothing_else_was_extended(tmp_path):
    model, ids = extended("llama"), tokens(LONG, 20)
    torch.save((model, *ids, logits(model, ids[0], attention_mask=ids[1])), tmp_path / "model.pt")
    code = (
        "import sys, torch, subquad.hf\n"
        "model, ids, mask, wanted = torch.load(sys.argv[1], weights_only=False)\n"
        "with torch.no_grad():\n"
        "    torch.testing.assert_close(model(input_ids=ids, attention_mask=mask).logits, wanted)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "model.pt")], check=True)


def test_as_many_positions_change_nothing():
    model = plain("llama")
    with pytest.warns(UserWarning, match="changed nothing: length=10, but LlamaForCausalLM has 64 positions already"):
        sq.hf.extend_positions(model, 10)
    sq.hf.extend_positions(model, ROWS)
    assert not any(isinstance(module, ItemRotary) for module in model.modules())
    assert model.config.max_position_embeddings == ROWS


def test_a_second_call_keeps_the_larger_length():
    model = sq.hf.extend_positions(extended("llama", 4 * ROWS), REACH)
    assert sq.hf.rotary_limit(model) == 4 * ROWS
    assert torch.equal(logits(model, tokens(LONG)[0]), logits(of_transformers("llama", 4 * ROWS), tokens(LONG)[0]))


def test_windows_keep_their_frequencies():
    mistral = build("mistral").model
    assert sq.hf.rotary_limit(mistral) is None
    before = logits(mistral, tokens(LONG)[0])
    sq.hf.extend_positions(mistral, REACH)
    assert torch.equal(logits(mistral, tokens(LONG)[0]), before)
    rotary = extended("gemma3").model.rotary_emb
    assert torch.equal(rotary.sliding_attention_inv_freq, rotary.longer.sliding_attention_inv_freq)
    assert not torch.equal(rotary.full_attention_inv_freq, rotary.longer.full_attention_inv_freq)


@pytest.mark.parametrize("parameters", [
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    {"rope_type": "yarn", **SCALED},
    {"rope_type": "llama3", **SCALED, **BANDS},
    {"rope_type": "longrope", **SCALED, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
], ids=lambda parameters: parameters["rope_type"])  # fmt: skip
def test_positions_that_are_scaled_already_are_refused(parameters):
    config = hf.LlamaConfig(**TEXT, num_key_value_heads=2, rope_parameters=parameters)
    model = hf.LlamaForCausalLM(config)
    with pytest.raises(ValueError, match=f"scaled already, by rope_type='{parameters['rope_type']}' for 64 positions"):
        sq.hf.extend_positions(model, REACH)
    assert not any(isinstance(module, ItemRotary) for module in model.modules())


def test_other_rotary_positions_are_refused():
    small = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 4, "n_positions": ROWS}
    with pytest.raises(ValueError, match="from a table of 64 rows"):
        sq.hf.extend_positions(hf.GPTJForCausalLM(hf.GPTJConfig(**small)), REACH)
    model = plain("llama")
    model.model.rotary_emb.inv_freq *= 2
    with pytest.raises(ValueError, match="are not the frequencies of rope_theta=10000"):
        sq.hf.extend_positions(model, REACH)
    axes = hf.LlamaConfig(**TEXT, num_key_value_heads=2)
    axes.rope_parameters["mrope_section"] = [1, 1, 2]
    with pytest.raises(ValueError, match="several axes"):
        sq.hf.extend_positions(hf.LlamaForCausalLM(axes), REACH)


def test_a_mask_of_another_shape_needs_position_ids():
    model = extended("llama")
    mask = torch.zeros(1, 1, LONG, LONG).masked_fill(torch.ones(LONG, LONG).triu(1).bool(), -torch.inf)
    with pytest.raises(ValueError, match=r"attention mask \(batch, tokens\), but one of another shape"):
        logits(model, tokens(LONG)[0], attention_mask=mask)
    numbered = logits(model, tokens(LONG)[0], attention_mask=mask, position_ids=torch.arange(LONG)[None])
    close(numbered, logits(model, tokens(LONG)[0]))


@pytest.mark.parametrize(("make", "length", "message"), [
    (plain, 100, r"are not extended; call sq\.hf\.extend_positions\(model, 100\) first"),
    (extended, 200, "length=200, but the model was extended to 128"),
])  # fmt: skip
def test_reaching_needs_positions(make, length, message):
    with pytest.raises(ValueError, match=message), sq.hf.reaching(make("llama"), length):
        pass


def test_compiled_and_exported():
    """In a process of its own, as `extended`."""
    output_of("tests.library.hf.extended_rotary")
