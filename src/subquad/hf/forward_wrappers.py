"""Functions around the `forward` of models' classes.

Torch's forward hooks would not run in a SentenceTransformer, which calls `forward` itself.
"""

import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any, ClassVar

from torch import nn

Forward = Callable[..., Any]


def wrap_forward(cls: Any, mark: str, wrapper: Callable[[Forward], Forward]) -> None:
    """Put a function around the `forward` of a class, once: it has an attribute `mark` afterwards."""
    forward = cls.forward
    if not hasattr(forward, mark):
        cls.forward = functools.wraps(forward)(wrapper(forward))
        setattr(cls.forward, mark, True)


class ForwardMark:
    """A value on a model that changes the `forward` of its class, also in a process where a copy is unpickled."""

    on_forward: ClassVar[str]  # an attribute of `forward` after it was wrapped
    wrapper: ClassVar[Any]  # a static method, for `wrap_forward`

    def __init__(self, cls: Any, value: Any = None):
        self.cls, self.value = cls, value
        wrap_forward(cls, self.on_forward, type(self).wrapper)

    def put(self, model: nn.Module, name: str) -> None:
        """Store the mark on a model."""
        vars(model)[name] = self
        before = vars(model).get("_old_forward")  # accelerate's: what the `forward` calls that it put on the model
        if isinstance(before, MethodType) and _is_inside(before.__func__, self.cls.forward):
            vars(model)["_old_forward"] = MethodType(self.cls.forward, model)

    def __reduce__(self) -> Any:
        return type(self), (self.cls, self.value)


def _is_inside(function: Any, wrapper: Any) -> bool:
    """True if a wrapper calls this function, or is it."""
    return function is wrapper or (hasattr(wrapper, "__wrapped__") and _is_inside(function, wrapper.__wrapped__))


@functools.cache
def positional_names(forward: Forward) -> tuple[str, ...]:
    """The names of the arguments of a `forward`, in their order, without `self`."""
    return tuple(inspect.signature(forward).parameters)[1:]
