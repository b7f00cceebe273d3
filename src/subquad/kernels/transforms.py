"""Transforms that fused kernels do not support: forward-mode AD, and those of torch.func."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from subquad.core.readable import can_be_read

ALIGNED = 16  # bytes


def transform() -> str | None:
    """The transform that is active, in words; None if there is none."""
    if forward_ad._current_level >= 0:
        return "inside forward-mode AD, whose tangents custom ops would drop"
    if torch._C._are_functorch_transforms_active():
        return "inside a transform of torch.func, which custom ops do not take part in"
    return None


def in_onnx_export() -> bool:
    """True if `torch.onnx.export` traces this; Dynamo, which must not see the question, traces for other programs."""
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
    """True if numbers can be read from tensors to size others, without waiting for a device: only on a CPU."""
    return all(x.device.type == "cpu" and can_be_read(x) for x in tensors)


def overlaps(x: Tensor) -> bool:
    """True if entries of a tensor share memory, by its strides, as windows of `as_strided` or expanded axes do.

    SDPA gives its output the strides of the queries, so that outputs of such queries overwrite each other.
    """
    reach = 0  # from the first entry to the last one, along the axes of smaller strides
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def exact_attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """SDPA; inside a transform by its plain kernel, because the fused ones have no forward-mode AD."""
    query, key, value = (aligned(x) if x.is_cuda else x for x in (query, key, value))
    if torch.compiler.is_compiling():
        # `sq.intercept` leaves our own calls alone, and has no stack here to see that this is one.
        with torch._C.DisableTorchFunction():
            return F.scaled_dot_product_attention(query, key, value, **options)
    if transform() is None:
        query = query.contiguous() if overlaps(query) else query
        return F.scaled_dot_product_attention(query, key, value, **options)
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(query, key, value, **options)


def aligned(x: Tensor) -> Tensor:
    """The tensor, copied if it is a slice whose rows begin between multiples of 16 bytes although its width is one.

    torch's kernels for GPUs choose their loads by the width alone, and end the process at a misaligned address.
    """
    size = x.element_size()
    begins = [*x.stride()[:-1]]
    if not torch.compiler.is_compiling():  # which cannot trace the question where a slice begins
        begins.append(int(x.storage_offset()))
    if x.shape[-1] * size % ALIGNED or all(step * size % ALIGNED == 0 for step in begins):
        return x
    return x.clone(memory_format=torch.contiguous_format)
