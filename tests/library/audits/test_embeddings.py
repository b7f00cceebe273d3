"""Audits of the embeddings of an encoder, in the units of its plan's floor."""

import copy
import functools
import io
import json
import logging
import pickle

import numpy as np
import pytest
import torch
import transformers

import subquad as sq
from subquad.hf.swapping import record
from tests.library.hf.models import build, padded_ids

CLOSE = "local:window=40"
BAD = "local:window=1"


def batches(count=20, length=50):
    return [torch.randint(5, 60, (2, length), generator=torch.Generator().manual_seed(i)) for i in range(count)]


def sharp(factor=6.0):
    model = build("bert").model.eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(factor)
    return model


def audited(method, ids=None, model=None, **options):
    """The report on the embeddings, after a model read some batches."""
    model = sharp() if model is None else model
    sq.hf.swap(model, method)
    with sq.audit(model, every=1, **options) as audit, torch.no_grad():
        for each in batches() if ids is None else ids:
            model(each)
    return audit.report()


def embedded(model, ids, pooling):
    with torch.no_grad():
        hidden = model(ids).last_hidden_state
    return hidden[:, 0] if pooling == "cls" else hidden.mean(1)


def test_exact_attention_has_a_fidelity_of_one():
    report = audited("full", min_fidelity=0.9999)
    found = report.embeddings
    assert found.fidelity == pytest.approx(1.0)
    assert found.lowest == pytest.approx(1.0)
    assert (found.inputs, found.audited, found.skipped, found.items, found.undefined) == (20, 20, 0, 40, 0)
    assert found.alarm is False
    assert report.alarm is False
    assert report.next_tokens is None
    assert report.tolerance is None
    json.dumps(report.to_dict(), allow_nan=False)
    assert "fidelity ≥ 0.9999: no alarm" in str(report)
    assert "not finite" in str(report).splitlines()[0]


def test_a_bound_from_few_inputs_is_a_cosine():
    report = audited("full", batches(1), min_fidelity=0.9)
    assert report.embeddings.fidelity_bound == -1.0
    assert "fidelity 1 (≥ -1)" in str(report)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_the_fidelity_is_the_mean_cosine_of_the_embeddings(pooling):
    model, cosines = sharp(), []
    for ids in batches(4):
        exact = embedded(model, ids, pooling)
        sq.hf.swap(model, BAD)
        cosines += torch.cosine_similarity(embedded(model, ids, pooling), exact).tolist()
        sq.hf.restore(model)
    found = audited(BAD, batches(4), min_fidelity=0.5, pooling=pooling).embeddings
    assert found.fidelity == pytest.approx(sum(cosines) / len(cosines), abs=1e-5)
    assert found.lowest == pytest.approx(min(cosines), abs=1e-5)
    assert found.lowest < 0.99


def test_a_method_that_keeps_the_floor_raises_no_alarm_and_a_worse_one_does(caplog):
    with caplog.at_level(logging.WARNING, logger="subquad.audit"):
        healthy = audited(CLOSE, min_fidelity=0.97)
    assert 0.97 < healthy.embeddings.fidelity < 1
    assert healthy.embeddings.fidelity_bound < healthy.embeddings.fidelity
    assert healthy.alarm is False
    assert not caplog.records  # although rows have large errors
    assert healthy.overall.largest > 0.3
    with caplog.at_level(logging.WARNING, logger="subquad.audit"):
        report = audited(BAD, batches(60), min_fidelity=0.97)
    assert report.alarm is True
    assert report.embeddings.fidelity < 0.97
    (record,) = caplog.records  # once
    assert "the embeddings have a mean cosine of 0." in record.message
    assert "and the floor is 0.97; use closer methods" in record.message


def test_sharper_attention_than_the_method_was_chosen_for_raises_an_alarm():
    model = sharp()
    for name, parameter in model.named_parameters():
        if "query" in name:
            parameter.data.mul_(8.0)
    assert audited("clustered:clusters=8", model=sharp(1.0), min_fidelity=0.99).alarm is False
    assert audited("clustered:clusters=8", model=model, min_fidelity=0.99).alarm is True


def test_padding_has_no_part_in_an_embedding():
    ids, mask = padded_ids((12, 5))
    model = sharp()
    sq.hf.swap(model, BAD)
    found = []
    for fill in (0, 1):  # another content of the padding
        with sq.audit(model, min_fidelity=0.5, every=1) as audit, torch.no_grad():
            model(input_ids=ids * mask.long() + fill * (1 - mask.long()), attention_mask=mask)
        found.append(audit.report().embeddings)
    assert found[0].items == 2
    assert found[0].fidelity == pytest.approx(found[1].fidelity, abs=1e-6)


def test_nothing_is_changed_or_counted_by_the_passes_of_an_audit():
    model, ids = sharp(), batches(1)[0]
    sq.hf.swap(model, BAD)
    wanted = embedded(model, ids, "mean")
    with sq.audit(model, min_fidelity=0.5, every=1) as audit:
        assert torch.equal(embedded(model, ids, "mean"), wanted)
    assert {layer.calls for layer in audit.report().layers} == {1}
    embedded(model, ids, "mean")
    assert audit.report().embeddings.inputs == 1  # it has stopped
    with sq.audit(model, min_fidelity=0.5, every=1) as audit, torch.no_grad():
        model.train()(ids)
    assert audit.report().embeddings.skipped == 1


def test_the_hidden_states_of_a_decoder_are_audited_without_its_cache():
    decoder, ids = build("llama").model, batches(1, 20)[0][:1]
    sq.hf.swap(decoder, BAD)
    with torch.no_grad():
        wanted = decoder.model(ids).last_hidden_state
    generated = decoder.generate(ids, max_new_tokens=4, do_sample=False)
    cache = transformers.DynamicCache(config=decoder.config)
    with torch.no_grad(), sq.audit(decoder.model, min_fidelity=0.5, every=1) as audit:
        assert torch.equal(decoder.model(ids, past_key_values=cache).last_hidden_state, wanted)
        plain = audit.report().embeddings
        decoder.model(ids)
        assert torch.equal(decoder.generate(ids, max_new_tokens=4, do_sample=False), generated)
    assert cache.get_seq_length() == 20
    found = audit.report().embeddings
    assert (found.inputs, found.audited) == (3, 3)  # steps on the cache are not inputs
    assert 0.5 < found.fidelity < 0.9999
    assert found.fidelity == pytest.approx(plain.fidelity)


def test_calls_of_forward_are_seen_and_copies_and_compiled_models_run():
    model, ids = sharp(), batches(1)[0]
    sq.hf.swap(model, BAD)
    wanted = embedded(model, ids, "mean")
    with sq.audit(model, min_fidelity=0.5, every=1) as audit, torch.no_grad():
        model.forward(ids)  # as a SentenceTransformer calls it
        assert audit.report().embeddings.inputs == 1
        copied = copy.deepcopy(model)
        copied.embeddings.word_embeddings.weight.zero_()
        assert not torch.allclose(embedded(copied, ids, "mean"), wanted)
        assert torch.equal(embedded(model, ids, "mean"), wanted)
        assert audit.report().embeddings.inputs == 2
        compiled = torch.compile(model, backend="eager")
        assert torch.allclose(compiled(ids).last_hidden_state.mean(1), wanted, atol=1e-5)
        assert audit.report().embeddings.inputs == 3
    assert "forward" not in vars(model)


def test_the_wrapper_of_another_library_runs_during_an_audit_and_after_it():
    model, ids, calls = sharp(), batches(1)[0], []
    sq.hf.swap(model, BAD)
    inner = model.forward

    @functools.wraps(inner)
    def wrapper(*args, **options):
        calls.append(1)
        return inner(*args, **options)

    model.forward = wrapper
    with sq.audit(model, min_fidelity=0.5, every=1) as audit, torch.no_grad():
        model(ids)
        assert len(calls) == 3  # the audit reads the input twice more
        copied = copy.deepcopy(model)
        assert copied.forward is wrapper
    assert audit.report().embeddings.inputs == 1
    assert model.forward is wrapper
    embedded(model, ids, "mean")
    assert len(calls) == 4


def test_an_audit_that_is_not_running_stops_no_other_audit():
    model, ids = sharp(), batches(1)[0]
    sq.hf.swap(model, BAD)
    old = sq.audit(model, min_fidelity=0.5, every=1).start()
    sq.hf.swap(model, "full")
    new, refused = (sq.audit(model, min_fidelity=0.5, every=1) for _ in range(2))
    new.start()
    with pytest.raises(ValueError, match="is audited already"):
        refused.start()
    refused.stop()
    old.stop()
    embedded(model, ids, "mean")
    assert new.report().embeddings.inputs == 1
    new.stop()
    assert "forward" not in vars(model)


@pytest.mark.parametrize(("name", "floor"), [("bert", {"min_fidelity": 0.5}), ("llama", {"tolerance": 9.0})])
def test_copies_of_a_model_with_an_audited_output_run_and_are_not_audited(name, floor):
    model, ids = build(name).model, batches(1)[0]
    sq.hf.swap(model, BAD)
    with torch.no_grad(), sq.audit(model, every=1, **floor) as audit:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)
        for copied in copies:
            next(copied.parameters()).zero_()
            assert not torch.equal(copied(ids)[0], model(ids)[0])
            assert torch.equal(copy.deepcopy(copied)(ids)[0], copied(ids)[0])
    report = audit.report()
    assert (report.embeddings.inputs if name == "bert" else report.next_tokens.prompts) == len(copies)
    assert {layer.calls for layer in report.layers} == {len(copies)}


def test_embeddings_that_are_not_finite_count_as_wrong():
    model = sharp()
    sq.hf.swap(model, "full")
    with torch.no_grad(), sq.audit(model, min_fidelity=0.9, every=1) as audit:
        model(inputs_embeds=torch.full((1, 20, 32), float("nan")))
    found = audit.report().embeddings
    assert (found.items, found.undefined) == (1, 1)
    assert (found.fidelity, found.lowest) == (0.0, 0.0)
    assert found.evidence > 1


def test_items_that_are_not_finite_are_in_the_mean_of_the_others():
    model, inputs = sharp(), torch.randn(4, 20, 32, generator=torch.Generator().manual_seed(0))
    inputs[2:] = float("nan")
    sq.hf.swap(model, "full")
    with torch.no_grad(), sq.audit(model, min_fidelity=0.9, every=1) as audit:
        model(inputs_embeds=inputs)
    embeddings = audit.report().embeddings
    assert (embeddings.items, embeddings.undefined) == (4, 2)
    assert embeddings.fidelity == pytest.approx(0.5)
    assert embeddings.lowest == 0.0
    assert "4 items (2 undefined): fidelity 0.5 (≥ -1), lowest 0; fidelity ≥ 0.9" in str(audit.report())


def test_a_recorded_floor_is_the_default_and_is_saved_with_the_model(tmp_path):
    model = sharp()
    sq.hf.swap(model, CLOSE)
    with pytest.raises(ValueError, match="nothing would raise an alarm: no plan with a floor was swapped into this"):
        sq.audit(model)
    record(model, floor={"min_fidelity": 0.97, "pooling": "mean"})
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    for each in (model, again, torch.nn.ModuleDict({"inside": again})):
        with sq.audit(each) as audit:
            assert audit.report().embeddings.floor == "fidelity ≥ 0.97"
    with sq.audit(again, min_fidelity=0.5) as audit:
        assert audit.report().embeddings.floor == "fidelity ≥ 0.5"
    sq.hf.swap(again, BAD)  # other methods: what was verified was not of them
    with pytest.raises(ValueError, match="nothing would raise an alarm"):
        sq.audit(again)


def test_a_recorded_audit_is_saved_with_the_model(tmp_path):
    model = sharp()
    sq.hf.swap(model, CLOSE)
    sq.audit(model, min_fidelity=0.97, pooling="cls", every=3, rows=8, tolerance=0.4, seed=5).record()
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert sq.hf.provenance(again)["audit"] == {"tolerance": 0.4, "rows": 8, "every": 3}
    with torch.no_grad(), sq.audit(again) as audit:
        for each in batches(6):
            again(each)
    report = audit.report()
    assert (report.tolerance, report.confidence) == (0.4, 0.95)
    assert (report.embeddings.audited, report.embeddings.floor) == (2, "fidelity ≥ 0.97")
    assert [layer.rows for layer in report.layers] == [16, 16]
    baseline = audit.baseline()
    sq.audit(again, every=1, baseline=baseline).record()
    with torch.no_grad(), sq.audit(again, rows=4) as audit:
        again(batches(1)[0])
    assert audit.report().overall.rows == 8
    assert audit.report().layers[0].drifted is False
    assert sq.hf.provenance(again)["floor"] == {"min_fidelity": 0.97, "pooling": "cls"}
    sq.hf.swap(again, BAD)
    assert "audit" not in sq.hf.provenance(again)


@pytest.mark.usefixtures("unchecked")
def test_numbers_of_numpy_are_recorded(tmp_path):
    model = sharp()
    sq.hf.swap(model, CLOSE)
    baseline = {
        "layers": {
            f"encoder.layer.{n}.attention.self": dict.fromkeys(("error", "low", "high"), np.float32(0.5))
            for n in (0, 1)
        }
    }
    numbers = {"every": np.int64(5), "tolerance": np.float32(0.5), "rows": np.uint8(8)}
    sq.audit(model, min_fidelity=np.float32(0.75), baseline=baseline, **numbers).record()
    model.save_pretrained(tmp_path)
    again = sq.hf.provenance(type(model).from_pretrained(tmp_path))
    assert again["floor"] == {"min_fidelity": 0.75, "pooling": "mean"}
    assert again["audit"].pop("baseline")["layers"].keys() == baseline["layers"].keys()
    assert again["audit"] == {"tolerance": 0.5, "rows": 8, "every": 5}
    assert all(type(value) in (int, float) for value in again["audit"].values())


def test_only_a_swapped_transformers_model_records_an_audit():
    layer = sq.nn.MultiheadAttention(64, 4, method="full")
    with pytest.raises(ValueError, match="the audit of this MultiheadAttention cannot be recorded, because it is not"):
        sq.audit(layer, tolerance=0.5).record()


@pytest.mark.parametrize(("options", "message"), [
    ({"min_fidelity": 0.0}, "min_fidelity=0.0, but it must be above 0 and at most 1"),
    ({"min_fidelity": 0.9, "max_kl": 0.1}, "max_kl=0.1 and min_fidelity=0.9 are both given"),
    ({"min_fidelity": 0.9, "pooling": "max"}, "pooling='max', but it must be 'mean' or 'cls'"),
])  # fmt: skip
def test_bad_floors_are_named(options, message):
    model = sharp()
    sq.hf.swap(model, CLOSE)
    with pytest.raises(ValueError, match=message):
        sq.audit(model, **options)


@pytest.mark.parametrize(("name", "why"), [
    ("llama", "is a causal language model; leave out min_fidelity"),
    ("bart", r"is an encoder-decoder; audit its encoder: sq.audit\(model.get_encoder\(\), …\)"),
    ("vit", "reads pixel_values, not tokens; leave out min_fidelity, and give a tolerance of rows"),
    ("whisper", "reads input_features, not tokens; leave out"),
])  # fmt: skip
def test_a_floor_of_embeddings_needs_a_model_that_has_them(name, why):
    model = build(name).model
    sq.hf.swap(model, "full")
    with pytest.raises(ValueError, match=f"is a floor of embeddings, but .* {why}"):
        sq.audit(model, min_fidelity=0.9)


def test_the_encoder_of_an_encoder_decoder_is_audited():
    model, ids = build("bart").model, batches(1, 20)[0]
    sq.hf.swap(model, "full")
    with sq.audit(model.get_encoder(), min_fidelity=0.9, every=1) as audit, torch.no_grad():
        model(ids, decoder_input_ids=ids[:, :15])
    found = audit.report().embeddings
    assert (found.inputs, found.audited, found.items) == (1, 1, 2)
    assert found.fidelity == pytest.approx(1.0)


def test_a_floor_of_embeddings_needs_a_transformers_model():
    with pytest.raises(ValueError, match=r"is not a transformers model"):
        sq.audit(sq.nn.MultiheadAttention(64, 4, method="full"), min_fidelity=0.9)
