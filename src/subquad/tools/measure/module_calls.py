"""Calls of a module with the inputs that the user gives."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from subquad.core.errors import InputError


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module.

    Attributes:
        number: the number of the input, from 0.
        value: the input as the user gave it.
        args: positional arguments.
        kwargs: keyword arguments.
    """

    number: int
    value: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @torch.no_grad()
    def run(self, module: nn.Module) -> Any:
        """The module's output. Containers are copied first, because some modules write into those they get."""
        args, kwargs = pytree.tree_map(lambda leaf: leaf, (self.args, self.kwargs))
        return module(*args, **kwargs)

    @property
    def shapes(self) -> tuple[Any, ...]:
        """The shapes of the tensors in it, of nested ones by part: calls with equal ones have as many tokens."""
        leaves = [leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]
        parts = (leaf.unbind() if leaf.is_nested else (leaf,) for leaf in leaves)
        return tuple(tuple(str(tuple(part.shape)) for part in each) for each in parts)


def as_calls(inputs: Iterable[Any]) -> list[ModuleCall]:
    """The calls that inputs represent.

    Raises:
        TypeError: `inputs` is a single input, or one of them is neither a tensor, nor a tuple, nor a mapping.
        InputError: there are none.
    """
    if isinstance(inputs, str | Mapping | Tensor) or not isinstance(inputs, Iterable):
        raise TypeError(f"inputs are a sequence of inputs, got one {type(inputs).__name__}; write [input]")
    calls = [ModuleCall(number, value, *_arguments(number, value)) for number, value in enumerate(inputs)]
    if not calls:
        raise InputError("there are no inputs; give at least one that the module can be called with")
    return calls


def _arguments(number: int, value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(value, Tensor):
        return (value,), {}
    if isinstance(value, Mapping):
        return (), dict(value)
    if isinstance(value, tuple):
        return value, {}
    raise TypeError(
        f"input {number} is a {type(value).__name__}, but an input is a tensor, a tuple of positional arguments or a "
        "mapping of keyword arguments"
    )


def run_exactly(call: ModuleCall, module: nn.Module, name: str | None = None) -> Any:
    """The module's output with its own attention. InputError with the module's message where it does not take it.

    `name` is what the message calls the module, by default its class.
    """
    try:
        return call.run(module)
    except Exception as error:
        message = " ".join(str(error).split())
        raise InputError(
            f"{name or type(module).__name__} does not take input {call.number}: {type(error).__name__}: {message}"
        ) from error


def spread_order(calls: list[ModuleCall]) -> list[ModuleCall]:
    """The calls in an order whose first few are spread over all of them."""
    return sorted(calls, key=lambda call: call.number * 0.6180339887 % 1.0)  # the golden ratio's fractional part


def device_of(module: nn.Module) -> torch.device:
    """The device of the module's first parameter or buffer; the CPU if it has none."""
    return next((tensor.device for tensor in [*module.parameters(), *module.buffers()]), torch.device("cpu"))


def holds_transformers_model(module: Any) -> bool:
    """True if a transformers model is in a module. transformers is not imported for this: it is if there is one."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(module).__name__}")
    if sys.modules.get("transformers") is None:
        return False
    from transformers import PreTrainedModel

    return any(isinstance(part, PreTrainedModel) for part in module.modules())
