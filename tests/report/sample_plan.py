"""A plan's report as `subquad plan` makes it, with figures that are easy to find."""

from subquad.report.plan_schema import PlanReport

METHOD = "clustered-tail:clusters=32,topk=32,cells=8"


def report(lengths=(512, 2048), layers=3) -> PlanReport:
    return {
        "kind": "plan",
        "schema": 1,
        "created": "2026-03-14T09:26:53+00:00",
        "command": "subquad plan some-org/a-model",
        "versions": {"torch": "2.13.0"},
        "hardware": {"processor": "Example CPU"},
        "settings": {"floor": 0.99, "lengths": list(lengths)},
        "model": {"name": "some-org/a-model"},
        "text": {"tokens": 999},
        "lengths": [planned(length, layers, (number + 1) / 100) for number, length in enumerate(lengths)],
        "headline": "With a fidelity ≥ 0.99: 1.31× at 512 tokens.",
        "notes": ["Lengths between those that were planned run the plan of the next longer one."],
    }


def planned(length, layers, loss):
    verified = {"predicted": loss / 3, "loss": loss / 7, "bound": loss / 2, "speedup": 1 + 9 * loss, "passages": 20}
    of_layers = {
        str(n): {
            "method": METHOD,
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
