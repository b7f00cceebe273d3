"""A report as `subquad plan` makes them, with made-up but plausible figures."""

from dataclasses import replace
from typing import Any

from subquad.tools.plan.schema import PlannedLength, PlanReport
from subquad.tools.runs.records import from_plain

EXACT, ROUGH, CLOSE = "full", "clustered:clusters=25", "i-clustered:clusters=25"
TIMES, LOSSES = {EXACT: 1.0, ROUGH: 0.41, CLOSE: 0.51}, {EXACT: 0.0, ROUGH: 0.0094, CLOSE: 0.0011}
LAYERS = 6


def plan() -> PlanReport:
    """An encoder's plan for two lengths, the shorter of which stays exact."""
    shorter = _length(128, dict.fromkeys(map(str, range(LAYERS)), EXACT))
    shorter |= {"exact_because": "no candidate is faster than exact attention in any layer", "passages": 0}
    longer = _length(512, {str(i): ROUGH if i in (0, 5) else CLOSE if i < 4 else EXACT for i in range(LAYERS)})
    round_ = {"predicted": 0.0122, "loss": 0.0119, "bound": 0.0131, "speedup": 1.12, "passages": 32}
    longer |= {
        "batches": {"batch": 8, "tokens": 284.2, "padded": 490.7},
        "rounds": [round_ | {"loss": 0.0301, "bound": 0.0342, "speedup": 1.31}, round_],
        "verified": round_,
        "uniform": {"method": CLOSE, "predicted": 0.0066, "loss": 0.0070, "speedup": 1.08},
        "floors": [_floor(0.9, 1.4, CLOSE, 1.2), _floor(0.99, 1.12, CLOSE, 1.08), _floor(0.999, 1.03, None, 1.0)],
    }
    made = {
        "kind": "plan",
        "schema": 1,
        "created": "2026-03-14T09:26:53+00:00",
        "command": "subquad plan --lengths 128,512",
        "versions": {"python": "3.11.7", "subquad": "0.1.0", "torch": "2.13.0"},
        "hardware": {"processor": "Example CPU @ 2.6 GHz", "cores": "8"},
        "settings": {"floor": 0.98, "minutes": 3.0, "shift": 1.6, "confidence": 0.95, "lengths": [128, 512]},
        "model": {"name": "sentence-transformers/all-MiniLM-L6-v2", "class": "BertModel", "layers": LAYERS},
        "text": {"fingerprint": "3dfa4e8b981abf73", "tokens": 196453, "documents": 76},
        "lengths": [shorter, longer],
        "headline": "With a fidelity ≥ 0.98: 1.12× the speed of exact attention at 512 tokens (fidelity 0.9881).",
        "notes": ["Lengths between those that were planned run the plan of the next longer one."],
    }
    return from_plain(PlanReport, made)


def _length(length: int, methods: dict[str, str]) -> Any:
    layers = {
        number: {
            "method": name,
            "start": 0 if name == EXACT else length // 2,
            "loss": LOSSES[name] * (1 + int(number) / 4),
            "time": TIMES[name],
            "error": None if name == EXACT else 0.4,
        }
        for number, name in methods.items()
    }
    return {
        "length": length, "layers": layers, "rounds": [], "floors": [], "passages": 13, "model_ms": 41.0, "tried": 9,
    }  # fmt: skip


def _floor(floor: float, speedup: float, uniform: str | None, uniform_speedup: float) -> Any:
    return {
        "floor": floor,
        "chosen": {},
        "loss": 0.9 * (1 - floor),
        "speedup": speedup,
        "uniform": uniform,
        "uniform_speedup": uniform_speedup,
    }


def report(lengths: tuple[int, ...] = (512, 2048), layers: int = 3) -> PlanReport:
    """A plan's report whose figures differ from each other, so that a test finds each of them in a table."""
    planned = [_planned(length, layers, (number + 1) / 100) for number, length in enumerate(lengths)]
    headline = "With a fidelity ≥ 0.99: 1.31× at 512 tokens."
    return replace(plan(), lengths=from_plain(list[PlannedLength], planned), headline=headline)


def _planned(length: int, layers: int, loss: float) -> Any:
    verified = {"predicted": loss / 3, "loss": loss / 7, "bound": loss / 2, "speedup": 1 + 9 * loss, "passages": 20}
    of_layers = {
        str(n): {
            "method": "clustered-tail:clusters=32,topk=32,cells=8",
            "start": length // 2,
            "loss": (n + 1) * loss / 11,
            "time": 0.31 + n * loss,
            "error": 0.1,
        }
        for n in range(layers)
    }
    best = {"method": "i-clustered:clusters=100,topk=32", "predicted": loss, "loss": loss / 5, "speedup": 1.2 + loss}
    return {
        "length": length, "layers": of_layers, "rounds": [verified], "verified": verified, "uniform": best,
        "floors": [], "passages": 12, "model_ms": 100.0, "tried": 9,
    }  # fmt: skip
