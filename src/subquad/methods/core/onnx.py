"""What `torch.onnx.export` may convert: ONNX programs check no length, unlike those of `torch.export`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from subquad.kernels.transforms import in_onnx_export
from subquad.masks import Mask

if TYPE_CHECKING:
    from subquad.methods.core.method import Method


def refusal_in_onnx(method: Method, query: Tensor, key: Tensor, mask: Mask) -> str | None:
    """Why a call may not be converted to ONNX; None: it may, or nothing is converted.

    A traced program rests on conditions on its lengths, such as on which side of a block they are. `torch.export` keeps
    them as guards, which raise an error; ONNX drops them, and the program would be wrong without a word. So with a
    dynamic length, methods are refused unless their programs rest on none, which `Method.onnx` states.
    """
    if not in_onnx_export() or all(isinstance(x.shape[2], int) for x in (query, key)):
        return None
    halves = mask.is_causal and method.traits.by_halves
    if method.onnx and not halves:
        return None
    what = f"{method.name!r}{' under a causal mask' if halves else ''}"
    return (
        f"{what} is not converted to ONNX with a dynamic length, because the program would be right for some lengths "
        "only and ONNX cannot check which; export it with a fixed length, or by torch.export, whose programs check it"
    )
