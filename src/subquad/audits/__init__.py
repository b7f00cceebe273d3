"""Measures of the distance from exact attention while a model runs: audits, and attention whose error is controlled.

Three words have different meanings, in names and in text:

    estimate      a mean over sampled rows, without an error bar
    bound         a number that the true one exceeds with probability at most δ: "at confidence 1 − δ"
    certificate   a number that the true one never exceeds; nothing here is a certificate

auditing.py    the audit of a model: which calls are audited, and when a layer has drifted
watch.py       one audited call: rows of a layer, computed again by exact attention
outputs.py     the audited output, and the alarm when it does not keep its floor; embeddings.py, prompt_watch.py
report.py      what an audit has found, with its one alarm
metrics.py     the same for Prometheus and OpenTelemetry
controlled.py  attention that computes rows again until its error is within a tolerance
"""

from subquad.audits.auditing import Audit, Exceeded, audit
from subquad.audits.controlled import Controlled, Spent
from subquad.audits.report import AuditReport, EmbeddingReport, LayerReport
from subquad.audits.watch import AuditedCall

__all__ = [
    "Audit",
    "AuditReport",
    "AuditedCall",
    "Controlled",
    "EmbeddingReport",
    "Exceeded",
    "LayerReport",
    "Spent",
    "audit",
]
