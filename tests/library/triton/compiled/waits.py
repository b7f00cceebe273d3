"""Find what would make a program wait for a GPU, on the meta device, where tensors have no numbers.

Most of it raises there by itself: a number that is read, a shape that follows data. A copy from the CPU does not, nor
does a check of a decomposition, and an operator of ours shows only its shapes.
"""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MAKERS = (torch.tensor, torch.as_tensor, Tensor.new_tensor)
INDEXED = (Tensor.__getitem__, Tensor.__setitem__)
READS = ("subquad.masks.mask", "subquad.methods.by_length")  # modules that read numbers where they are there


def waits(call: Callable[[], object]) -> list[str]:
    """Run a call on meta tensors; what would wait for a GPU, beside what raises."""
    with _Functions() as functions, _Operators() as operators:
        patches = [patch(f"{module}.can_be_read", lambda _: True) for module in READS]
        for each in patches:
            each.start()
        try:
            call()
        finally:
            for each in patches:
                each.stop()
    return functions.found + operators.found


def _tensors(*of: object) -> list[Tensor]:
    return [x for x in tree_leaves(of) if isinstance(x, Tensor)]


class _Functions(TorchFunctionMode):
    """Tensors made from Python's numbers, and lists as indices: both are copied from the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in MAKERS and out.device.type == "meta" and not _tensors(args[-1:]):
            self.found.append(f"{func.__name__} of Python's numbers")
        if func in INDEXED and args[0].device.type == "meta":
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(x, list) or (isinstance(x, Tensor) and x.device.type == "cpu") for x in index):
                self.found.append("an index from the CPU")
        return out


class _Operators(TorchDispatchMode):
    """Copies from the CPU that wait, checks of decompositions, and redraws, which read their number."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out, name = func(*args, **kwargs), func.name()
        given, made = _tensors(args, kwargs), _tensors(out)
        copies = name.startswith(("aten::_to_copy", "aten::copy_")) and not kwargs.get("non_blocking")
        if copies and any(x.device.type == "cpu" for x in given) and any(x.device.type == "meta" for x in made):
            self.found.append(f"{name} from the CPU")
        if name == "aten::_linalg_check_errors":
            self.found.append(name)
        if name == "subquad::directions" and given[0].device.type == "meta":
            self.found.append("the number of redraws is read")
        return out
