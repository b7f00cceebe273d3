"""A method that is asked for by name, in `attn_implementation`, is what `sq.hf.swap` makes of it, or its refusal."""

import copy
import inspect
import pickle
import threading

import pytest
import torch
import transformers as hf

import subquad as sq
from subquad.hf import by_name, probe
from tests.forks import output_of
from tests.library.hf.by_name import HALVES, NAME, SPEC, named
from tests.library.hf.models import TEXT, build, padded_ids

# Encoders; causal decoders, with windows in mistral and gemma3; encoder-decoders, of which T5 has position biases.
MODELS = {
    "bert": SPEC,
    "mpnet": "full:kernel=subquad",
    "vit": SPEC,
    "llama": HALVES,
    "mistral": "local:window=4",
    "gemma3": HALVES,
    "gpt2": HALVES,
    "t5": "oracle-top:topk=4",
    "bart": "oracle-top:topk=4",
    "whisper": "full:kernel=subquad",
}


@pytest.fixture(autouse=True)
def every_model_is_tried(monkeypatch):
    """Forget which classes of models were tried, as in a new process."""
    monkeypatch.setattr(probe, "_KNOWN_CLASSES", {})


def trials(monkeypatch) -> list:
    """The models that are tried from now on."""
    tried = []
    trial = probe._tried
    monkeypatch.setattr(probe, "_tried", lambda model, *a, **k: (tried.append(type(model)), trial(model, *a, **k))[1])
    return tried


# ---------------------------------------------------------------------- the same as a swap


@pytest.mark.parametrize(
    ("name", "made"), [*((name, "named") for name in MODELS), ("bert", "set"), ("llama", "set"), ("bart", "set")]
)
def test_outputs_are_those_of_a_swap(name, made):
    want, case = build(name), build(name)
    swapped = sq.hf.swap(want.model, MODELS[name])
    if made == "named":
        named(case, f"subquad:{MODELS[name]}")
    else:
        case.model.set_attn_implementation(f"subquad:{MODELS[name]}")
    with torch.inference_mode():
        assert torch.equal(case.output(), want.output())
    assert case.model.config._attn_implementation == f"subquad:{MODELS[name]}"
    described = sq.hf.describe(case.model)
    assert described.methods == swapped.methods
    assert [layer.window for layer in described.layers] == [layer.window for layer in swapped.layers]


@pytest.mark.parametrize(("name", "part"), [("bart", "model.encoder"), ("llama", "model")])
def test_a_part_that_is_called_first_runs_what_was_set_on_the_whole(name, part):
    own, want, case = build(name), build(name), build(name)
    sq.hf.swap(want.model, "linear")
    ids = padded_ids(pads=0)[0]

    def hidden(model) -> torch.Tensor:
        return model.get_submodule(part)(input_ids=ids).last_hidden_state

    case.model.set_attn_implementation(f"subquad:{HALVES}")
    for attention, like in (("subquad:linear", want), ("sdpa", own), ("subquad:linear", want), ("sdpa", own)):
        case.model.set_attn_implementation(attention)
        with torch.inference_mode():
            torch.testing.assert_close(hidden(case.model), hidden(like.model))
            torch.testing.assert_close(case.output(), like.output())
            apart = (hidden(own.model) - hidden(want.model)).abs().max()
        assert apart > 1e-4


@pytest.mark.parametrize("looks", [sq.hf.StateCache, lambda model: sq.audit(model, max_kl=1.0)])
def test_methods_are_found_before_the_first_call(looks):
    case = build("llama")
    case.model.set_attn_implementation("subquad:linear")
    assert looks(case.model)
    assert set(map(str, sq.hf.describe(case.model).methods.values())) == {"linear"}


def test_an_audit_of_a_wrapper_finds_methods_before_the_first_call():
    holder = torch.nn.ModuleDict({"inner": named(build("llama"), "subquad:linear").model})
    with sq.audit(holder, tolerance=9.0, every=1) as audit, torch.inference_mode():
        holder["inner"](padded_ids()[0])
    assert audit.report().overall.audited == 2


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", ["bert", "llama", "qwen3"])
def test_padding(name, side):
    ids, mask = padded_ids(side)
    outputs = []
    for by_its_name in (False, True):
        case = build(name)
        case.inputs, case.valid = {"input_ids": ids, "attention_mask": mask}, mask.bool()
        if by_its_name:
            named(case, f"subquad:{MODELS.get(name, HALVES)}")
        else:
            sq.hf.swap(case.model, MODELS.get(name, HALVES))
        outputs.append(case.output())
    assert torch.equal(*outputs)


def test_packed_sequences():
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4]])
    batch = {"input_ids": padded_ids(batch=1, length=12, pads=0)[0], "position_ids": positions, "use_cache": False}
    want, case = build("llama").model, named(build("llama"), "subquad:local:window=4").model
    own = want(**batch).logits
    sq.hf.swap(want, "local:window=4")
    packed = case(**batch).logits
    assert torch.equal(packed, want(**batch).logits)
    alone = case(input_ids=batch["input_ids"][:, 7:], use_cache=False).logits
    torch.testing.assert_close(packed[:, 7:], alone)
    assert not torch.allclose(packed, own)


@pytest.mark.parametrize(
    ("name", "cache"),
    [("llama", None), ("mistral", None), ("gemma3", None), ("t5", None), ("llama", "static"), ("bart", "static")],
)
def test_generated_tokens(name, cache):
    want, case = build(name), named(build(name), f"subquad:{MODELS[name]}")
    sq.hf.swap(want.model, MODELS[name])
    ids, mask = padded_ids("left")
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "cache_implementation": cache}
    tokens, expected = (
        model.generate(input_ids=ids, attention_mask=mask, disable_compile=True, **options)
        for model in (case.model, want.model)
    )
    assert torch.equal(tokens, expected)
    assert sq.hf.describe(case.model).methods == sq.hf.describe(want.model).methods


def test_gradients_are_those_of_a_swap():
    want, case = build("llama").model, named(build("llama"), "subquad:local:window=4").model
    sq.hf.swap(want, "local:window=4")
    ids = padded_ids(pads=0)[0]
    before = torch.random.get_rng_state()
    for model in (case, want):
        model.train()
        model(input_ids=ids, labels=ids).loss.backward()
    assert case.training
    assert torch.equal(torch.random.get_rng_state(), before)
    for (name, ours), theirs in zip(case.named_parameters(), want.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad), name


def test_training_after_a_first_call_in_inference_mode_and_autocast():
    case = named(build("llama"), "subquad:clustered-tail:clusters=4,queries=earlier,last=0")
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        case.output()
    case.model.train()(**case.inputs, labels=case.inputs["input_ids"]).loss.backward()
    assert all(parameter.grad is not None for parameter in case.model.parameters())


def test_subquad_alone_is_the_exact_kernel():
    case = build("bert")
    own = case.output()
    named(case, "subquad")
    torch.testing.assert_close(case.output(), own)
    assert set(map(str, sq.hf.describe(case.model).methods.values())) == {"full:kernel=subquad"}


@pytest.mark.slow
def test_compiled_before_its_first_call():
    """In a process of its own, because beartype's checks of arguments, which tests make, cannot be compiled."""
    assert output_of("tests.library.hf.compiled_names").split() == ["True"] * 6


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_before_the_first_call(copied):
    want, case = build("bert"), named(build("bert"), NAME)
    sq.hf.swap(want.model, SPEC)
    case.model = copied(case.model)
    assert torch.equal(case.output(), want.output())


def test_a_pickle_before_the_first_call_runs_where_the_class_was_not_changed(monkeypatch):
    want, case = build("bert"), named(build("bert"), NAME)
    sq.hf.swap(want.model, SPEC)
    pickled = pickle.dumps(case.model)
    monkeypatch.setattr(hf.BertModel, "forward", inspect.unwrap(hf.BertModel.forward))
    case.model = pickle.loads(pickled)
    assert torch.equal(case.output(), want.output())


def test_threads_wait_for_the_swap():
    want, case = build("bert"), named(build("bert"), NAME)
    sq.hf.swap(want.model, SPEC)
    expected = want.output()
    outputs = []
    threads = [threading.Thread(target=lambda: outputs.append(case.output().detach())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outputs) == 4
    assert all(torch.equal(output, expected) for output in outputs)


# ---------------------------------------------------------------------- later changes


def test_the_attention_can_be_set_again_and_again():
    case = build("bert")
    case.model.set_attn_implementation("sdpa")
    own = case.output()
    want = build("bert")
    for spec in (SPEC, "clustered:clusters=2", SPEC):
        case.model.set_attn_implementation(f"subquad:{spec}")
        sq.hf.swap(want.model, spec)
        assert torch.equal(case.output(), want.output())
        case.model.set_attn_implementation("sdpa")
        assert torch.equal(case.output(), own)
        assert not sq.hf.describe(case.model).methods


def test_restore_and_swap_act_on_a_named_model():
    want, case = build("bert"), named(build("bert"), NAME)
    want.model.set_attn_implementation("sdpa")
    own = want.output()
    sq.hf.restore(case.model)  # before its first call
    assert torch.equal(case.output(), own)
    case.model.set_attn_implementation(NAME)
    sq.hf.swap(case.model, "clustered:clusters=2")
    sq.hf.swap(want.model, "clustered:clusters=2")
    assert torch.equal(case.output(), want.output())
    case.model.set_attn_implementation(NAME)  # over a swap
    sq.hf.swap(want.model, SPEC)
    assert torch.equal(case.output(), want.output())
    sq.hf.restore(case.model)
    assert torch.equal(case.output(), own)


def test_functions_that_ask_what_runs_swap_first():
    model = named(build("bert"), NAME).model
    assert set(map(str, sq.hf.describe(model).methods.values())) == {SPEC}
    assert len(sq.hf.bounds(named(build("bert"), NAME).model)) == 2
    other = named(build("bert"), NAME)
    assert sq.hf.refusals(other.model, "local") == {}  # a trial, which is no first call
    want = build("bert")
    sq.hf.swap(want.model, SPEC)
    kept = torch.zeros(2, 17, dtype=torch.bool)
    kept[:, 3] = True
    with sq.hf.keeping(other.model, kept), sq.hf.keeping(want.model, kept):
        assert torch.equal(other.output(), want.output())


def test_another_attention_written_into_the_config_is_noticed():
    case = named(build("bert"), NAME)
    case.output()
    case.model.config._attn_implementation = "eager"
    with pytest.raises(
        ValueError, match=r"runs 'i-clustered.* since attn_implementation='subquad:i-clustered.*'eager'"
    ):
        case.output()


def test_a_name_written_into_the_config_of_a_made_model_is_no_silent_fallback():
    case = build("bert")
    case.model.config._attn_implementation = sq.hf.register(NAME)
    with pytest.raises(ValueError, match=r"model\.set_attn_implementation"):
        case.output()


# ---------------------------------------------------------------------- parts


def llava() -> hf.PreTrainedModel:
    torch.manual_seed(0)
    vision = hf.CLIPVisionConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=16, patch_size=4
    )
    config = hf.LlavaConfig(
        vision_config=vision, text_config=hf.LlamaConfig(**TEXT), image_token_index=59, vision_feature_layer=-1
    )
    return hf.LlavaForConditionalGeneration(config).eval()


def llava_output(model) -> torch.Tensor:
    ids = padded_ids(pads=0, length=24)[0].clamp(max=58)
    ids[:, 2:18] = 59
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    return model(input_ids=ids, pixel_values=pixels).logits


def test_parts_have_methods_of_their_own(tmp_path):
    want = llava()
    sq.hf.swap(want.model.language_model, HALVES)
    sq.hf.swap(want.model.vision_tower, SPEC)
    expected = llava_output(want)
    model = llava()
    model.set_attn_implementation({"text_config": f"subquad:{HALVES}", "vision_config": NAME})
    assert torch.equal(llava_output(model), expected)
    model.save_pretrained(tmp_path)
    assert torch.equal(llava_output(hf.AutoModelForImageTextToText.from_pretrained(tmp_path)), expected)
    parts = {"text_config": f"subquad:{HALVES}", "vision_config": NAME}
    config = hf.AutoConfig.from_pretrained(tmp_path, attn_implementation=parts)
    again = hf.AutoModelForImageTextToText.from_pretrained(tmp_path, config=config)
    assert torch.equal(llava_output(again), expected)


def test_one_part_alone_and_its_file(tmp_path):
    want = llava()
    sq.hf.swap(want.model.language_model, HALVES)
    expected = llava_output(want)
    model = llava()
    model.set_attn_implementation({"text_config": f"subquad:{HALVES}"})
    model.save_pretrained(tmp_path)  # before its first call
    for each in (model, hf.AutoModelForImageTextToText.from_pretrained(tmp_path)):
        assert torch.equal(llava_output(each), expected)
        assert each.model.vision_tower.config._attn_implementation == "sdpa"


def test_one_name_for_the_whole_of_a_model_of_parts(monkeypatch):
    want, model = llava(), llava()
    sq.hf.swap(want, "full:kernel=subquad")
    expected, tried = llava_output(want), trials(monkeypatch)
    model.set_attn_implementation("subquad")
    assert torch.equal(llava_output(model), expected)
    assert tried == [type(model)]  # and not its towers again and again, for the sizes of their features


def test_a_part_that_is_called_first_swaps_the_whole_model(monkeypatch):
    tried = trials(monkeypatch)
    case = named(build("bart"), f"subquad:{MODELS['bart']}")
    case.model.get_encoder()(input_ids=case.inputs["input_ids"])
    assert tried == [type(case.model)]
    assert case.model.model.encoder.config is case.model.config
    want = build("bart")
    sq.hf.swap(want.model, MODELS["bart"])
    assert torch.equal(case.output(), want.output())


def test_what_cannot_be_saved_together_is_refused(tmp_path):
    model = llava()
    sq.hf.swap(model.model.vision_tower, SPEC)
    model.model.language_model.set_attn_implementation("subquad")
    with pytest.raises(ValueError, match=r"use sq\.hf\.swap for both"):
        model.save_pretrained(tmp_path)
    t5 = build("t5").model
    t5.encoder.set_attn_implementation("subquad")
    with pytest.raises(ValueError, match=r"'encoder' of this T5.*'subquad'.*'eager'.*sq\.hf\.swap\(part, method\)"):
        t5.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("subquad:clusterd-tail", "'subquad:clusterd-tail': no method 'clusterd-tail'; did you mean 'clustered-tail'"),
        ("subquad:clustered:clustrs=3", "'subquad:clustered:clustrs=3': .*'clustrs'; did you mean 'clusters'"),
        ("subquad:clustered:clusters=many", "'subquad:clustered:clusters=many': .*'many' is not a whole number"),
        ("subquad:", "'subquad:' names no method after the colon"),
        ("subquad:lha:buckets=4", r"'lha' has learned parameters.*sq\.hf\.load_adapter"),
    ],
)
def test_a_name_that_is_wrong(name, message):
    case = build("bert")
    with pytest.raises(ValueError, match=message):
        named(case, name)
    with pytest.raises(ValueError, match=message):
        case.model.set_attn_implementation(name)
    with pytest.raises(ValueError, match=message):
        sq.hf.register(name)
    assert case.model.config._attn_implementation == "eager"
    case.output()


@pytest.mark.parametrize(("name", "spec"), [("llama", "smyrf:clusters=2"), ("t5", SPEC), ("mistral", "clustered")])
def test_a_refusal_is_that_of_a_swap(name, spec):
    with pytest.raises(ValueError, match=name if name == "Llama" else "layer") as expected:
        sq.hf.swap(build(name).model, spec)
    case = named(build(name), f"subquad:{spec}")
    for _ in range(2):  # it stays refused
        with pytest.raises(ValueError, match="layer") as error:
            case.output()
        assert str(error.value) == str(expected.value)
    case.model.set_attn_implementation("eager")
    assert torch.equal(case.output(), build(name).output())


def xlm() -> hf.PreTrainedModel:
    return hf.XLMModel(hf.XLMConfig(vocab_size=60, emb_dim=16, n_layers=1, n_heads=2)).eval()


def test_a_model_that_computes_its_attention_itself_is_refused():
    model = xlm()
    with pytest.raises(ValueError, match="computes its attention itself") as expected:
        sq.hf.swap(model, "full")
    with pytest.raises(ValueError, match="computes its attention itself") as error:
        model.set_attn_implementation("subquad")
    assert str(error.value) == str(expected.value)
    model(input_ids=torch.ones(1, 4, dtype=torch.long))
    config = copy.deepcopy(model.config)
    config._attn_implementation = "subquad"
    with pytest.raises(ValueError, match="computes its attention itself"):
        type(model)(config)


def test_weights_of_attention_are_refused():
    case = named(build("bert"), NAME)
    with pytest.raises(ValueError, match="asks for attention weights"):
        case.model(**case.inputs, output_attentions=True)


# ---------------------------------------------------------------------- the trial


def test_a_class_and_config_are_tried_once(monkeypatch):
    tried = trials(monkeypatch)
    first = named(build("mistral"), "subquad:local:window=4")
    for case in (first, named(build("mistral"), "subquad:local:window=4"), named(build("mistral"), "subquad")):
        case.output()
        case.output()
        assert [layer.window for layer in sq.hf.describe(case.model).layers] == [4, 4]
    assert tried == [type(first.model)]
    other = build("mistral")
    other.model.config.sliding_window = 3
    named(other, "subquad").output()
    assert [layer.window for layer in sq.hf.describe(other.model).layers] == [2, 2]
    assert len(tried) == 2


def test_results_of_the_latest_classes_and_configs_are_kept(monkeypatch):
    monkeypatch.setattr(probe, "_MOST_CLASSES", 2)
    tried = trials(monkeypatch)
    for name in ("bert", "vit", "llama", "llama", "vit", "bert"):
        named(build(name), "subquad").output()
    assert [model.__name__ for model in tried] == ["BertModel", "ViTModel", "LlamaForCausalLM", "BertModel"]


def test_a_model_that_another_library_changed_is_tried_itself(monkeypatch):
    named(build("bert"), NAME).output()
    case = named(build("bert"), NAME)
    layer = case.model.encoder.layer[0].attention.self
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: tuple(x * 2 if x is not None else x for x in forward(*args, **kwargs))
    tried = trials(monkeypatch)
    case.output()
    assert len(tried) == 1


class OtherScale(hf.BertModel):
    """Its outputs are not those of its own attention if another attention runs: what only the trial shows."""

    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        out = super().forward(input_ids, attention_mask, **kwargs)
        out.last_hidden_state = out.last_hidden_state * (
            1 + (self.config._attn_implementation not in ("eager", "sdpa"))
        )
        return out


def test_subquad_verify_0_leaves_the_comparison_out_but_not_the_windows(monkeypatch):
    case = build("bert")
    case.model = OtherScale(case.model.config).eval()
    with pytest.raises(ValueError, match="gives other outputs"):
        named(case, NAME).output()
    monkeypatch.setenv(by_name.VERIFY, "0")
    named(case, NAME).output()
    for name in ("mistral", "gemma3", "bart"):
        want, unverified = build(name), named(build(name), f"subquad:{MODELS[name]}")
        sq.hf.swap(want.model, MODELS[name])
        assert torch.equal(unverified.output(), want.output())
    monkeypatch.setenv(by_name.VERIFY, "no")
    with pytest.raises(ValueError, match="SUBQUAD_VERIFY='no', but it must be 0 or 1"):
        named(build("bert"), NAME).output()
