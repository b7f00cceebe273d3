"""Checks of whether the numbers of a tensor can be read, to size another tensor or to check them."""

import torch
from torch import Tensor
from torch._C import _functorch
from torch._subclasses.fake_tensor import FakeTensor


def can_be_read(tensor: Tensor) -> bool:
    """True if the numbers of a tensor exist: not while compiling, in a batch of `vmap`, on the meta device or if fake.

    Transforms of torch.func can be nested, as in `vmap(grad(f))`, so all their wrappers are looked into.
    """
    if torch.compiler.is_compiling() or tensor.device.type == "meta":
        return False
    while _functorch.is_functorch_wrapped_tensor(tensor):
        if _functorch.is_batchedtensor(tensor):
            return False
        tensor = _functorch.get_unwrapped(tensor)
    return not isinstance(tensor, FakeTensor)


def has_left_vmap(tensor: Tensor) -> bool:
    """True if a tensor is in a batch of `vmap`, but no transform runs any more."""
    if torch.compiler.is_compiling() or _functorch.maybe_current_level() is not None:
        return False
    return _functorch.is_functorch_wrapped_tensor(tensor) and not can_be_read(tensor)


def check_readable(tensor: Tensor, title: str, remedy: str) -> None:
    """Raise ValueError if numbers cannot be read that a size or a check follows; compilers trace without them."""
    if not torch.compiler.is_compiling() and not can_be_read(tensor):
        raise ValueError(
            f"{title} must be read, but their numbers are not available here (in a batch of torch.func.vmap, on the "
            f"meta device or under FakeTensorMode); {remedy}"
        )
