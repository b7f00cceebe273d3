"""Adapters: what is saved comes back bit for bit, and what does not belong together is named."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import subquad as sq
from subquad.core import checksums as seals

METHOD = "lha:buckets=3,hidden=8"


SIZES = {"vocab_size": 60, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}


def bert(layers=2):
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES, num_hidden_layers=layers, max_position_embeddings=64)
    return transformers.BertModel(config).eval()


@pytest.fixture
def model():
    return bert()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The parameters of an adapter that was saved, and its folder."""
    model, path = bert(), tmp_path_factory.mktemp("saved") / "adapter"
    sq.hf.swap(model, METHOD)
    for bound in sq.hf.bounds(model).values():
        for parameter in bound.parameters():
            parameter.data.add_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
    sq.hf.save_adapter(model, path, record={"steps": 3}, card="# card")
    return {n: bound.state_dict() for n, bound in sq.hf.bounds(model).items()}, path


@pytest.fixture
def copied(saved, tmp_path):
    """The folder of an adapter, to be damaged."""
    return shutil.copytree(saved[1], tmp_path / "adapter")


@pytest.fixture
def folder(saved, copied, model):
    """The same, of this model."""
    sq.hf.swap(model, METHOD)
    for number, bound in sq.hf.bounds(model).items():
        bound.load_state_dict(saved[0][number])
    return copied


def outputs(model):
    ids = torch.arange(40)[None] % 30 + 5
    with torch.inference_mode():
        return model(ids).last_hidden_state


def test_an_adapter_comes_back_bit_for_bit(model, folder):
    wanted = outputs(model)
    before = {name: p.clone() for bound in sq.hf.bounds(model).values() for name, p in bound.named_parameters()}
    sq.hf.restore(model)
    exact = outputs(model)
    swapped = sq.hf.load_adapter(model, folder)
    assert set(map(str, swapped.methods.values())) == {METHOD}
    assert torch.equal(outputs(model), wanted)
    assert not torch.allclose(wanted, exact, atol=1e-4)
    after = {name: p for bound in sq.hf.bounds(model).values() for name, p in bound.named_parameters()}
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_folder_holds_settings_record_and_card(folder):
    settings = json.loads((folder / "adapter.json").read_text())
    assert settings["methods"]["0"] == sq.parse_method(METHOD).to_dict()
    assert settings["record"] == {"steps": 3}
    assert (folder / "README.md").read_text() == "# card"
    assert not list(folder.glob("*.part"))


def test_as_many_buckets_as_the_models_positions_ask_for_come_back(model, tmp_path):
    sq.hf.swap(model, "lha:buckets=0,bucket_size=16,hidden=8")
    wanted = outputs(model)
    sq.hf.save_adapter(model, tmp_path)
    sq.hf.restore(model)
    sq.hf.load_adapter(model, tmp_path)
    assert sq.hf.bounds(model)[0].learned.buckets == 4  # of 64 positions
    assert torch.equal(outputs(model), wanted)


def test_only_some_layers(model, tmp_path):
    sq.hf.swap(model, {0: METHOD})
    learned = {n: b for n, b in sq.hf.bounds(model).items() if n == 0}
    sq.hf.save_adapter(model, tmp_path, bounds=learned)
    assert {n: str(m) for n, m in sq.hf.load_adapter(model, tmp_path).methods.items()} == {0: METHOD, 1: "full"}


def test_nothing_to_save_is_refused(model, tmp_path):
    sq.hf.swap(model, "clustered:clusters=4")
    with pytest.raises(ValueError, match="none of these layers has learned parameters"):
        sq.hf.save_adapter(model, tmp_path)


def test_another_architecture_is_named(folder):
    other = bert(layers=3)
    with pytest.raises(ValueError, match=r"made for a BertModel with 2 attention layers .* this is a BertModel with 3"):
        sq.hf.load_adapter(other, folder)
    assert sq.hf.describe(other).methods == {}


def test_other_weights_are_refused_unless_wanted(model, folder):
    sq.hf.restore(model)
    model.encoder.layer[0].output.dense.weight.data += 1
    with pytest.raises(ValueError, match=r"fitted to other weights .* in Python with sq\.hf\.load_adapter\("):
        sq.hf.load_adapter(model, folder)
    sq.hf.load_adapter(model, folder, any_weights=True)
    assert str(sq.hf.describe(model).methods[1]) == METHOD


def test_extended_positions_are_the_same_weights(model, folder):
    sq.hf.restore(model)
    sq.hf.load_adapter(sq.hf.extend_positions(model, 200), folder)
    assert str(sq.hf.describe(model).methods[0]) == METHOD


@pytest.mark.parametrize("name", ["adapter.json", "adapter.safetensors"])
def test_missing_files_are_named(model, folder, name):
    (folder / name).unlink()
    with pytest.raises(ValueError, match=f"has no {name}"):
        sq.hf.load_adapter(model, folder)


def test_another_dtype_of_the_same_weights_is_taken(model, folder):
    sq.hf.restore(model)
    sq.hf.load_adapter(model.bfloat16(), folder)
    assert outputs(model).isfinite().all()


def test_a_file_is_no_folder(model, folder, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="it is a file; give a folder"):
        sq.hf.save_adapter(model, tmp_path / "file")
    with pytest.raises(ValueError, match=r"no adapter at .*file: it is a file"):
        sq.hf.load_adapter(model, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_everybody_may_read_what_they_may_read_of_the_settings(folder):
    assert len({(folder / name).stat().st_mode for name in ("adapter.json", "adapter.safetensors")}) == 1


def test_an_unfinished_calibration_is_named(model, tmp_path):
    (tmp_path / ".progress").mkdir()
    with pytest.raises(ValueError, match=r"no adapter at .* yet: its calibration was cut off; start the same command"):
        sq.hf.load_adapter(model, tmp_path)


def test_a_missing_folder_is_named(model, tmp_path):
    with pytest.raises(ValueError, match="there is no such folder"):
        sq.hf.load_adapter(model, tmp_path / "nowhere")


def cut_settings(folder):
    file = folder / "adapter.json"
    file.write_text(file.read_text()[:100])


def drop_the_methods(folder):
    settings = json.loads((folder / "adapter.json").read_text())
    del settings["methods"]
    (folder / "adapter.json").write_text(json.dumps(settings))


def cut_tensors(folder):
    file = folder / "adapter.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def turn_a_bit(folder):
    data = bytearray((folder / "adapter.safetensors").read_bytes())
    data[-5] ^= 1
    (folder / "adapter.safetensors").write_bytes(bytes(data))


def edit_methods(folder, edit):
    edit_settings(folder, lambda settings: edit(settings["methods"]))


def edit_settings(folder, edit):
    """Edit an adapter's settings and write the digest of the new contents, as the writer of an adapter would."""
    settings = json.loads((folder / "adapter.json").read_text())
    del settings["digest"]
    edit(settings)
    (folder / "adapter.json").write_bytes(seals.sealed_json(settings))


def drop_a_layer(folder):
    edit_methods(folder, lambda methods: methods.pop("0"))


def name_a_layer_that_is_none(folder):
    edit_methods(folder, lambda methods: methods.update({"9": methods["0"]}))


def name_no_number(folder):
    edit_methods(folder, lambda methods: methods.update({"abc": methods["0"]}))


def forget_the_model(folder):
    edit_settings(folder, lambda settings: settings["model"].pop("weights"))


def choose_another_setting(folder):
    file = folder / "adapter.json"
    file.write_text(file.read_text().replace('"buckets": 3', '"buckets": 7'))


def nest_deeply(folder):
    (folder / "adapter.json").write_text("[" * 100_000)


OF_SETTINGS = (
    forget_the_model,
    choose_another_setting,
    nest_deeply,
    cut_settings,
    drop_the_methods,
    drop_a_layer,
    name_a_layer_that_is_none,
    name_no_number,
)


@pytest.mark.parametrize("damage", [*OF_SETTINGS, cut_tensors, turn_a_bit])
def test_damaged_files_are_named(model, folder, damage):
    wanted = "adapter.json" if damage in OF_SETTINGS else "adapter.safetensors"
    damage(folder)
    with pytest.raises(ValueError, match=rf"{wanted} is damaged"):
        sq.hf.load_adapter(model, folder)


def test_a_method_that_is_not_registered_is_no_damage(model, folder):
    edit_methods(folder, lambda methods: methods["0"].update(name="foo"))
    with pytest.raises(ValueError, match=r"adapter.json: no method 'foo'"):
        sq.hf.load_adapter(model, folder)


def test_another_format_is_named(model, folder):
    edit_settings(folder, lambda settings: settings.update(format=99))
    with pytest.raises(ValueError, match="has format 99, but this version reads 1 and 2"):
        sq.hf.load_adapter(model, folder)


MEMBERS = {
    "format": (lambda s: s, [None, True, 2.0, "2", [2]]),
    "model": (lambda s: s, [None, [], "BertModel"]),
    "methods": (lambda s: s, [None, [], 3]),
    "record": (lambda s: s, [None, [], "x"]),
    "tensors": (lambda s: s, [None, 5, True]),
    "class": (lambda s: s["model"], [None, 5, []]),
    "layers": (lambda s: s["model"], [None, 2, {}, [3], [[4, 4]], [[4, 4, "8"]], [[4, 4, True]], [[4, 0, 8]]]),
    "dtype": (lambda s: s["model"], [None, 32]),
    "weights": (lambda s: s["model"], [None, 5]),
    "max_length": (lambda s: s["model"], ["64", 64.0, True, []]),
    "0": (lambda s: s["methods"], [None, [], "lha", {}, {"name": 5}, {"name": "lha", "buckets": "3"}]),
    "-1": (lambda s: s["methods"], [{"name": "full"}]),
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, (_, values) in MEMBERS.items() for value in values]
)
def test_members_of_another_type_are_named(copied, name, value):
    edit_settings(copied, lambda settings: MEMBERS[name][0](settings).update({name: value}))
    with pytest.raises(ValueError, match=r"adapter\.json (is damaged|has format)"):
        sq.hf.read_adapter(copied)


def as_format_1(folder):
    settings = json.loads((folder / "adapter.json").read_text())
    del settings["digest"]
    (folder / "adapter.json").write_text(json.dumps(settings | {"format": 1}))


def test_format_1_is_read_with_a_warning_and_written_anew_as_format_2(model, folder, tmp_path):
    wanted = outputs(model)
    sq.hf.restore(model)
    as_format_1(folder)
    with pytest.warns(UserWarning, match="has format 1, without a digest of its settings"):
        sq.hf.load_adapter(model, folder)
    assert torch.equal(outputs(model), wanted)
    sq.hf.save_adapter(model, tmp_path / "again")
    assert json.loads((tmp_path / "again" / "adapter.json").read_text())["format"] == 2


def test_damage_does_not_turn_format_2_into_format_1(folder):
    file = folder / "adapter.json"
    file.write_text(file.read_text().replace('"format": 2', '"format": 1'))
    with pytest.raises(ValueError, match="contents differ from what was written"):
        sq.hf.read_adapter(folder)


def test_settings_are_the_same_however_they_are_laid_out(folder):
    before = sq.hf.read_adapter(folder)
    settings = json.loads((folder / "adapter.json").read_text())
    (folder / "adapter.json").write_text(json.dumps(settings, indent=7, sort_keys=True))
    after = sq.hf.read_adapter(folder)
    assert (after.methods, after.model, after.record) == (before.methods, before.model, before.record)


def test_settings_that_do_not_fit_the_parameters_are_named(model, folder):
    edit_methods(folder, lambda methods: methods["1"].update(buckets=4))
    with pytest.raises(ValueError, match=r"layer 1: .* of lha:buckets=4,hidden=8 is .* but the adapter contains"):
        sq.hf.load_adapter(model, folder)


def test_parameters_that_are_not_there_are_named(model, folder):
    tensors = load_file(folder / "adapter.safetensors")
    save_file({name: t for name, t in tensors.items() if not name.startswith("1.")}, folder / "adapter.safetensors")
    digest = seals.digest((folder / "adapter.safetensors").read_bytes())
    edit_settings(folder, lambda settings: settings.update(tensors=digest))
    with pytest.raises(ValueError, match=r"layer 1: .* the adapter contains \[\]"):
        sq.hf.load_adapter(model, folder)


def test_a_saved_model_asks_for_its_adapter(model, folder, tmp_path):
    sq.hf.load_adapter(model, folder)
    model.save_pretrained(tmp_path / "model")
    loaded = type(model).from_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r"layer 0 ran 'lha', whose learned parameters come from an adapter"):
        sq.hf.reattach(loaded)
    sq.hf.load_adapter(loaded, folder)
    torch.testing.assert_close(outputs(loaded.eval()), outputs(model))


def test_a_bound_method_is_for_one_layer_of_its_size(model):
    bound = sq.LearnedHash(buckets=2).bind(heads=4, head_dim=8)
    with pytest.raises(ValueError, match="is bound to one layer; give a mapping"):
        sq.hf.swap(model, bound)
    with pytest.raises(ValueError, match=r"was bound for 3 heads of width 8 .* but layer 0"):
        sq.hf.swap(model, {0: sq.LearnedHash(buckets=2).bind(heads=3, head_dim=8)})


@pytest.mark.parametrize("method", ["linformer:k=4", "lha:buckets=0,bucket_size=16,hidden=8"])
def test_the_longest_input_is_swaps_or_the_models_and_an_adapter_remembers_it(model, tmp_path, method):
    for given, longest in (({"max_length": 96}, 96), ({}, 64)):
        sq.hf.swap(model, method, **given)
        assert {bound.max_length for bound in sq.hf.bounds(model).values()} == {longest}
        wanted = outputs(model)
        sq.hf.save_adapter(model, tmp_path)
        sq.hf.restore(model)
        sq.hf.load_adapter(model, tmp_path)
        assert {bound.max_length for bound in sq.hf.bounds(model).values()} == {longest}
        assert torch.equal(outputs(model), wanted)
    with pytest.raises(ValueError, match="max_length=0, but it must be at least 1"):
        sq.hf.swap(model, method, max_length=0)


def test_layers_of_several_longest_lengths_are_no_adapter(model, tmp_path):
    lengths = {0: 64, 1: 96}
    sq.hf.swap(
        model, {n: sq.Linformer(k=4).bind(heads=4, head_dim=8, max_length=length) for n, length in lengths.items()}
    )
    with pytest.raises(ValueError, match="longest lengths of 64 and 96, but an adapter has one for all"):
        sq.hf.save_adapter(model, tmp_path)


def test_a_model_without_a_limit_is_told_the_longest_input(tmp_path):
    def llama():
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_hidden_layers=2)).eval()

    model, other, ids = llama(), llama(), torch.arange(24)[None]
    with pytest.raises(ValueError, match=r"max_length=… to bind, .* or sq\.hf\.swap"):
        sq.hf.swap(model, "linformer:k=4")
    sq.hf.swap(model, "linformer:k=4", max_length=24)
    sq.hf.save_adapter(model, tmp_path)
    sq.hf.load_adapter(other, tmp_path)
    assert torch.equal(other(ids).logits, model(ids).logits)
    with pytest.raises(ValueError, match="at most 24 tokens"):
        model(torch.arange(25)[None])
