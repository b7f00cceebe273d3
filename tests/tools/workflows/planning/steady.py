"""Times of planning that do not depend on the machine, so that the same figures give the same plan."""

from collections.abc import Callable
from typing import Any

from subquad.tools.plan import choice, measure
from subquad.tools.plan import length as planning

SPEED = {"full": 1.0, "local:window=12": 0.6, "local:window=2": 0.2, "clustered:clusters=8": 0.4}  # other methods: 0.5
PATCHED = [
    (measure, "call_times"),
    (measure, "stopwatch"),
    (planning, "held_out_pass"),
    (planning, "faster_at"),
    (choice, "FASTER"),
]


def make_steady(put: Callable[[Any, str, Any], None]) -> None:
    """Put times of layers by the method, and of passes always the same gain, in place of what is measured."""
    held_out_pass = measure.held_out_pass

    def faster(*args: Any, **options: Any) -> measure.HeldOutPass:
        found = held_out_pass(*args, **options)
        found.seconds |= {"full": 1.0} | {n: 0.5 for n in found.seconds if n != "full"}
        return found

    put(
        measure,
        "call_times",
        lambda at, methods, group, allowed: {"full": 1.0} | {n: SPEED.get(n, 0.5) for n in methods},
    )
    put(measure, "stopwatch", lambda call, device, group: (1.0, call()))
    put(planning, "held_out_pass", faster)
    put(
        planning,
        "faster_at",
        lambda at, methods, lengths, rounds, group: {n: [x >= 8 for x in lengths] for n in methods},
    )
    put(choice, "FASTER", 1.0)
