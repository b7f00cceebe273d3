"""Functions around the `forward` of models' classes."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

Forward = Callable[..., Any]


def wrap_forward(cls: Any, mark: str, wrapper: Callable[[Forward], Forward]) -> None:
    """Put a function around the `forward` of a class, once: it has an attribute `mark` afterwards."""
    forward = cls.forward
    if not hasattr(forward, mark):
        cls.forward = functools.wraps(forward)(wrapper(forward))
        setattr(cls.forward, mark, True)


@functools.cache
def positional_names(forward: Forward) -> tuple[str, ...]:
    """The names of the arguments of a `forward`, in their order, without `self`."""
    return tuple(inspect.signature(forward).parameters)[1:]
