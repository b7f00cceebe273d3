"""Audits of the next tokens of a causal language model."""

import json
import logging

import pytest
import torch

import subquad as sq
from tests.library.hf.models import build, padded_ids

CLOSE = "clustered:clusters=2,block=8,last=2"
BAD = "local:window=1"


def prompts(count=8, items=2, length=60):
    return [torch.randint(5, 60, (items, length), generator=torch.Generator().manual_seed(i)) for i in range(count)]


def llama(method):
    model = build("llama").model
    sq.hf.swap(model, method)
    return model


def audited(method, ids=None, **options):
    """The report on the next tokens, after a model read some prompts."""
    model = llama(method)
    with sq.audit(model, tolerance=1e9, every=1, **options) as audit, torch.no_grad():
        for each in prompts() if ids is None else ids:
            model(each)
    return audit.report().next_tokens


def test_exact_attention_has_no_divergence():
    report = audited("full", max_kl=1e-6)
    assert (report.kl, report.agreement, report.last_kl, report.last_agreement) == (0.0, 1.0, 0.0, 1.0)
    assert (report.prompts, report.audited, report.skipped, report.positions) == (8, 8, 0, 8 * 32)
    assert report.agreement_bound == pytest.approx(0.05 ** (1 / 256))
    assert report.alarm is False


@pytest.mark.parametrize(("options", "bad"), [({"max_kl": 0.001}, 0.001), ({"min_agreement": 0.9}, 0.1)])
def test_a_method_that_keeps_the_floor_raises_no_alarm_and_a_bad_one_does(options, bad, caplog):
    with caplog.at_level(logging.WARNING, logger="subquad.audit"):
        healthy = audited(CLOSE, **options)
    assert healthy.alarm is False
    assert 0 < healthy.kl < 0.001
    assert healthy.agreement < 1
    assert not caplog.records
    with caplog.at_level(logging.WARNING, logger="subquad.audit"):
        report = audited(BAD, **options)
    assert report.alarm is True
    assert max(report.kl, 1 - report.agreement) > bad
    (record,) = caplog.records  # once
    assert "the next tokens are further from the exact model's than" in record.message
    assert str(report).endswith(f"{report.floor}: alarm ({report.evidence:.3g})")


@pytest.mark.parametrize("max_kl", [0.9, 1.5])
def test_a_floor_of_about_1_nat_or_more_can_be_broken(max_kl):
    model = llama(BAD)
    model.lm_head.weight.data.mul_(400)  # next tokens that are nearly certain, and other ones
    with sq.audit(model, max_kl=max_kl, every=1) as audit, torch.no_grad():
        for ids in prompts():
            model(ids)
    report = audit.report().next_tokens
    assert report.kl > 5
    assert report.alarm is True


def test_the_estimate_is_that_of_all_positions():
    """So many positions are sampled that the mean of all of them is estimated closely."""
    (ids,) = prompts(1)
    model = build("llama").model
    with torch.no_grad():
        exact = model(ids).logits.log_softmax(-1)
        sq.hf.swap(model, BAD)
        mine = model(ids).logits.log_softmax(-1)
    kl = (exact.exp() * (exact - mine)).sum(-1)
    report = audited(BAD, [ids], positions=20_000)
    assert report.kl == pytest.approx(float(kl.mean()), rel=0.05)
    assert report.agreement == pytest.approx(float((exact.argmax(-1) == mine.argmax(-1)).float().mean()), abs=0.02)
    assert report.last_kl == pytest.approx(float(kl[:, -1].mean()), rel=1e-4)
    assert report.kl_bound > report.kl
    assert report.agreement_bound < report.agreement


def test_nothing_is_changed_by_an_audit():
    model, ids = llama(CLOSE), prompts(1)[0]
    options = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    wanted = model.generate(ids, **options)
    with sq.audit(model, tolerance=1e9, every=1) as audit:
        seen = model.generate(ids, **options)
    assert torch.equal(seen.sequences, wanted.sequences)
    assert all(map(torch.equal, seen.logits, wanted.logits))
    report = audit.report()
    assert (report.next_tokens.prompts, report.next_tokens.audited) == (1, 1)  # steps on the cache are no prompts
    assert {layer.calls for layer in report.layers} == {4}  # the audit's own passes are not counted
    with torch.no_grad():
        model(ids)
    assert audit.report().next_tokens.prompts == 1  # it has stopped


@pytest.mark.parametrize("every", [1, 4])
def test_one_prompt_of_every_so_many_is_read_again(every):
    model = llama("full")
    with sq.audit(model, tolerance=1e9, every=every) as audit, torch.no_grad():
        for each in prompts(12):
            model(each)
    assert audit.report().next_tokens.audited == 12 // every


def test_padding_is_not_compared():
    ids, mask = padded_ids((12, 5))
    model, seen = llama(BAD), []
    with sq.audit(model, tolerance=1e9, every=1, positions=400) as audit, torch.no_grad():
        model.register_forward_hook(lambda *call: seen.append(call[-1].logits))
        model(input_ids=ids, attention_mask=mask)
    report = audit.report().next_tokens
    assert report.positions == 400
    assert report.undefined == 0
    assert seen[0].shape[1] == int(mask.any(0).sum())  # positions that are padding in both are left out
    assert 0 < report.kl < 10


@pytest.mark.parametrize(("change", "skipped"), [({}, 0), ({"attention_mask": torch.ones(2, 1, 60, 60).bool()}, 1)])
def test_masks_that_do_not_name_tokens_are_skipped(change, skipped):
    model = llama("full")
    with sq.audit(model, tolerance=1e9, every=1) as audit, torch.no_grad():
        model(input_ids=prompts(1)[0], **change)
    report = audit.report().next_tokens
    assert (report.audited, report.skipped) == (1 - skipped, skipped)


def test_the_floor_of_a_plan_is_the_default():
    model = llama(BAD)
    with sq.audit(model, tolerance=1e9, every=1) as first, torch.no_grad():
        model(prompts(1)[0])
    baseline = json.loads(json.dumps(first.baseline() | {"floor": {"max_kl": 1e-4}}))
    with sq.audit(model, tolerance=1e9, every=1, baseline=baseline) as audit, torch.no_grad():
        for each in prompts():
            model(each)
    assert audit.report().next_tokens.floor == "KL ≤ 0.0001"
    assert audit.report().next_tokens.alarm is True
    with sq.audit(model, tolerance=1e9, baseline=baseline, min_agreement=0.5) as other:
        assert other.report().next_tokens.floor == "same top token ≥ 0.5"
    assert first.report().next_tokens.alarm is None  # without a floor there is no alarm


def test_other_models_have_no_next_tokens():
    model = build("bert").model
    sq.hf.swap(model, "full")
    assert sq.audit(model, tolerance=1.0).report().next_tokens is None
    with pytest.raises(
        ValueError, match=r"KL ≤ 0\.1 is a floor of next tokens, but BertModel is not a causal language"
    ):
        sq.audit(model, tolerance=1.0, max_kl=0.1)


@pytest.mark.parametrize(("options", "message"), [
    ({"max_kl": 0.1, "min_agreement": 0.9}, "max_kl=0.1 and min_agreement=0.9 are both given; give one of them"),
    ({"max_kl": -1.0}, "max_kl=-1.0, but it must be a finite number of nats above 0"),
    ({"min_agreement": 1.5}, "min_agreement=1.5, but it must be above 0 and at most 1"),
    ({"positions": 0}, "positions=0, but it must be a whole number of at least 1"),
])  # fmt: skip
def test_floors_out_of_their_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        sq.audit(llama("full"), tolerance=1.0, **options)
