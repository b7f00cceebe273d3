"""Steps on a cache: a few queries, on the shortest way from transformers to the kernel of exact attention.

Their attention is exact, or exact over the keys that a method such as "local" chooses by position.

Each generated token passes through all layers with one query. On a short cache, the checks of a call and the making of
its mask take longer than the attention itself. So what is the same in all layers of a forward pass is made once, and
kept on the mask that they are all given: a function of query, key and value (`Method.prepare_exact`, or the method's
own `prepare_step`). What is the same in all passes is read when a method is attached (`Attached`). Cross-attention has
no mask, and its keys stay the same from step to step: its layers keep such a function each.

Anything that needs more, such as an audit, autocast or a gradient, goes the general way (`Attached.forward`).
"""

from threading import get_ident
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._C import _get_tracing_state

from subquad.hf.layer_masks import decoded, mask_of
from subquad.hf.layers import Attached
from subquad.kernels.dispatch import forced_backend
from subquad.kernels.transforms import transform
from subquad.masks import Mask
from subquad.methods import BoundMethod
from subquad.methods.core.call import Attention, Call
from subquad.methods.core.current_shard import in_use

_STEPS = "_subquad_steps"  # on a mask of `boundary.make_mask`: what its layers have prepared for it
# For cross-attention, which has no mask: what each layer prepared last, and what that depends on.
_UNMASKED: WeakKeyDictionary[Attached, tuple[Any, Attention | None]] = WeakKeyDictionary()


def share_steps(mask: Tensor) -> None:
    """Let the layers that are given this very mask share what they prepare for it."""
    setattr(mask, _STEPS, {})


def attend_step(
    layer: Attached,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
) -> Tensor | None:
    """The outputs (B,N,H,E) of a step; None if the call is not one, or goes the general way."""
    if torch.compiler.is_compiling():  # first: a comparison would be a condition of the graph
        return None
    if query.shape[2] > layer.prepared_queries or not _goes_short(layer, query, key, value):
        return None
    shapes = query.shape, key.shape, value.shape, query.dtype, key.dtype, value.dtype
    kind = layer.step_kind, shapes, causal, scale
    prepared = getattr(mask, _STEPS, None)
    if mask is None:
        attention = _unmasked(layer, query, key, value, causal, scale, kind)
    elif prepared is None:
        attention = _prepare(layer, query, key, value, mask, causal, scale)
    elif kind in prepared:
        attention = prepared[kind]
    else:
        attention = prepared[kind] = _prepare(layer, query, key, value, mask, causal, scale)
    return None if attention is None else attention(query, key, value).transpose(1, 2).contiguous()


def _unmasked(
    layer: Attached,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    scale: float | None,
    kind: tuple[Any, ...],
) -> Attention | None:
    """The attention of a step without a mask, prepared anew if anything that it depends on is not as it last was."""
    now = kind, forced_backend(), torch.get_num_threads(), get_ident()
    last, attention = _UNMASKED.get(layer, (None, None))
    if last != now:
        attention = _prepare(layer, query, key, value, None, causal, scale)
        _UNMASKED[layer] = now, attention
    return attention


def _goes_short(layer: Attached, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """True if nothing but the attention itself is wanted of a call; what may change between two layers of a pass."""
    bound: Any = layer._modules["bound"]
    if bound.watch is not None or layer.kept_now is not None or layer.split is not None or not query.is_cpu:
        return False
    for module, kind in ((layer, Attached), (bound, BoundMethod)):  # hooks, or as trials do, a `forward` of its own
        if type(module) is not kind or module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
            return False
    if torch.is_autocast_enabled("cpu") or _get_tracing_state() is not None:
        return False
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return False
    return transform() is None and in_use() is None


def _prepare(
    layer: Attached,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    encoded: Tensor | None,
    causal: bool,
    scale: float | None,
) -> Attention | None:
    """The attention of calls like this one; None if they do not fit, or the method computes otherwise."""
    (B, H, N, D), (_, G, M, _), bound = query.shape, key.shape, layer.bound
    fits = (bound.heads, bound.kv_heads, bound.head_dim) == (H, G, D) and key.shape == (B, G, M, D)
    if not (fits and value.shape[:3] == (B, G, M) and query.dtype == key.dtype == value.dtype):
        return None
    pattern = decoded(layer, encoded, query, M, causal)
    mask, _ = mask_of(layer, N, M, pattern)
    if not (mask.is_causal or layer.is_exact):  # a method prepares the last queries of causal calls
        return None
    mask = mask if pattern.valid is None else mask & Mask.padding(keys=pattern.valid.expand(B, M))
    call = Call(mask, bias=None, scale=D**-0.5 if scale is None else scale, dropout_p=0.0, seed=0)
    prepare: Any = layer.prepare_step
    return prepare(query, key, value, call)
