"""Transforms that fused kernels do not support: forward-mode AD, and those of torch.func."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from subquad.core.readable import can_be_read


def transform() -> str | None:
    """The transform that is active, in words; None if there is none."""
    if forward_ad._current_level >= 0:
        return "inside forward-mode AD, whose tangents custom ops would drop"
    if torch._C._are_functorch_transforms_active():
        return "inside a transform of torch.func, which custom ops do not take part in"
    return None


def in_onnx_export() -> bool:
    """Whether `torch.onnx.export` traces this; Dynamo, which must not see the question, traces for other programs."""
    exporting = torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
    return exporting and torch.onnx.is_in_onnx_export()


def check_can_change(buffer: Tensor, title: str) -> None:
    """Raise ValueError inside a transform of torch.func that cannot change this buffer, because it does not pass it.

    Args:
        buffer: a buffer that training changes in place.
        title: what changes, for the message: "the centroids of 'routing'".
    """
    if torch.compiler.is_compiling():
        return
    level = torch._C._functorch.maybe_current_level()
    if level is not None and torch._C._functorch.maybe_get_level(buffer) != level:
        raise ValueError(
            f"{title} changes in place in training, but a transform of torch.func (grad, jvp, vmap) allows no change "
            "of what it does not pass; call .eval() on the layer, or differentiate with torch.autograd.grad"
        )


def shapes_may_follow_data(*tensors: Tensor) -> bool:
    """Whether numbers can be read from tensors to size others, without waiting for a device: only on a CPU."""
    return all(x.device.type == "cpu" and can_be_read(x) for x in tensors)


def exact_attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """SDPA; inside a transform by its plain kernel, because the fused ones have no forward-mode AD."""
    if torch.compiler.is_compiling():
        # `sq.intercept` leaves our own calls alone, and has no stack here to see that this is one.
        with torch._C.DisableTorchFunction():
            return F.scaled_dot_product_attention(query, key, value, **options)
    if transform() is None:
        return F.scaled_dot_product_attention(query, key, value, **options)
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(query, key, value, **options)
