"""Read the report of a comparison, in which every figure may be absent."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from subquad.core.spelling import listed
from subquad.methods.full import EXACT
from subquad.tools.compare.schema import MethodReport, Quality, Report
from subquad.tools.report.cells import known
from subquad.tools.report.terms import is_reference


def ran(report: Report) -> list[MethodReport]:
    """The methods with figures, exact attention first."""
    methods = [method for method in report.methods if method.status != "refused"]
    return sorted(methods, key=lambda method: method.status != "exact")


def refused(report: Report) -> dict[str, list[str]]:
    """Reasons, and the methods that could not run for that reason."""
    by_reason: dict[str, list[str]] = {}
    for method in report.methods:
        if method.status == "refused":
            by_reason.setdefault(method.reason or "no reason given", []).append(method.method)
    return by_reason


def model_lengths(report: Report) -> list[str]:
    """The lengths at which the whole model was measured, its own first."""
    lengths = {length for m in ran(report) for part in _by_length(m) for length in part}
    longest = report.settings.get("max_length")
    return sorted(
        lengths | ({str(longest)} if longest is not None else set()), key=lambda n: (n != str(longest), int(n))
    )


def model_length(report: Report) -> str:
    """The length that quality is measured at: the one asked for, or the model's own."""
    return next(iter(model_lengths(report)), "")


def op_lengths(report: Report) -> list[str]:
    """The lengths at which one attention call was timed."""
    return sorted({length for method in ran(report) for length in (method.op or {})}, key=int)


def quality(method: MethodReport, length: str) -> Quality:
    """Quality at a length; empty where there is none."""
    return (method.quality or {}).get(length) or Quality()


def fidelity(method: MethodReport, length: str) -> float | None:
    """Fidelity at a length."""
    return known((method.fidelity or {}).get(length))


def layer_errors(method: MethodReport) -> dict[int, float]:
    """Relative error of each layer's attention output that is known, by layer number."""
    errors: dict[int, float] = {}
    for layers in (method.quality or {}).values():
        for layer, error in (layers.layer_error or {}).items():
            if known(error) is not None:
                errors.setdefault(int(layer), error)
    return dict(sorted(errors.items()))


def min_fidelity(report: Report) -> float | None:
    """The minimum fidelity of the comparison."""
    return known(report.settings.get("min_fidelity"))


def floor_figure(report: Report) -> str:
    """The quantity of the comparison's floor: "fidelity", "kl" or "agreement"."""
    floor: Mapping[str, Any] = report.settings.get("floor") or {}
    return str(floor.get("figure", "fidelity"))


def of_next_tokens(report: Report) -> bool:
    """True if the comparison's floor is one of a causal language model."""
    return floor_figure(report) != "fidelity"


def noise_at(report: Report, part: Literal["model", "op"], length: str) -> float | None:
    """The difference of exact attention from itself at a length, as a factor."""
    return known((getattr(report.noise, part, None) or {}).get(length))


def marks(report: Report, method: MethodReport) -> list[str]:
    """The marks next to a method's name; `terms` explains each."""
    layers = report.model.get("layers")
    total = len(layers) if isinstance(layers, Sequence) else layers
    some = method.layers
    is_full = method.settings.get("name") == EXACT  # in another dtype
    partial = method.status == "measured" and bool(some) and isinstance(total, int) and len(some or []) < total
    explanations = {
        "baseline": method.status == "exact",
        _recommended(report, method.method): True,
        "reference": method.status == "measured" and not is_full and is_reference(method.method),
        f"{len(some or [])} of {total} layers": partial,
        "not calibrated": bool(method.unfitted),
        "not subquad's": method.status == "other",
    }
    return [mark for mark, holds in explanations.items() if mark and holds]


def _recommended(report: Report, name: str) -> str:
    """The mark of a method that is recommended, with the lengths; empty where it is not."""
    lengths = [n for n, choice in (report.recommendation.by_length or {}).items() if choice == name]
    if lengths:
        return f"recommended at {listed([f'{int(n):,}' for n in lengths])} tokens"
    known = report.recommendation.by_length is not None  # a report may have the choice alone
    return "recommended" if not known and name == report.recommendation.choice else ""


def notes(report: Report) -> list[str]:
    """Notes on single methods that ran: which layers stay exact, where it is exact, where it cannot run."""
    listed = [(m.method, [m.reason, *(m.remarks or [])]) for m in ran(report)]
    return [f"{name}: {note}" for name, each in listed for note in each if note]


def _by_length(method: MethodReport) -> Iterable[Mapping[str, Any]]:
    return (each or {} for each in (method.model, method.quality, method.fidelity))
