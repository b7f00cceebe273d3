"""Choose between speed and closeness: no loss is accepted for a speed that is within the noise, or within 5 %."""

from collections.abc import Callable, Sequence
from typing import TypeVar

Choice = TypeVar("Choice")

SIMILAR = 1.05  # a ratio of speeds up to which the closer one is taken
UNNOTICED = 5e-5  # a loss below this prints as a fidelity of 1.0000
NARROW = 0.1  # a loss without attention up to which that of a method proves little
PROVES = 10.0  # how many times as large it must be as the loss of a method then
EQUAL = 0.01  # share of the accepted loss: losses that differ by less are equal


def tie_of(count: int) -> str:
    """The clause that a number of approximations are not distinguished.

    >>> tie_of(2)
    'both approximations have the fidelity of exact attention'
    """
    return f"{'both' if count == 2 else f'all {count}'} approximations have the fidelity of exact attention"


def closest_of_fast(
    choices: Sequence[Choice],
    speedup: Callable[[Choice], float],
    loss: Callable[[Choice], float],
    accepted: float,
    noise: float = 1.0,
) -> Choice | None:
    """The closest of the choices that are about as fast as the fastest; None if there are no choices.

    Args:
        choices: the possible choices.
        speedup: the speed-up of a choice.
        loss: its loss; losses that differ by less than `EQUAL` of the accepted loss are equal, and the faster choice
            is taken.
        accepted: the loss that is accepted.
        noise: the factor by which the same call differs from itself.

    >>> speeds, losses = {"crude": 1.24, "exact": 1.21}, {"crude": 0.004, "exact": 0.0}
    >>> closest_of_fast(list(speeds), speeds.get, losses.get, accepted=0.01)
    'exact'
    """
    if not choices:
        return None
    least = max(map(speedup, choices)) / max(noise, SIMILAR)
    fast = [choice for choice in choices if speedup(choice) >= least]
    limit = min(map(loss, fast)) + EQUAL * accepted
    return max((choice for choice in fast if loss(choice) <= limit), key=speedup)
