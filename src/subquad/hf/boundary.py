"""The two functions that transformers calls: one makes the mask of a forward pass, one runs a layer's attention.

Both are registered under one name. The mask function hands on at most (B,M) numbers, never N×M:

    None                      nothing is masked
    bool (B,M)                True = a real token
    int  (B,M), M = N         packed: the segment of each token, 0 = padding
    int  (B,M), M ≠ N         a static cache: 1 = real, 0 = padding, −1 = a slot not filled yet

Causality comes from the layer (`module.is_causal`), windows from its config, segments from the mask function that
transformers builds out of `position_ids`.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from subquad.hf.layers import NAME, Attached
from subquad.hf.state_cache import state_layer_of
from subquad.masks import Mask

# Mask functions that transformers itself builds: causal, bidirectional, and windows, chunks or packed segments on top.
_UNDERSTOOD_MASKS = ("causal_mask_function", "bidirectional_mask_function", "and_masks.<locals>.and_mask")

# Keywords that reach an attention function and change nothing about its result. Any other must be None or False.
_HARMLESS = {
    "cache_position",
    "deterministic",
    "logits_to_keep",
    "num_items_in_batch",
    "output_hidden_states",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "sliding_window",  # read from the config
    "use_cache",
}


def register() -> None:
    """Tell transformers about both functions."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, make_mask)


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | None = None,
    **_: Any,
) -> Tensor | None:
    """What of the keys may be seen, as the module's docstring says. Called once for each kind of layer and pass."""
    pattern = _pattern_name(mask_function, use_vmap)
    both_ways = pattern == "bidirectional_mask_function"  # also cross-attention, whose keys are no cache to be filled
    if not both_ways and attention_mask is not None and isinstance(q_offset, int):
        _check_covers(attention_mask, q_offset, q_length)
    real = _real_keys(attention_mask, kv_length, kv_offset)
    if not both_ways and (isinstance(q_offset, Tensor) or kv_length != q_offset + q_length - kv_offset):
        filled = torch.arange(kv_length, device=device) < q_offset + q_length - kv_offset
        real = torch.ones(1, kv_length, dtype=torch.bool, device=device) if real is None else real
        return torch.where(filled, real.int(), -1).expand(batch_size, kv_length)
    if pattern == "and_masks.<locals>.and_mask" and q_length == kv_length and q_length > 1:
        segments = _segments(mask_function, batch_size, q_length, device)
        if torch.compiler.is_compiling() or bool((segments != 1).any()):
            return segments if real is None else segments * real
    if real is None or (not torch.compiler.is_compiling() and bool(real.all())):
        return None
    return real


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Run the method that is attached to this layer. (B,H,N,D) in, (B,N,H,E) out, no attention weights."""
    layer = getattr(module, NAME, None)
    if not isinstance(layer, Attached):
        raise ValueError(
            f"{type(module).__name__} is set to attn_implementation={NAME!r} but no method is attached to it: "
            "call sq.hf.swap(model, method), or sq.hf.reattach(model) after loading a saved model"
        )
    if kwargs.get("output_attentions"):
        raise ValueError("output_attentions=True asks for attention weights, which no method here returns")
    for name, given in kwargs.items():
        if name not in _HARMLESS and given is not None and given is not False:
            raise ValueError(f"layer {layer.label} passes {name!r} to its attention, which subquad does not know; "
                             f"it is refused because ignoring it could change the result")  # fmt: skip
    causal = layer.causal if is_causal is None else is_causal
    window = kwargs.get("sliding_window")
    state = state_layer_of(key)
    if state is not None:
        with state.keeping_errors():
            if not causal or layer.windowed or window is not None or position_bias is not None or dropout:
                raise ValueError(
                    f"layer {layer.label} cannot run on a StateCache: that is for causal attention without a window, a "
                    "position bias or dropout"
                )
            mask = _mask_of_new(layer, query.shape[2], state.seen, attention_mask)
            return state.attend(layer.bound, query, key, value, mask, scaling).transpose(1, 2).contiguous(), None
    mask = _mask_of(layer, query, key, attention_mask, causal)
    if layer.windowed and window is None:
        raise ValueError(f"layer {layer.label} has a window by its config but does not tell its attention; refused")
    if window is not None:
        mask = mask & Mask.window(layer.window_width(window, causal))
    out = layer(query, key, value, mask=mask, bias=position_bias, scale=scaling, dropout_p=dropout)
    return out.transpose(1, 2).contiguous(), None


# ---------------------------------------------------------------------- what the mask function is given


def _pattern_name(mask_function: Callable[..., Any] | None, use_vmap: bool) -> str:
    """Which of the understood mask functions this is; ValueError for any other."""
    if mask_function is None:
        return "bidirectional_mask_function"
    name = mask_function.__code__.co_qualname
    if use_vmap or name not in _UNDERSTOOD_MASKS:
        what = "overlays a pattern of its own on the attention mask" if use_vmap else f"masks attention by {name!r}"
        raise ValueError(f"this model {what}, which subquad does not know; restore its own attention for such inputs")
    return name


def _check_covers(attention_mask: Tensor, before: int, new: int) -> None:
    if attention_mask.shape[1] < before + new:
        raise ValueError(
            f"the attention mask has {attention_mask.shape[1]} positions, but the cache has seen {before} tokens and "
            f"{new} are new: give tokens and mask of all, or a new cache for another prompt"
        )


def _real_keys(attention_mask: Tensor | None, kv_length: int, kv_offset: int | Tensor) -> Tensor | None:
    """The 2-D mask of the user at the cache's keys, as bool (B, kv_length)."""
    if attention_mask is None:
        return None
    if isinstance(kv_offset, Tensor):
        index = (torch.arange(kv_length, device=attention_mask.device) + kv_offset).clamp(
            max=attention_mask.shape[1] - 1
        )
        return attention_mask[:, index].bool()
    real = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
    return F.pad(real, (0, kv_length - real.shape[1]))


def _segments(mask_function: Any, batch: int, length: int, device: torch.device | None) -> Tensor:
    """Number the segments 1, 2, …: a token that may not see the one before it starts a new one.

    Windows of two or more tokens see their neighbour, so only packed segments and chunks come out.
    """
    item = torch.arange(batch, device=device)[:, None]
    position = torch.arange(1, length, device=device)
    sees_previous = mask_function(item, 0, position, position - 1)
    sees_previous = torch.as_tensor(sees_previous, device=device).expand(batch, length - 1)
    return F.pad((~sees_previous).int().cumsum(1), (1, 0)).int() + 1


# ---------------------------------------------------------------------- what a layer makes of it


def _mask_of(layer: Attached, query: Tensor, key: Tensor, given: Tensor | None, causal: bool) -> Mask:
    N, M = query.shape[2], key.shape[2]
    _check_given(layer, given, M)
    if layer.cross:
        return Mask() if given is None else Mask.padding(keys=given > 0)
    if N != M and not causal:
        raise ValueError(f"layer {layer.label} is labelled self-attention, but has {N} queries and {M} keys")
    offset: int | Tensor = M - N
    mask = Mask()
    if given is not None and given.dtype == torch.bool:
        mask = Mask.padding(given) if N == M else Mask.padding(keys=given, queries=given[:, -N:])
    elif given is not None and N == M:
        mask = Mask.segments(given - 1)
    elif given is not None:
        offset = (given[0] >= 0).sum() - N
        own = given.index_select(1, offset + torch.arange(N, device=given.device))
        mask = Mask.padding(keys=given > 0, queries=own > 0)
    # Also for a single query, which sees every filled slot: a causal form can be another than the plain one.
    return mask & (Mask.causal(offset=offset) if causal else Mask(offset=offset))


def _mask_of_new(layer: Attached, new: int, seen: int, given: Tensor | None) -> Mask | None:
    """The padding of the tokens that a state has not seen, which are the last of all."""
    _check_given(layer, given, seen)
    if given is not None and given.dtype != torch.bool:
        raise ValueError(f"layer {layer.label}: packed sequences have one state each; generate from a padded batch")
    return None if given is None else Mask.padding(given[:, -new:])


def _check_given(layer: Attached, given: Tensor | None, M: int) -> None:
    if given is not None and given.ndim != 2:
        raise ValueError(
            f"layer {layer.label} was given an attention mask of shape {tuple(given.shape)}; subquad takes 2-D padding "
            "masks (batch, tokens) only: prepared 4-D masks would need N×M memory"
        )
    if given is not None and given.shape[1] != M:
        raise ValueError(
            f"layer {layer.label}: the attention mask has {given.shape[1]} positions, but there are {M} keys"
        )
