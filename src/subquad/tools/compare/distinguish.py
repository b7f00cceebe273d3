"""Leave out fidelities that prove nothing, because methods that are far from exact attention have them too."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from subquad.core.spelling import listed
from subquad.methods import from_dict
from subquad.tools.compare.recommend import is_exact_by_settings, is_exact_kernel, is_faithful
from subquad.tools.compare.schema import MethodReport
from subquad.tools.measure.tradeoff import NARROW, PROVES, UNNOTICED, tie_of
from subquad.tools.runs.floor import Floor


def distinguished(
    methods: Sequence[MethodReport], lengths: Sequence[int], floor: Floor, without: Mapping[int, float]
) -> tuple[list[MethodReport], dict[int, str]]:
    """The rows without fidelities that prove nothing, and for each length with such ones why, in a clause.

    There are two cases, and exact attention is in neither of them. If two or more approximations were measured at a
    length and all of them have the fidelity of exact attention in the four decimals that are printed, then crude
    methods have it too. And if the loss of the model `without` attention, whose fidelities these are by length, is
    at most 0.1, then the loss of an approximation must be at most a tenth of that.
    """
    rows, blind = list(methods), dict[int, str]()
    for length in lengths:
        at = str(length)
        exact = next((m.fidelity_at(at) for m in rows if m.status == "exact" and at in (m.fidelity or {})), 1.0)
        losses = {m.method: exact - m.fidelity_at(at) for m in rows if _is_approximation(m, length, floor)}
        bottom = without.get(length)
        scale = "" if bottom is None else f" (without attention: {bottom:.4f})"
        if len(losses) > 1 and max(losses.values()) < UNNOTICED:
            unproven = list(losses)
            why = f"{tie_of(len(losses))}, {exact:.4f}{scale}"
        elif bottom is not None and exact - bottom <= NARROW:
            unproven = [name for name, loss in losses.items() if PROVES * loss > max(exact - bottom, 0.0)]
            faithful = [m.method for m in rows if m.method in unproven and is_faithful(m, at, floor)]
            why = _within_ten_times(faithful, bottom) if faithful else ""
        else:
            continue
        rows = [_without_fidelity(m, at) if m.method in unproven else m for m in rows]
        if why:
            blind[length] = why
    return rows, blind


def _within_ten_times(names: Sequence[str], bottom: float) -> str:
    shown = listed(names[:3]) if len(names) <= 3 else f"{len(names)} approximations"
    verb = "lose" if len(names) > 1 else "loses"
    return f"the fidelity without any attention is still {bottom:.4f}, and {shown} {verb} more than a tenth as much"


def _is_approximation(method: MethodReport, length: int, floor: Floor) -> bool:
    """True if a row was measured at a length and is not exact there, by its name or by its settings."""
    if method.status != "measured" or str(length) not in (method.fidelity or {}) or is_exact_kernel(method):
        return False
    is_reference = from_dict(method.settings).traits.quadratic_baseline
    return not is_reference and not is_exact_by_settings(method, length, floor)


def _without_fidelity(method: MethodReport, at: str) -> MethodReport:
    return replace(method, fidelity={n: value for n, value in (method.fidelity or {}).items() if n != at})
