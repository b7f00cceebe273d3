"""The numbers of audits in Prometheus and OpenTelemetry."""

import math
import sys

import pytest

from subquad.audits import AuditedCall
from subquad.audits.metrics import opentelemetry, prometheus

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
    [(prometheus, "prometheus_client", "prometheus_client"), (opentelemetry, "opentelemetry", "opentelemetry-api")],
)
def test_a_library_that_is_missing_is_named_with_the_extra(make, module, package, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"{package} is not installed: pip install .*'\.\[metrics\]'"):
        make()
