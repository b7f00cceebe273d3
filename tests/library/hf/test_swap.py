"""With "full", every swapped model equals its own eager attention; other methods run or are refused with a reason."""

import copy
import pickle

import pytest
import torch
import transformers as hf
from torch.func import functional_call, grad, vmap

import subquad as sq
from subquad.testing.oracle import normal
from tests.library.hf.models import BUILDERS, ENCODERS, TEXT, build, need_the_interface, padded_ids

CLUSTERED = ["clustered:clusters=4,iterations=3", "i-clustered:clusters=4,topk=3"]


def gradients(case):
    case.model.zero_grad()
    case.output().square().mean().backward()
    return {name: p.grad.clone() for name, p in case.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", BUILDERS)
def test_full_equals_the_models_own_attention_with_gradients(name):
    case = build(name)
    want, want_gradients = case.output(), gradients(case)
    swapped = sq.hf.swap(case.model, "full")
    assert len(swapped.methods) == len(swapped.layers) > 0
    torch.testing.assert_close(case.output(), want, atol=1e-5, rtol=1e-5)
    have_gradients = gradients(case)
    assert have_gradients.keys() == want_gradients.keys()
    for parameter, want_gradient in want_gradients.items():
        scale = want_gradient.abs().max().clamp(min=1.0)
        torch.testing.assert_close(have_gradients[parameter] / scale, want_gradient / scale, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", BUILDERS)
def test_restore_gives_the_same_numbers_and_leaves_nothing(name):
    case = build(name)
    before, keys = case.output(), set(case.model.state_dict())
    sq.hf.swap(case.model, "full")
    sq.hf.restore(case.model)
    torch.testing.assert_close(case.output(), before, atol=0, rtol=0)
    assert case.model.config._attn_implementation == "eager"
    assert not hasattr(case.model.config, "subquad")
    assert set(case.model.state_dict()) == keys
    assert not sq.hf.describe(case.model).methods


@pytest.mark.parametrize("method", ["rfa", "linformer", "synthesizer", "local:window=4,positions=relative"])
def test_parameters_of_a_swap_in_inference_mode_are_trained(method):
    swapped = []
    for mode in (False, True):
        case = build("llama")
        with torch.inference_mode(mode):
            sq.hf.swap(case.model, method, max_length=64)
        swapped.append(gradients(case))
    want, have = swapped
    assert any(".subquad." in name for name in want)
    assert have.keys() == want.keys()
    assert all(torch.equal(have[name], want[name]) for name in want)


@pytest.mark.parametrize("method", CLUSTERED)
@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_run_clustered_attention_and_padding_does_not_matter(name, method):
    case = build(name)
    exact = case.output()
    sq.hf.swap(case.model, method)
    together = case.output()
    assert together.isfinite().all()
    assert not torch.allclose(together, exact, atol=1e-6)
    if name in ("bert", "roberta", "distilbert"):
        n = int(case.valid[-1].sum())
        alone = case.model(input_ids=case.inputs["input_ids"][-1:, :n]).last_hidden_state[0]
        torch.testing.assert_close(together[-n:], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_another_default_device_moves_nothing(name):
    case = build(name)
    with torch.device("meta"):
        sq.hf.swap(case.model, "linformer:k=4", max_length=64)
        out = case.output()
    assert {x.device.type for x in (*case.model.parameters(), *case.model.buffers())} == {"cpu"}
    torch.testing.assert_close(out, case.output())


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_gradients_of_each_sample_equal_a_loop_with_padding_that_vmap_batches(name):
    model = build(name).model
    sq.hf.swap(model, "clustered:clusters=4" if name == "bert" else "local:window=3")
    parameters = dict(model.named_parameters())
    embeds = normal(2, 2, 12, model.config.hidden_size)
    valid = torch.arange(12) < torch.tensor([[[12], [5]], [[7], [9]]])

    def loss(parameters, embeds, valid):
        inputs = {"inputs_embeds": embeds, "attention_mask": valid.long()}
        return (functional_call(model, parameters, (), inputs)[0] * valid[..., None]).square().sum()

    together = vmap(grad(loss), (None, 0, 0))(parameters, embeds, valid)
    alone = [grad(loss)(parameters, *each) for each in zip(embeds, valid, strict=True)]
    for key, have in together.items():
        torch.testing.assert_close(have, torch.stack([each[key] for each in alone]), atol=1e-3, rtol=1e-3)


def test_left_and_right_padding_agree_in_an_encoder_without_positions():
    model = build("bert").model
    model.embeddings.position_embeddings.weight.data.zero_()
    sq.hf.swap(model, "i-clustered:clusters=4,topk=3")
    (ids, mask), (left_ids, left_mask) = padded_ids("right"), padded_ids("left")
    left_ids[-1][left_mask[-1].bool()] = ids[-1][mask[-1].bool()]
    right = model(input_ids=ids, attention_mask=mask).last_hidden_state[-1][mask[-1].bool()]
    left = model(input_ids=left_ids, attention_mask=left_mask).last_hidden_state[-1][left_mask[-1].bool()]
    torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert-decoder", "bart", "whisper"])
def test_a_method_that_is_not_causal_is_refused_on_causal_layers(name):
    case = build(name)
    before = case.output()
    with pytest.raises(ValueError, match=r"layer \d+ .*'smyrf' is not causal .* leak the future"):
        sq.hf.swap(case.model, "smyrf")
    torch.testing.assert_close(case.output(), before, atol=0, rtol=0)
    assert case.model.config._attn_implementation == "eager"


def test_a_folder_with_a_methods_name_does_not_hide_the_method(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    assert sq.hf.swap(build("bert").model, "full").methods


def test_the_folder_of_a_plan_is_no_method(tmp_path):
    case = build("bert")
    with pytest.raises(ValueError, match=r"is a folder: give the plan in it, sq\.load_plan\('"):
        sq.hf.swap(case.model, str(tmp_path))
    assert case.model.config._attn_implementation == "eager"


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("method", ["full", "full:kernel=subquad", "oracle-top:topk=64"])
def test_the_encoder_of_t5_alone_takes_its_bias(method, side):
    torch.manual_seed(0)
    config = hf.T5Config(vocab_size=60, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    model = hf.T5EncoderModel(config).eval()
    need_the_interface(model)
    for parameter in (p for p in model.parameters() if p.ndim > 1):
        parameter.data.mul_(3.0)
    ids, mask = padded_ids(side)
    want = model(input_ids=ids, attention_mask=mask).last_hidden_state
    assert {layer.kind for layer in sq.hf.swap(model, method).layers} == {"biased self-attention"}
    have = model(input_ids=ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(have, want, atol=1e-5, rtol=1e-5)


def test_equal_layers_print_as_one_row():
    config = hf.LlamaConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=9, num_attention_heads=4, intermediate_size=48
    )
    model = hf.LlamaModel(config)
    (line,) = str(sq.hf.swap(model, "clustered-tail")).splitlines()[1:]
    assert line.split() == ["all", "9", "layers.*.self_attn", "causal", "self-attention", "clustered-tail"]
    sq.hf.restore(model)
    lines = str(sq.hf.swap(model, {3: "clustered-tail", 4: "clustered-tail"})).splitlines()[1:]
    assert [line.partition(" layers")[0].strip() for line in lines] == ["0 to 2, 5 to 8", "3 to 4"]


def test_t5_refuses_methods_without_bias():
    case = build("t5")
    with pytest.raises(ValueError, match=r"supports no additive bias .* position bias"):
        sq.hf.swap(case.model, {"encoder.*": "clustered"})


def test_a_causal_pattern_of_layers_can_be_swapped_where_possible():
    case = build("bart")
    swapped = sq.hf.swap(case.model, {"*encoder.layers*": "full", "model.encoder.*": "i-clustered:clusters=4,topk=64"})
    by_kind = {layer.kind: str(swapped.methods[layer.number]) for layer in swapped.layers}
    assert by_kind["cross-attention"] == by_kind["causal self-attention"] == "full"
    assert by_kind["self-attention"] == "i-clustered:clusters=4,topk=64"
    mine = case.output()
    sq.hf.restore(case.model)
    torch.testing.assert_close(mine, case.output(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("name", "pattern"), [("bart", "*encoder_attn"), ("whisper", "*encoder_attn")])
def test_cross_attention_of_a_causal_decoder_refuses_methods_that_mix_queries(name, pattern):
    case = build(name)
    with pytest.raises(ValueError, match="mixes queries, and those of this cross-attention are a causal decoder"):
        sq.hf.swap(case.model, {pattern: "i-clustered:clusters=4,topk=64"})
    sq.hf.swap(case.model, {pattern: "oracle-top:topk=64"})
    mine = case.output()
    sq.hf.restore(case.model)
    torch.testing.assert_close(mine, case.output(), atol=1e-5, rtol=1e-5)


def test_windowed_layers_refuse_clustered_attention_and_global_ones_take_it():
    case = build("modernbert")
    assert list(sq.hf.refusals(case.model, "clustered")) == [1, 2]
    with pytest.raises(ValueError, match=r"layer 1 .*has no window"):
        sq.hf.swap(case.model, {"*": "clustered"})
    sq.hf.swap(case.model, {0: "i-clustered:clusters=4,topk=64"})
    mine = case.output()
    sq.hf.restore(case.model)
    torch.testing.assert_close(mine, case.output(), atol=1e-5, rtol=1e-5)


def test_one_method_leaves_windowed_layers_exact_and_the_table_shows_it():
    case = build("modernbert")
    own = case.output()
    swapped = sq.hf.swap(case.model, "clustered:clusters=2")
    assert [str(swapped.methods[n]) for n in range(3)] == ["clustered:clusters=2", "full", "full"]
    assert str(swapped).splitlines()[-1] == "exact inside their window: 2 of 3 layers, which see no more"
    assert str(sq.hf.describe(case.model)) == str(swapped)
    assert not torch.allclose(case.output(), own, atol=1e-3)
    sq.hf.swap(case.model, "i-clustered:clusters=4,topk=64")
    torch.testing.assert_close(case.output(), own, atol=1e-5, rtol=1e-5)
    assert "exact inside" not in str(sq.hf.swap(case.model, "full"))
    sq.hf.restore(case.model)
    assert "exact inside" not in str(sq.hf.describe(case.model))


def test_a_model_with_windows_in_all_layers_has_nothing_to_gain():
    case = build("mistral")
    own = case.output()
    with pytest.raises(ValueError, match=r"'clustered-tail' has no window, and all 2 layers .*: there is nothing to"):
        sq.hf.swap(case.model, "clustered-tail")
    torch.testing.assert_close(case.output(), own, atol=0, rtol=0)
    sq.hf.swap(case.model, "local:window=5")  # it has windows


def test_other_refusals_are_not_hidden_by_windows():
    config = hf.Gemma2Config(
        **TEXT, num_key_value_heads=2, head_dim=8, sliding_window=5, bos_token_id=1, eos_token_id=2,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"layer 1 .*knows no capped logits, which this layer has"):
        sq.hf.swap(hf.Gemma2ForCausalLM(config), "clustered-tail")


def test_a_method_that_is_not_causal_is_refused_with_one_that_is():
    with pytest.raises(ValueError, match=r"'nystrom' is not causal and this layer is.*; take one that is, such as 'cl"):
        sq.hf.swap(build("llama").model, "nystrom")


def test_an_architecture_outside_the_interface_is_refused_by_name():
    model = hf.NystromformerModel(hf.NystromformerConfig(**TEXT))
    with pytest.raises(ValueError, match=r"NystromformerModel computes its attention itself.* swapped into it; archit"):
        sq.hf.swap(model, "clustered")


@pytest.mark.parametrize("name", ["Deberta", "DebertaV2"])
def test_attention_that_no_method_computes_is_refused_with_what_it_has(name):
    config = getattr(hf, f"{name}Config")(**TEXT, relative_attention=True, pos_att_type=["p2c", "c2p"])
    with pytest.raises(ValueError, match=rf"{name}Model computes its attention itself.*; its attention is disent"):
        sq.hf.swap(getattr(hf, f"{name}Model")(config), "full")


def test_not_a_transformers_model():
    with pytest.raises(TypeError, match="Linear"):
        sq.hf.swap(torch.nn.Linear(2, 2), "full")


@pytest.mark.parametrize(("mapping", "message"), [
    ({7: "full"}, "no layer is named by 7; the model has layers 0 to 1"),
    ({"decoder.*": "full"}, r"no layer is named by 'decoder\.\*'"),
    ({0: "clusterd"}, "did you mean 'clustered'"),
])  # fmt: skip
def test_bad_mappings_name_the_mistake(mapping, message):
    with pytest.raises(ValueError, match=message):
        sq.hf.swap(build("bert").model, mapping)


def test_describe_prints_a_line_for_equal_layers():
    model = build("bart").model
    sq.hf.swap(model, {3: "oracle-top", 0: "clustered:clusters=7"})
    text = str(sq.hf.describe(model))
    assert "model.encoder.layers.0.self_attn" in text
    assert "clustered:clusters=7" in text
    assert "causal self-attention" in text
    assert len(text.splitlines()) == 1 + 5
    assert "2, 4   model.decoder.layers.*.self_attn" in text


def test_describe_does_not_claim_what_no_longer_runs():
    case = build("bert")
    sq.hf.swap(case.model, "clustered:clusters=3")
    case.model.set_attn_implementation("sdpa")
    assert not sq.hf.describe(case.model).methods


@pytest.mark.parametrize(
    ("mapping", "error"), [({}, ValueError), ({True: "full"}, TypeError), ({(0,): "full"}, TypeError)]
)
def test_odd_mappings_are_refused(mapping, error):
    with pytest.raises(error):
        sq.hf.swap(build("bert").model, mapping)


def test_a_damaged_record_is_named():
    model = build("bert").model
    model.config.subquad = {"layers": 2}
    with pytest.raises(ValueError, match="record of a swap is damaged"):
        sq.hf.reattach(model)


def test_swapping_twice_replaces_and_restore_still_finds_the_models_own():
    case = build("bert")
    own = case.output()
    sq.hf.swap(case.model, "clustered:clusters=3")
    sq.hf.swap(case.model, {1: "oracle-top:topk=2"})
    assert [str(m) for m in sq.hf.describe(case.model).methods.values()] == ["full", "oracle-top:topk=2"]
    sq.hf.restore(case.model)
    torch.testing.assert_close(case.output(), own, atol=0, rtol=0)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copied_model_keeps_its_methods(copied):
    case = build("bert")
    sq.hf.swap(case.model, "clustered:clusters=3")
    want = case.output()
    case.model = copied(case.model)
    torch.testing.assert_close(case.output(), want, atol=0, rtol=0)


def test_save_and_reload_through_one_call(tmp_path):
    case = build("bert")
    wanted = {0: sq.Clustered(clusters=3, seed=5), 1: sq.ImprovedClustered(clusters=4, topk=2)}
    sq.hf.swap(case.model, wanted)
    want = case.output()
    case.model.save_pretrained(tmp_path)
    case.model = hf.AutoModel.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert not sq.hf.describe(case.model).methods
    assert sq.hf.reattach(case.model).methods == wanted
    torch.testing.assert_close(case.output(), want, atol=1e-6, rtol=1e-6)


def test_reattach_names_what_does_not_fit():
    model = build("bert").model
    with pytest.raises(ValueError, match="records no swapped attention"):
        sq.hf.reattach(model)
    model.config.subquad = {"layers": 12, "methods": {}}
    with pytest.raises(ValueError, match="12 layers but the model has 2"):
        sq.hf.reattach(model)


def test_an_unattached_model_under_our_name_says_what_to_do():
    model = build("bert").model
    model.set_attn_implementation(sq.hf.ATTACHED)
    with pytest.raises(ValueError, match=r"call sq\.hf\.swap"):
        model(input_ids=torch.ones(1, 4, dtype=torch.long))


def test_of_mixed_heads_the_parts_that_are_not_causal_are_named():
    with pytest.raises(ValueError, match=r"'mixed-heads' is not causal \(its part 'smyrf' is not\) and this layer is"):
        sq.hf.swap(build("llama").model, "mixed-heads:methods=local+smyrf")


@pytest.mark.parametrize("changed", ["moved", "replaced"])
def test_a_second_swap_finds_the_layers_that_were_moved_or_replaced_since_the_first(changed):
    model = build("bert").model
    sq.hf.swap(model, "full")
    layers = model.encoder.layer
    if changed == "moved":
        model.encoder.layer = layers[::-1]
    else:
        layers[0] = copy.deepcopy(layers[0])
    sq.hf.swap(model, {0: "clustered:clusters=3", 1: "local:window=2"})
    names = [layer.attention.self.get_submodule("subquad").bound.method.name for layer in model.encoder.layer]
    assert names == ["clustered", "local"]
    model(**build("bert").inputs)
