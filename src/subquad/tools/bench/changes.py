"""Changes since an earlier run of `subquad bench`, beyond the noise."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from subquad.methods.full import EXACT
from subquad.tools.bench.schema import BenchCell, BenchReport, Change, Changes
from subquad.tools.report.cells import known

TOLERANCE = 0.05
Key = tuple[str, str, str, int]


def changes(old: BenchReport, new: BenchReport, name: str) -> Changes:
    """Compare the cells that both runs measured, and list other differences; `name` is the earlier run's name.

    Speed-ups against SDPA are compared, rather than times: SDPA ran in turn with the method both times, so another
    load of the machine meets both sides. A method is faster when its speed-up grew by more than TOLERANCE, the quartile
    ranges of its ratios do not overlap, and every visit of the new run was faster than every visit of the old.
    """
    then, now = _measured(old), _measured(new)
    return Changes(
        old=name,
        created=old.created,
        tolerance=TOLERANCE,
        cells=[_change(then[key], now[key]) for key in now if key in then],
        only_old=[_named(key) for key in then if key not in now],
        only_new=[_named(key) for key in now if key not in then],
        notes=list(_differences(old, new)),
    )


def _measured(report: BenchReport) -> dict[Key, BenchCell]:
    return {
        (cell.method, cell.dtype, cell.passes, cell.length): cell for cell in report.cells if cell.status == "measured"
    }


def _named(key: Key) -> str:
    method, dtype, passes, length = key
    return f"{method}, {dtype}, {passes}, {length:,} tokens"


def _change(then: BenchCell, now: BenchCell) -> Change:
    speedups = [then.speedup, now.speedup]
    ratios = _ratio(now.speedup, then.speedup), _ratio(then.ms, now.ms), _ratio(now.extra_bytes, then.extra_bytes)
    return Change(now.method, now.dtype, now.passes, now.length, _verdict(then, now), speedups, *ratios)


def _ratio(above: Any, below: Any) -> float | None:
    top, bottom = known(above), known(below)
    return top / bottom if top is not None and bottom else None


def _verdict(
    then: BenchCell, now: BenchCell
) -> Literal["faster", "slower", "within the noise", "no speed-up to compare"]:
    if now.method == EXACT or not (then.speedup and now.speedup):
        return "no speed-up to compare"
    if _above(now, then):
        return "faster"
    return "slower" if _above(then, now) else "within the noise"


def _above(one: Any, other: Any) -> bool:
    """True if one speed-up is above the other by more than the tolerance, and their quartiles and visits lie apart."""
    apart = one.speedup_low > other.speedup_high
    if one.visits and other.visits:
        apart = apart and min(one.visits) > max(other.visits)
    return apart and one.speedup > other.speedup * (1 + TOLERANCE)


def _differences(old: BenchReport, new: BenchReport) -> Iterator[str]:
    """The other differences: machine, versions, settings that a time depends on, backend. Shapes are the same."""
    if old.backend != new.backend:
        yield f"backend: {old.backend} then, {new.backend} now"
    yield from _differing("hardware", old.hardware, new.hardware)
    yield from _differing("version of", old.versions, new.versions)
    shaping = ("device", "seed", "quick")
    then, now = ({name: report.settings.get(name) for name in shaping} for report in (old, new))
    yield from _differing("setting", then, now)


def _differing(what: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted(then.keys() | now.keys()):
        if then.get(name) != now.get(name):
            yield f"{what} {name}: {then.get(name, 'none')} then, {now.get(name, 'none')} now"
