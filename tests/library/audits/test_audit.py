"""Audits of layers and models: what is counted, what happens, what stays as it was."""

import copy
import json
import logging
import math
import pickle
import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import subquad as sq
from subquad.audits import Exceeded
from subquad.audits.statistics import RunningMoments
from tests.forks import output_of
from tests.library.hf.models import build, padded_ids

ROUGH = "i-clustered:clusters=2,topk=2"


def layer(method: str = ROUGH, **options: object) -> sq.nn.MultiheadAttention:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = sq.nn.MultiheadAttention(32, 4, method=method, **options)
        for parameter in made.parameters():
            parameter.data.mul_(3.0)
        return made.eval()


def tokens(items: int = 1, length: int = 40, seed: int = 0) -> torch.Tensor:
    return torch.randn(items, length, 32, generator=torch.Generator().manual_seed(seed))


def bert(method: str | None = ROUGH) -> torch.nn.Module:
    model = build("bert").model
    if method is not None:
        sq.hf.swap(model, method)
    return model


# ---------------------------------------------------------------------- what is counted


@pytest.mark.parametrize("every", [1, 4])
def test_one_call_of_every_so_many_is_audited_at_a_place_that_varies(every):
    one, x, found = layer(), tokens(), []
    with sq.audit(one, tolerance=9.0, every=every, callback=found.append) as audit, torch.inference_mode():
        for _ in range(40):
            one(x)
    report = audit.report().overall
    assert (report.calls, report.audited, report.rows) == (40, 40 // every, 32 * 40 // every)
    assert [(call.call - 1) // every for call in found] == list(range(40 // every))
    assert (len({call.call % every for call in found}) == 1) == (every == 1)


@pytest.mark.parametrize("rows", [1, 50])
def test_so_many_rows_are_compared(rows):
    one, found = layer(), []
    with sq.audit(one, tolerance=9.0, rows=rows, every=1, callback=found.append), torch.inference_mode():
        one(tokens())
    assert [len(call.errors) for call in found] == [rows]


def test_the_figures_are_those_of_the_errors():
    one, x, found = layer(), tokens(), []
    with sq.audit(one, tolerance=0.3, every=1, callback=found.append) as audit, torch.inference_mode():
        for _ in range(3):
            one(x)
    errors = [error for call in found for error in call.errors]
    report = audit.report().overall
    assert report.mean_square == pytest.approx(sum(e * e for e in errors) / 96)
    assert report.share == sum(e > 0.3 for e in errors) / 96
    assert 0 < report.share < report.share_bound < 1
    assert report.largest == pytest.approx(max(errors))
    assert report.overhead > 0


def test_every_audited_call_counts_once_however_long_it_is():
    one, short, long = layer(), tokens(length=3), tokens(length=300)

    def report_of(*calls):
        with sq.audit(one, tolerance=0.3, every=1, rows=2000) as audit, torch.inference_mode():
            for x in calls:
                one(x)
        return audit.report().overall

    alone = [report_of(short), report_of(long)]
    both = report_of(short, long)
    assert alone[0].share < 0.5 * alone[1].share
    assert both.share == pytest.approx((alone[0].share + alone[1].share) / 2, rel=0.05)
    assert both.mean_square == pytest.approx((alone[0].mean_square + alone[1].mean_square) / 2, rel=0.05)


def test_errors_are_those_of_the_method_against_exact_attention_with_padding():
    one, exact, x, mask = layer(), layer("full"), tokens(2), sq.Mask.padding([40, 13])
    with torch.inference_mode(), sq.audit(one, tolerance=9.0, rows=4000, every=1) as audit:
        one(x, mask=mask)
        q, k, v = (one._split(p(x), 4) for p in (one.q_proj, one.k_proj, one.v_proj))
        out, want = one.attention(q, k, v, mask=mask), exact.attention(q, k, v, mask=mask)
    errors = (out - want).norm(dim=-1) / want.norm(dim=-1)
    valid = torch.cat([errors[0].flatten(), errors[1, :, :13].flatten()])
    assert audit.report().overall.mean_square == pytest.approx(float(valid.square().mean()), rel=0.1)


def test_exact_layers_have_no_error():
    one = layer("full", kv_heads=2)
    with sq.audit(one, tolerance=1e-4, every=1, on_exceed="raise") as audit, torch.inference_mode():
        one(tokens(), is_causal=True)
    assert audit.report().overall.largest < 1e-5


@pytest.mark.parametrize("share", [0.5, 0.99])
def test_the_bounds_follow_the_confidence(share):
    one = layer()
    with sq.audit(one, tolerance=0.3, every=1, confidence=share) as audit, torch.inference_mode():
        one(tokens())
    report = audit.report()
    from subquad.audits.statistics import share_upper

    assert report.overall.share_bound == share_upper(round(report.overall.share * 32), 32, 1 - share)


def test_no_bound_of_the_mean_where_its_assumption_fails():
    one = layer("local:window=0")
    with sq.audit(one, tolerance=9.0, rows=300, every=1) as audit, torch.inference_mode():
        one(tokens())
    report = audit.report().overall
    assert report.largest > 1
    assert report.mean_square_bound is None
    assert report.mean_square > 0


def test_the_same_seed_audits_the_same_calls_and_rows():
    found = {}
    for seed in (0, 0, 1):
        one, calls = layer(), []
        with sq.audit(one, tolerance=9.0, every=3, seed=seed, callback=calls.append), torch.inference_mode():
            for _ in range(9):
                one(tokens())
        found.setdefault(seed, []).append([(call.call, call.errors) for call in calls])
    assert found[0][0] == found[0][1] != found[1][0]


def test_the_report_prints_and_becomes_plain_data():
    one = layer()
    with sq.audit(one, tolerance=0.3, every=1) as audit, torch.inference_mode():
        one(tokens())
    text = str(audit.report())
    assert "i-clustered:clusters=2,topk=2" in text
    assert "1 audited calls exceeded the tolerance" in text
    assert json.loads(json.dumps(audit.report().to_dict()))["overall"]["rows"] == 32


# ---------------------------------------------------------------------- what stays as it was


class Counted(TorchDispatchMode):
    """Counts every operation on tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **kwargs or {})


def operations(one: torch.nn.Module, x: torch.Tensor) -> list[str]:
    with torch.inference_mode(), Counted() as counted:
        one(x)
    return counted.names


def test_a_call_that_is_not_audited_runs_no_operation_more_and_reads_nothing_back():
    one, x = layer(), tokens()
    plain = operations(one, x)
    with sq.audit(one, tolerance=9.0, every=2) as audit:
        seen = [(operations(one, x), audit.report().overall.audited) for _ in range(2)]
    audited, other = (seen[0][0], seen[1][0]) if seen[0][1] else (seen[1][0], seen[0][0])
    assert other == plain
    assert len(audited) > len(plain) + 10


def test_the_global_generators_do_not_move():
    one = layer()
    torch.manual_seed(3)
    before = torch.get_rng_state()  # Python's own: see compiled.py, because the run-time type checks here read it
    with sq.audit(one, tolerance=0.01, every=1, on_exceed="exact"), torch.inference_mode():
        one(tokens())
    assert torch.equal(torch.get_rng_state(), before)


def test_outputs_are_those_without_an_audit_and_stop_leaves_nothing():
    one, x = layer(), tokens()
    with torch.inference_mode():
        plain = one(x)
        before = dict(vars(one.attention))
        audit = sq.audit(one, tolerance=0.01, every=1)
        audit.start()
        assert torch.equal(one(x), plain)
        audit.stop()
        audit.stop()
        one(x)
    assert audit.report().overall.calls == 1
    assert vars(one.attention).keys() == before.keys()


def test_a_copy_of_an_audited_layer_is_not_audited():
    one = layer()
    with sq.audit(one, tolerance=9.0, every=1) as audit, torch.inference_mode():
        for other in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
            other(tokens())
    assert audit.report().overall.calls == 0


@pytest.mark.parametrize(("on_exceed", "method"), [("warn", ROUGH), ("exact", "full")])
def test_gradients_are_those_of_what_is_returned(on_exceed, method):
    grads = {}
    for audited in (True, False):
        one, x = layer(ROUGH if audited else method), tokens().requires_grad_()
        audit = sq.audit(one, tolerance=0.01, every=1, on_exceed=on_exceed)
        if audited:
            audit.start()
        one(x).square().sum().backward()
        grads[audited] = x.grad
    torch.testing.assert_close(grads[True], grads[False])


# ---------------------------------------------------------------------- what happens beyond the tolerance


def test_warn_logs_one_line_and_returns_what_the_method_gave(caplog):
    one, x = layer(), tokens()
    with torch.inference_mode(), caplog.at_level(logging.WARNING, "subquad.audit"):
        plain = one(x)
        with sq.audit(one, tolerance=0.01, every=1) as audit:
            assert torch.equal(one(x), plain)
    (record,) = caplog.records
    assert (
        "layer MultiheadAttention: 32 of 32 audited rows have a relative error above tolerance=0.01" in record.message
    )
    assert (audit.report().overall.exceeded, audit.report().overall.replaced) == (1, 0)


def test_raise_raises_with_the_record_and_the_audit_can_be_stopped():
    one = layer()
    with pytest.raises(Exceeded, match=r"above tolerance=0.01 \(largest .*use a closer method") as caught:  # noqa: SIM117
        with sq.audit(one, tolerance=0.01, every=1, on_exceed="raise"), torch.inference_mode():
            one(tokens())
    assert caught.value.call.above == 32
    with torch.inference_mode():
        one(tokens())


PADDED = sq.Mask.padding([40, 11]) & sq.Mask.window(9)


@pytest.mark.parametrize("how", [{}, {"mask": PADDED}, {"keep": [0, 7]}, {"mask": PADDED, "keep": [0, 7]}])
def test_exact_returns_exact_attention_for_the_audited_call_alone(how):
    one, exact, x = layer("local:window=2"), layer("full"), tokens(2)
    with torch.inference_mode(), sq.audit(one, tolerance=0.01, every=2, on_exceed="exact") as audit:
        outs = [one(x, **how) for _ in range(2)]
        want, audited = exact(x, **how), audit.report().overall
    assert (audited.audited, audited.exceeded, audited.replaced) == (1, 1, 1)
    assert sorted(torch.allclose(out, want, atol=1e-5) for out in outs) == [False, True]


def test_exact_gives_the_log_sum_exp_too():
    bound, x = layer().attention, torch.randn(3, 1, 4, 40, 8, generator=torch.Generator().manual_seed(0))
    with sq.audit(bound, tolerance=1e-4, every=1, on_exceed="exact"):
        out, lse = bound(*x, return_lse=True)
    want, want_lse = sq.attention(*x, method="full", return_lse=True)
    torch.testing.assert_close((out, lse), (want, want_lse))


def test_a_share_of_rows_may_be_allowed_above():
    for allowed, exceeded in ((0.0, 1), (0.99, 0)):
        one = layer()
        with sq.audit(one, tolerance=0.6, allowed=allowed, every=1) as audit, torch.inference_mode():
            one(tokens())
        assert 0 < audit.report().overall.share < 0.99
        assert audit.report().overall.exceeded == exceeded


# ---------------------------------------------------------------------- numbers that are not finite


def test_rows_without_a_finite_exact_result_are_counted_and_logged_and_above(caplog):
    one, x = layer("local:window=3"), tokens(2)
    x[1, 5, 0] = torch.nan
    with sq.audit(one, tolerance=9.0, every=1, rows=64, on_exceed="warn") as audit, torch.inference_mode():
        one(x)
    report = audit.report().overall
    assert 16 < report.undefined < 48  # one item of two
    assert report.share == report.undefined / 64
    assert report.exceeded == 1
    assert report.mean_square_bound is None
    assert math.isfinite(report.mean_square)
    assert "audited rows have an exact result that is not finite" in caplog.text
    assert "not finite; they count as above" in str(audit.report())


def test_infinite_outputs_with_finite_exact_rows_have_an_infinite_error():
    one = layer("local:window=3")
    x, keep = torch.randn(3, 1, 4, 40, 8, generator=torch.Generator().manual_seed(0)), one.attention.method
    with sq.audit(one.attention, tolerance=9.0, every=1) as audit:
        watch = one.attention.watch

        class Broken:
            def run(self, *args):
                return keep.run(*args) + torch.inf

        query, key, value, call = one.attention.prepare(*x)
        watch(Broken(), query, key, value, call)
    assert audit.report().overall.largest == math.inf
    assert audit.report().overall.share == 1.0


def test_nan_in_padding_is_no_error():
    bound, x = layer().attention, torch.randn(3, 2, 4, 40, 8, generator=torch.Generator().manual_seed(0))
    x[:, 1, :, 20:] = torch.nan
    with sq.audit(bound, tolerance=1e-4, every=1, on_exceed="exact") as audit:
        out = bound(*x, mask=sq.Mask.padding([40, 20]))
    assert out.isfinite().all()
    assert audit.report().overall.undefined == 0


def test_all_figures_of_a_report_are_about_the_same_calls(monkeypatch):
    one, x, join = layer("local:window=0"), tokens(), RunningMoments.join

    def joined(moments, other):
        join(moments, other)
        one(x)  # by another thread, while the report is made

    with sq.audit(one, tolerance=1e-6, every=1) as audit, torch.inference_mode():
        one(x)
        monkeypatch.setattr(RunningMoments, "join", joined)
        report = audit.report().overall
    assert (report.calls, report.audited, report.rows, report.share) == (1, 1, 32, 1.0)


# ---------------------------------------------------------------------- calls that cannot be audited


def test_calls_from_several_threads_are_all_counted():
    one, x = layer("full"), tokens(length=8)

    def calls() -> None:
        with torch.inference_mode():
            for _ in range(50):
                one(x)

    with sq.audit(one, tolerance=9.0, every=5) as audit:
        threads = [threading.Thread(target=calls) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    report = audit.report().overall
    assert (report.calls, report.audited, report.rows) == (200, 40, 40 * 32)


def test_dropout_no_real_query_and_transforms_are_skipped_and_counted():
    one = layer("full", dropout=0.5)
    x = tokens()
    with sq.audit(one, tolerance=1e-4, every=1, on_exceed="raise") as audit:
        one.train()(x)
        one.eval()(x, mask=sq.Mask.padding([0]))
        torch.func.vmap(one)(x[None])
        one(x)
    report = audit.report()
    assert (report.overall.calls, report.overall.skipped, report.overall.audited) == (4, 3, 1)
    assert "3 sampled calls could not be audited" in str(report)


@pytest.mark.long
def test_a_compiled_model_is_audited_outside_the_graph_and_fullgraph_says_why():
    seen = json.loads(output_of("tests.library.audits.compiled"))
    assert "an audited layer is not compiled" in seen.pop("fullgraph")
    assert {seen.pop(name) for name in ("compiled first", "while", "broken", "after", "no more calls", "random")} == {
        True
    }
    assert seen == {"calls": 4, "audited": 2, "rows": 64}


# ---------------------------------------------------------------------- drift


def audited(method: str, calls: int, baseline: dict | None = None, **options: object):
    one = layer(method)
    with sq.audit(one, tolerance=9.0, every=1, baseline=baseline, **options) as audit, torch.inference_mode():
        for seed in range(calls):
            one(tokens(length=60, seed=seed + (1000 if baseline else 0)))
    return audit


def test_drift_is_found_where_errors_change_and_not_where_they_do_not(caplog):
    baseline = json.loads(json.dumps(audited("local:window=4", 60).baseline()))
    healthy = audited("local:window=4", 40, baseline).report()
    same = healthy.overall
    assert same.drifted is healthy.alarm is False
    assert same.evidence < 20
    assert "has drifted" not in caplog.text
    worse = audited("local:window=1", 40, baseline)
    assert worse.report().overall.drifted is worse.report().alarm is True
    assert caplog.text.count("has drifted") == 1
    assert "yes (" in str(worse.report())


def test_a_lower_rate_of_false_alarms_needs_more_evidence():
    baseline = audited("local:window=4", 60).baseline()
    evidence = audited("local:window=1", 15, baseline).report().overall.evidence
    assert evidence > 4
    for false_alarm, drifted in ((2 / evidence, True), (0.5 / evidence, False)):
        report = audited("local:window=1", 15, baseline, false_alarm=false_alarm).report()
        assert report.overall.drifted is drifted


def test_without_a_baseline_there_is_no_verdict():
    report = audited("local:window=4", 2).report()
    assert (report.overall.drifted, report.overall.evidence, report.alarm) == (None, None, None)


# ---------------------------------------------------------------------- transformers


def test_every_layer_of_a_swapped_model_is_audited_on_real_queries():
    for method in (ROUGH, "local:window=1"):  # the second computes padded queries like all others
        model, (ids, mask) = bert(method), padded_ids(pads=16)
        with sq.audit(model, tolerance=9.0, every=1, rows=400) as audit, torch.inference_mode():
            model(input_ids=ids, attention_mask=mask)
        report = audit.report()
        names = [layer.name for layer in sq.hf.describe(model).layers]
        assert [layer.name for layer in report.layers] == names
        assert all(layer.rows == 400 for layer in report.layers)
        assert all(bound.watch is None for bound in sq.hf.bounds(model).values())


def test_padded_queries_that_a_layer_computes_are_not_sampled():
    model, (ids, mask) = bert("local:window=0"), padded_ids(pads=16)
    found = []
    with sq.audit(model, tolerance=9.0, every=1, rows=50, callback=found.append), torch.inference_mode():
        model(input_ids=ids[1:], attention_mask=mask[1:])
    assert all(max(call.errors) < 1e-5 for call in found)  # one real token: its window is all that it sees


def test_what_holds_a_model_is_audited():
    class Pipeline:
        model = bert()

    holder = torch.nn.Sequential(bert())
    for given in (Pipeline(), holder):
        assert len(sq.audit(given, tolerance=0.1).report().layers) == 2


# ---------------------------------------------------------------------- bad input

GOOD = {"tolerance": 0.1}
BASELINE = {"layers": {"MultiheadAttention": {"error": 0.1, "low": 0.2, "high": 0.4}}}
BAD = {
    "rows": ({"rows": 0}, "rows=0, but it must be a whole number of at least 1"),
    "every": ({"every": 0}, "every=0, but it must be a whole number of at least 1"),
    "a word": ({"tolerance": "x"}, "tolerance='x', but it must be a finite number above 0"),
    "no tolerance": ({"tolerance": 0.0}, "tolerance=0.0, but it must be a finite number above 0"),
    "negative": ({"tolerance": -1.0}, "tolerance=-1.0, but"),
    "nan": ({"tolerance": math.nan}, "tolerance=nan, but"),
    "allowed": ({"allowed": 1.0}, r"allowed=1.0, but it must be in \[0, 1\)"),
    "on_exceed": ({"on_exceed": "stop"}, "on_exceed='stop', but it must be 'warn', 'raise', 'exact'"),
    "confidence": ({"confidence": 1.0}, "confidence=1.0, but it must be between 0 and 1"),
    "false_alarm": ({"false_alarm": 0.0}, "false_alarm=0.0, but"),
    "damaged": ({"baseline": {"layers": {"MultiheadAttention": [1]}}}, "the baseline is damaged"),
    "other model": (
        {"baseline": {"layers": {}}},
        "has no layer 'MultiheadAttention'; it has 0 layers and the model has 1",
    ),
    "interval": (
        {"baseline": {"layers": {"MultiheadAttention": {"error": 0.1, "low": 0.5, "high": 0.4}}}},
        "is 0.5 to 0.4 above 0.1, but shares lie in",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named_and_the_layer_is_left_alone(name):
    wrong, message = BAD[name]
    one = layer()
    with pytest.raises(ValueError, match=message) as caught:
        sq.audit(one, **(GOOD | wrong))
    assert "\n" not in str(caught.value)
    assert one.attention.watch is None
    assert sq.audit(one, **GOOD, baseline=BASELINE)


def test_an_audit_of_methods_that_are_gone_does_not_start():
    model = bert()
    audit = sq.audit(model, tolerance=0.1)
    sq.hf.swap(model, ROUGH)
    with pytest.raises(ValueError, match="other methods were swapped in since this audit was made"):
        audit.start()
    sq.hf.restore(model)
    with pytest.raises(ValueError, match="nothing in this BertModel runs a subquad method"):
        audit.start()


def test_a_model_that_is_not_swapped_is_refused():
    with pytest.raises(ValueError, match="nothing in this BertModel runs a subquad method"):
        sq.audit(bert(None), tolerance=0.1)
    with pytest.raises(TypeError, match="expected a swapped model or a module with subquad layers, got str"):
        sq.audit("a model", tolerance=0.1)


def test_a_second_audit_of_the_same_model_is_refused_and_the_first_goes_on():
    pair = torch.nn.ModuleList([layer(), layer()])
    with sq.audit(pair[1], tolerance=9.0, every=1) as first:
        second = sq.audit(pair, tolerance=9.0)
        with pytest.raises(ValueError, match="layer 1 is audited already; stop that audit first"):
            second.start()
        assert pair[0].attention.watch is None
        second.stop()
        with torch.inference_mode():
            pair[1](tokens())
    assert first.report().overall.audited == 1
    second.start()
    second.stop()


def test_a_layer_without_an_audited_call_has_no_baseline():
    with pytest.raises(ValueError, match="layer MultiheadAttention has no audited call among 0"):
        sq.audit(layer(), tolerance=0.1).baseline()


@pytest.mark.parametrize(("name", "method", "floor"), [
    ("bert", ROUGH, {"min_fidelity": 0.1}),
    ("gpt2", "local:window=3", {"max_kl": 9.0}),
])  # fmt: skip
def test_another_default_device_changes_no_audit(name, method, floor):
    case, found = build(name), []
    sq.hf.swap(case.model, method)
    for device in ("cpu", "meta"):
        with torch.device(device), sq.audit(case.model, tolerance=9.0, every=1, callback=found.append, **floor):
            case.output()
    errors = [call.errors for call in found]
    assert len(errors) > 2
    assert errors[: len(errors) // 2] == errors[len(errors) // 2 :]
