"""Export the figures of audits to Prometheus or OpenTelemetry."""

from collections.abc import Callable, Iterator
from typing import Any

from subquad.audits.auditing import Audit
from subquad.audits.report import EmbeddingReport
from subquad.audits.watch import AuditedCall
from subquad.core.errors import not_installed

BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)  # relative errors

COUNTS = {
    "subquad_audit_calls": "Audited calls.",
    "subquad_audit_rows": "Audited rows of attention.",
    "subquad_audit_rows_above": "Audited rows that are not within the tolerance.",
    "subquad_audit_rows_undefined": "Audited rows whose exact result is not finite.",
    "subquad_audit_seconds": "Time spent auditing.",
}
ERROR = "subquad_audit_error", "Relative error of audited rows."
OUTPUT = {
    "subquad_audit_inputs": "Inputs of the model while its output was audited.",
    "subquad_audit_inputs_audited": "Inputs whose output was compared with exact attention's.",
    "subquad_audit_fidelity": "Mean cosine of audited embeddings to the exact ones.",
    "subquad_audit_kl": "Mean KL of audited next-token distributions to the exact ones, in nats.",
    "subquad_audit_evidence": "Evidence that the output does not keep its floor.",
    "subquad_audit_alarm": "1 if the output does not keep its floor or a layer has drifted, else 0.",
}
EVIDENCE = "subquad_audit_drift_evidence", "Evidence of drift from the baseline."


def prometheus(registry: Any = None) -> Callable[[AuditedCall], None]:
    """Return a callback that keeps Prometheus metrics, one series for each layer.

    Args:
        registry: a `prometheus_client.CollectorRegistry`; by default the library's own.

    Raises:
        ImportError: prometheus_client is not installed.
    """
    try:
        from prometheus_client import REGISTRY, Counter, Gauge, Histogram
    except ImportError:
        raise ImportError(not_installed("prometheus_client", "metrics")) from None
    registry = REGISTRY if registry is None else registry
    counts = {name: Counter(name, text, ["layer"], registry=registry) for name, text in COUNTS.items()}
    error = Histogram(*ERROR, ["layer"], registry=registry, buckets=BUCKETS)
    evidence = Gauge(*EVIDENCE, ["layer"], registry=registry)

    def callback(call: AuditedCall) -> None:
        for name, number in numbers_of(call).items():
            counts[name].labels(call.name).inc(number)
        for each in defined(call):
            error.labels(call.name).observe(each)
        if call.evidence is not None:
            evidence.labels(call.name).set(call.evidence)

    return callback


def prometheus_output(audit: Audit, registry: Any = None) -> None:
    """Register gauges of the audited output and of the alarm, which are read from the audit's report when scraped.

    Args:
        audit: what `sq.audit` returned.
        registry: a `prometheus_client.CollectorRegistry`; by default the library's own.

    Raises:
        ImportError: prometheus_client is not installed.
    """
    try:
        from prometheus_client import REGISTRY
        from prometheus_client.core import GaugeMetricFamily
        from prometheus_client.registry import Collector
    except ImportError:
        raise ImportError(not_installed("prometheus_client", "metrics")) from None

    class Output(Collector):
        def collect(self) -> Iterator[Any]:
            for name, value in output_of(audit).items():
                yield GaugeMetricFamily(name, OUTPUT[name], value=value)

    (REGISTRY if registry is None else registry).register(Output())


def output_of(audit: Audit) -> dict[str, float]:
    """The metrics of an audit's report that are about the output; those that it does not have are left out."""
    report = audit.report()
    metrics: dict[str, float | None] = {"alarm": bool(report.alarm)}
    if report.embeddings is not None:
        metrics["fidelity"] = report.embeddings.fidelity
    if report.next_tokens is not None:
        metrics["kl"] = report.next_tokens.kl
    output = report.embeddings or report.next_tokens
    if output is not None:
        inputs = output.inputs if isinstance(output, EmbeddingReport) else output.prompts
        metrics |= {"inputs": inputs, "inputs_audited": output.audited, "evidence": output.evidence}
    return {f"subquad_audit_{name}": float(value) for name, value in metrics.items() if value is not None}


def opentelemetry(meter: Any = None) -> Callable[[AuditedCall], None]:
    """Return a callback that records OpenTelemetry metrics, with the layer as an attribute.

    Args:
        meter: an `opentelemetry.metrics.Meter`; by default that of the global provider.

    Raises:
        ImportError: opentelemetry-api is not installed.
    """
    try:
        from opentelemetry import metrics
    except ImportError:
        raise ImportError(not_installed("opentelemetry-api", "metrics")) from None
    meter = metrics.get_meter("subquad") if meter is None else meter
    counts = {name: meter.create_counter(name, description=text) for name, text in COUNTS.items()}
    error = meter.create_histogram(ERROR[0], description=ERROR[1], explicit_bucket_boundaries_advisory=BUCKETS)
    evidence = meter.create_gauge(EVIDENCE[0], description=EVIDENCE[1])

    def callback(call: AuditedCall) -> None:
        layer = {"layer": call.name}
        for name, number in numbers_of(call).items():
            counts[name].add(number, layer)
        for each in defined(call):
            error.record(each, layer)
        if call.evidence is not None:
            evidence.set(call.evidence, layer)

    return callback


def numbers_of(call: AuditedCall) -> dict[str, float]:
    """The increments of one audited call to each counter."""
    rows = len(call.errors)
    numbers = 1, rows, call.above, rows - len(defined(call)), call.seconds
    return dict(zip(COUNTS, map(float, numbers), strict=True))


def defined(call: AuditedCall) -> list[float]:
    """The errors of rows that have one."""
    return [error for error in call.errors if error == error]
