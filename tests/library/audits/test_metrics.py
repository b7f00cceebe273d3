"""The numbers of audits in Prometheus and OpenTelemetry."""

import math
import sys

import pytest
import torch

import subquad as sq
from subquad.audits import AuditedCall
from subquad.audits.metrics import opentelemetry, prometheus, prometheus_output
from tests.library.hf.models import build

CALLS = [
    AuditedCall(0, "a", 3, (0.02, 0.2, math.nan), 2, True, False, None, 0.5),
    AuditedCall(0, "a", 9, (0.002,), 0, False, False, 7.0, 0.25),
]
WANT = {
    "subquad_audit_calls": 2,
    "subquad_audit_rows": 4,
    "subquad_audit_rows_above": 2,
    "subquad_audit_rows_undefined": 1,
    "subquad_audit_seconds": 0.75,
}


def test_prometheus_counts_rows_and_errors_of_each_layer():
    library = pytest.importorskip("prometheus_client")
    registry = library.CollectorRegistry()
    callback = prometheus(registry)
    for call in CALLS:
        callback(call)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"layer": "a"} | labels)

    assert {name: value(f"{name}_total") for name in WANT} == WANT
    assert value("subquad_audit_error_count") == 3
    assert value("subquad_audit_error_bucket", le="0.03") == 2
    assert value("subquad_audit_drift_evidence") == 7.0


@pytest.mark.parametrize(("kind", "figure"), [("bert", "fidelity"), ("llama", "kl")])
def test_prometheus_reads_the_output_and_the_alarm_when_it_is_scraped(kind, figure):
    library = pytest.importorskip("prometheus_client")
    registry, model = library.CollectorRegistry(), build(kind).model.eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(6.0)
    sq.hf.swap(model, "local:window=1")
    floor = {"min_fidelity": 0.9999} if kind == "bert" else {"max_kl": 1e-6}

    def values() -> dict[str, float]:
        names = ("alarm", "inputs", "inputs_audited", "evidence", figure)
        found = {name: registry.get_sample_value(f"subquad_audit_{name}") for name in names}
        return {name: value for name, value in found.items() if value is not None}

    with torch.no_grad(), sq.audit(model, every=2, **floor) as audit:
        prometheus_output(audit, registry)
        assert values() == {"alarm": 0, "inputs": 0, "inputs_audited": 0, "evidence": 1}
        for seed in range(12):
            model(torch.randint(5, 60, (1, 40), generator=torch.Generator().manual_seed(seed)))
    report = audit.report()
    output = report.embeddings or report.next_tokens
    assert report.alarm
    expected = {"alarm": 1, "inputs": 12, "inputs_audited": 6, "evidence": output.evidence}
    assert values() == expected | {figure: getattr(output, figure)}


def test_opentelemetry_counts_rows_and_errors_of_each_layer():
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    callback = opentelemetry(MeterProvider([reader]).get_meter("test"))
    for call in CALLS:
        callback(call)
    (of_resource,) = reader.get_metrics_data().resource_metrics
    points = {each.name: each.data.data_points[0] for each in of_resource.scope_metrics[0].metrics}
    assert {name: points[name].value for name in WANT} == WANT
    assert points["subquad_audit_error"].count == 3
    assert points["subquad_audit_drift_evidence"].value == 7.0
    assert all(dict(point.attributes) == {"layer": "a"} for point in points.values())


@pytest.mark.parametrize(
    ("make", "module", "package"),
    [
        (prometheus, "prometheus_client", "prometheus_client"),
        (lambda: prometheus_output(None), "prometheus_client", "prometheus_client"),
        (opentelemetry, "opentelemetry", "opentelemetry-api"),
    ],
)
def test_a_library_that_is_missing_is_named_with_the_extra(make, module, package, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"{package} is not installed: pip install .*'\.\[metrics\]'"):
        make()
