"""Conversion by `torch.onnx.export` and `torch.jit.trace`: their programs check no length, unlike torch.export's."""

from typing import Any, Literal

import torch
from torch import Tensor

from subquad.core.spelling import listed
from subquad.masks import Mask

OnnxSupport = Literal["no", "without causal masks", "always"]


def refusal_in_onnx(method: Any, query: Tensor, key: Tensor, mask: Mask) -> str | None:
    """The reason why a call may not be converted to ONNX; None: it may, or nothing is converted.

    A traced program rests on conditions on its lengths, such as on which side of a block they are. `torch.export` keeps
    them as guards, which raise an error; ONNX drops them, and the program would be wrong without a word. So with a
    dynamic length, methods are refused unless their programs rest on none, which `Method.onnx` states.
    """
    if not torch.compiler.is_exporting() or not _is_converted():
        return None
    # Dynamo, which the exporter tries next after an error, shows no symbolic lengths.
    if not torch.compiler.is_dynamo_compiling() and all(isinstance(x.shape[2], int) for x in (query, key)):
        return None
    if method.onnx == "no" or (method.onnx != "always" and mask.is_causal):
        return (
            f"{method.name!r}{'' if method.onnx == 'no' else ' under a causal mask'} is not converted to ONNX with a "
            "dynamic length, because the program would be right for some lengths only and ONNX cannot check which; "
            "export it with a fixed length, or by torch.export, whose programs check it"
        )
    following = [name for name in method.following_length if getattr(method, name) == 0]
    if following:
        return (
            f"{method.name!r} with {following[0]}=0 is not converted to ONNX with a dynamic length, which that setting "
            f"follows by a square root that the exporter does not know; give {listed(following)}, or export it with a "
            "fixed length"
        )
    return None


def refuse_jit_trace(method: Any) -> None:
    """Raise ValueError if `torch.jit.trace` runs an approximate method, because its programs keep no guards either."""
    if not torch.compiler.is_compiling() and torch.jit.is_tracing() and not method.is_exact:  # type: ignore[attr-defined]
        raise ValueError(
            f"{method.label!r} is not traced by torch.jit.trace, because the program would be right for some lengths "
            "only and could not check which; use torch.export.export, or torch.onnx.export with dynamo=True"
        )


def _is_converted() -> bool:
    """True if `torch.onnx.export` runs, which Dynamo asks once, while it traces."""
    return torch.onnx.is_in_onnx_export()


_is_converted._dynamo_marked_constant = True  # type: ignore[attr-defined]  # `torch.compiler`'s decorator imports Dynamo
