"""Steps on a cache: a few queries whose attention is exact, on the shortest way from transformers to the kernel.

Each generated token passes through all layers with one query. On a short cache, the checks of a call and the making of
its mask take longer than the attention itself. So what is the same in all layers of a forward pass is made once, and
kept on the mask that they are all given; what is the same in all passes is read when a method is attached.

Anything that needs more, such as an audit, autocast or a gradient, goes the general way (`Attached`).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import _get_tracing_state

from subquad.hf.layers import Attached
from subquad.kernels.transforms import transform
from subquad.methods import BoundMethod
from subquad.methods.core.call import Call
from subquad.methods.core.current_shard import in_use

QUERIES = 32  # of a step, at most
_CALLS = "_subquad_calls"  # on a mask of `boundary.make_mask`: the calls that its layers have made of it


def share_calls(mask: Tensor) -> None:
    """Let the layers that are given this very mask share the calls that they make of it."""
    setattr(mask, _CALLS, {})


def shared_call(mask: Tensor | None, key: tuple[Any, ...], make: Callable[[], Call]) -> Call:
    """The call of the layers for which `key` is equal; made if none of them has run with this mask."""
    calls = getattr(mask, _CALLS, None)
    if calls is None:
        return make()
    if key not in calls:
        calls[key] = make()
    return calls[key]


def is_step(layer: Attached, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether a call of a layer has a few queries and its method may compute it by `attend_exactly`.

    The method decides for how many queries of a causal call that is the same (`Method.exact_queries`).
    """
    if torch.compiler.is_compiling():  # first: a comparison would be a condition of the graph
        return False
    (B, H, N, D), (_, G, M, _) = query.shape, key.shape
    if layer.exact_queries < N or N > QUERIES:
        return False
    bound = layer.bound
    fits = (bound.heads, bound.kv_heads, bound.head_dim) == (H, G, D) and key.shape == (B, G, M, D)
    fits = fits and value.shape[:3] == (B, G, M) and query.dtype == key.dtype == value.dtype
    plain = bound.watch is None and layer.kept_now is None and layer.split is None and not _is_observed(layer)
    if not (fits and plain) or query.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return False
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return False
    return in_use() is None and transform() is None and _get_tracing_state() is None


def _is_observed(layer: Attached) -> bool:
    """Whether somebody sees each call of the layer: by a hook, or as trials do, by a `forward` of their own."""
    for module, kind in ((layer, Attached), (layer.bound, BoundMethod)):
        if module._forward_hooks or module._forward_pre_hooks or type(module) is not kind or "forward" in vars(module):
            return True
    return False
