"""A torch function mode that hands every call of `scaled_dot_product_attention` to a function.

torch's `multi_head_attention_forward`, which runs in `nn.MultiheadAttention`, arrives as one call and hides the call of
SDPA in it: so torch's own code of it is run here, around our function in SDPA's place. In eval mode torch's layers
would call fused kernels instead, which have no SDPA in them; not while a mode is active, except in compiled code.

Backward passes arrive as calls too, and a mode is not active in what it runs. Gradient checkpointing calls SDPA in
there, so torch's own code of them is run with the mode active again.
"""

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_BACKWARD = frozenset({Tensor.backward, torch.autograd.backward, torch.autograd.grad})


class SdpaCalls(TorchFunctionMode):
    """While entered, calls of SDPA in this thread go to `attend`, which has SDPA's arguments.

    Args:
        attend: called in place of SDPA; what it returns is the result.
        hidden: called with the reason where torch computes attention without SDPA, which it does after.
    """

    def __init__(self, attend: Callable[..., Tensor], hidden: Callable[[str], None]):
        super().__init__()
        self._attend, self._hidden = attend, hidden
        self._multi_head = _unasked(F.multi_head_attention_forward, scaled_dot_product_attention=attend)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`, or its replacement. The mode is not active meanwhile, except in backward passes."""
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            if kwargs.get("need_weights", True):
                self._hidden("need_weights=True asks for the attention weights, which no method here returns")
            return self._multi_head(*args, **kwargs)
        if func in _BACKWARD:
            with self:
                return _unasked(func)(*args, **kwargs)
        return func(*args, **kwargs)


def _unasked(function: Any, **meanings: Any) -> Callable[..., Any]:
    """torch's own code of a function, which does not ask whether a mode is active, with other meanings of names in it:
    torch's module itself stays as it is, for this thread and for others."""
    names = function.__globals__ | dict.fromkeys(("has_torch_function", "has_torch_function_unary"), _no) | meanings
    del names["__name__"]  # which would tell Dynamo to look the names up in torch's module
    body = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    body.__kwdefaults__ = function.__kwdefaults__
    return body


def _no(_: Any) -> bool:
    return False
