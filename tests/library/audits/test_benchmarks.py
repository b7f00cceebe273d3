"""The scripts behind the figures of audits, at small sizes and without real data."""

import importlib
from collections import Counter
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(BENCHMARKS)  # as for a script
    return importlib.import_module


def test_coverage_knows_the_errors_that_it_simulates(script):
    table = script("audit").coverage(2, calls=2)
    cells = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]] for line in table.splitlines()
    }
    share, bound, held, square, square_bound, _ = cells["one head of four 0.4, else 0.02"]
    assert (share, square) == ("0.2500", f"{0.25 * 0.16 + 0.75 * 0.0004:.4f}")
    assert float(bound) > 0.2
    assert float(square_bound) > 0.0403
    assert held in ("0.0 %", "50.0 %", "100.0 %")


def test_alarms_come_for_other_errors_and_not_for_the_same(script):
    audit, drawn = script("audit"), torch.Generator().manual_seed(0)

    def calls(size: float) -> list[list[tuple[float, ...]]]:
        return [[tuple((size * torch.rand(32, generator=drawn)).tolist()) for _ in range(140)] for _ in range(2)]

    audit_streams, audit.STREAMS = audit.STREAMS, 3
    try:
        base = calls(0.1)
        assert Counter(audit.alarms(base, base, same=True)) == {None: 3}
        assert all(each is not None and each < 40 for each in audit.alarms(base, calls(0.2), same=False))
    finally:
        audit.STREAMS = audit_streams


@pytest.mark.parametrize("kind", ["normal", "outliers", "alike"])
def test_the_deterministic_bound_is_never_exceeded(script, kind):
    certificate = script("certificate")
    q, k, v = torch.randn(3, 90, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    if kind == "outliers":
        q, k, v = certificate.adversarial(90)
    if kind == "alike":
        q, k = q[:1] + 0.01 * q, k[:1] + 0.01 * k
    bound, error, size = certificate.certified(q, k, v, 32**-0.5)
    assert (bound >= error - 1e-9 * size).all()
    assert error.max() > 0
    assert bool((bound < size).all()) == (kind == "alike")
