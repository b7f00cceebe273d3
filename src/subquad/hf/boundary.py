"""The two functions that transformers calls: one makes the mask of a forward pass, one runs a layer's attention.

Both are registered under one name. The mask function passes on what `mask_encoding.encode` makes, at most (B,M)
numbers. Who may attend to whom is decided by the model's own mask function: causality travels with the mask, and
windows, which do not change between calls, were read from the mask function when the method was swapped in (`probe`).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from subquad.core.readable import can_be_read
from subquad.hf.accelerate_splits import refuse_accelerate_splits
from subquad.hf.attention_names import SAVED_AS, names_method
from subquad.hf.call_checks import NO_WEIGHTS
from subquad.hf.caps_and_sinks import attend_with_weights
from subquad.hf.layer_masks import decoded, mask_of, mask_of_new
from subquad.hf.layers import ATTACHED, NAME, STATE_MARK, Attached
from subquad.hf.mask_encoding import encode, filled_slots, of_filled
from subquad.hf.passes import MARK, NOW
from subquad.hf.patterns import CAUSAL, EVERYTHING, LayerPattern, read_pattern
from subquad.hf.steps import attend_step, share_steps
from subquad.masks import Mask
from subquad.methods.core.current_shard import in_use, refuse_in_use

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
    "shift_labels",
    "sliding_window",  # the mask function decides it
    "use_cache",
}


def register_boundary(*names: str) -> None:
    """Tell transformers about both functions, under the names that swaps write and under these."""
    for name in (ATTACHED, SAVED_AS, *names):
        AttentionInterface.register(name, attend)
        AttentionMaskInterface.register(name, make_mask)


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    device: torch.device | None = None,
    **options: Any,
) -> Tensor | None:
    """The mask of one kind of layer in one forward pass, as `encoded` describes it. Called by transformers."""
    refuse_accelerate_splits()
    causal = _pattern(mask_function, options).causal
    if attention_mask is not None:
        if attention_mask.ndim != 2:
            raise ValueError(f"the attention mask is {tuple(attention_mask.shape)}; subquad accepts (batch, tokens)")
        if attention_mask.shape[0] not in (1, batch_size):
            raise ValueError(f"the attention mask has {attention_mask.shape[0]} items, but the batch has {batch_size}")
        if causal and isinstance(q_offset, int) and attention_mask.shape[1] < q_offset + q_length:
            raise ValueError(
                f"the attention mask has {attention_mask.shape[1]} positions, but the cache has seen {q_offset} tokens "
                f"and {q_length} are new: give tokens and mask of all, or a new cache for another prompt"
            )
    valid, filled, segments = _valid_keys(attention_mask, kv_length, kv_offset), None, None
    if causal and (isinstance(q_offset, Tensor) or kv_length != q_offset + q_length - kv_offset):
        filled = torch.arange(kv_length, device=device) < q_offset + q_length - kv_offset
    elif attention_mask is None and q_length == kv_length > 1 and (causal or not torch.compiler.is_compiling()):
        # Else there is no packing; packed bidirectional masks cannot be read while compiling (`_pattern` refuses them).
        segments = _segments(mask_function, batch_size, q_length, device)
    now = NOW.value
    if now is not None and segments is not None:
        raise ValueError("packed sequences are not supported with `parallel`; pad them, one in each item")
    look = not torch.compiler.is_compiling() and in_use() is None  # ranks must agree, whichever of them have padding
    if now is not None:  # all ranks agree whether there is padding
        valid = valid if now.padded else None
    elif filled is None and valid is not None and look and can_be_read(valid) and bool(valid.all()):
        valid = None
    if now is None and valid is None and is_plain(q_length, kv_length, mask_function, **options):
        if options.get("allow_is_bidirectional_skip"):
            return None
        valid = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
    encoded = encode(causal=causal, valid=valid, filled=filled, segments=segments, batch=batch_size, device=device)
    encoded = encoded.to(device) if device is not None else encoded
    if now is not None:
        setattr(encoded, MARK, now.sequence)
    elif not torch.compiler.is_compiling():
        share_steps(encoded)
    return encoded


def is_plain(q_length: int, kv_length: int, mask_function: Callable[..., Any] | None = None, **options: Any) -> bool:
    """True if the mask is the one that transformers makes for SDPA, so that a model's own code may compute with it.

    It is where one query may see all keys but the padded ones, as a pooler's probe: (B,1,1,M) is then all of the mask.
    """
    return q_length == 1 < kv_length and _pattern(mask_function, options) == EVERYTHING


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
    hidden: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Run the method that is attached to this layer. (B,H,N,D) in, (B,N,H,E) out, no attention weights.

    `hidden` is the layer's input, from models made by subquad; `s_aux` is another name of `sinks`. Cross-attention that
    makes word timestamps returns its weights (`word_timestamps`).
    """
    layer = getattr(module, NAME, None)
    if not isinstance(layer, Attached):
        raise ValueError(_nothing_attached(module))
    if kwargs.pop("output_attentions", None) and not layer.for_timestamps:
        raise ValueError(f"output_attentions=True {NO_WEIGHTS}")
    sinks = sinks if s_aux is None else s_aux
    for name, extra in kwargs.items():
        if name not in _HARMLESS and extra is not None and extra is not False:
            raise ValueError(f"layer {layer.label} passes {name!r} to its attention, which subquad does not support; "
                             f"it is refused because ignoring it could change the result")  # fmt: skip
    causal = layer.causal if is_causal is None else is_causal
    state = getattr(key, STATE_MARK, None)
    plain = position_bias is None and not dropout and softcap is None and sinks is None and not layer.for_timestamps
    if plain and state is None and (causal or layer.is_exact):
        step = attend_step(layer, query, key, value, attention_mask, causal, scaling)
        if step is not None:
            return step, None
    sequence = _sequence(layer, module, attention_mask, dropout)
    if state is not None:
        extra_terms = position_bias is not None or bool(dropout)
        return _advance(state, layer, query, key, value, attention_mask, causal, scaling, extra_terms), None
    filled = filled_slots(attention_mask)
    if filled is not None and attention_mask is not None:
        key, value, attention_mask = key[:, :, :filled], value[:, :, :filled], of_filled(attention_mask, filled)
        position_bias = None if position_bias is None else position_bias[..., :filled]
    encoded = decoded(layer, attention_mask, query, key.shape[2], causal)
    if sequence is not None and encoded.read:
        raise ValueError(
            f"layer {layer.label} was given a mask over queries and keys of shape {tuple(attention_mask.shape)}, which "  # type: ignore[union-attr]
            "is not supported with `parallel`; pass 2-D padding masks (batch, tokens), or swap without `parallel`"
        )
    mask, query_valid = mask_of(layer, query.shape[2], key.shape[2], encoded)
    if layer.for_timestamps and layer.cross:
        visible = mask if encoded.valid is None else mask & Mask.padding(keys=encoded.valid)
        out, weights = attend_with_weights(query, key, value, visible, scale=scaling, dropout_p=dropout)
        return out.transpose(1, 2).contiguous(), weights
    extras = {"bias": position_bias, "softcap": softcap, "sinks": sinks, "hidden": hidden, "parallel": sequence}
    out = layer(
        query,
        key,
        value,
        mask=mask,
        valid=encoded.valid,
        query_valid=query_valid,
        scale=scaling,
        dropout_p=dropout,
        **extras,
    )
    return out.transpose(1, 2).contiguous(), None


def _nothing_attached(module: nn.Module) -> str:
    """The error of a layer that asks for our attention and has no method."""
    name = getattr(getattr(module, "config", None), "_attn_implementation", ATTACHED)
    shown = name.partition(";")[0] if name == SAVED_AS else name  # the rest is the remedy of another process
    beginning = f"{type(module).__name__} is set to attn_implementation={shown!r} but no method is attached to it: "
    if names_method(name):
        return (
            f"{beginning}a transformers model attaches it in its forward pass if the name was given when it was "
            "loaded or made, or by model.set_attn_implementation, to a model or to a part that is a model itself; "
            "for single layers use sq.hf.swap(model, {layer: method})"
        )
    return (
        f"{beginning}call sq.hf.swap(model, method), or sq.hf.reattach(model) after loading a saved model, or "
        "sq.hf.load_adapter(model, folder) where its methods have learned parameters"
    )


def _advance(
    state: Any,
    layer: Attached,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    causal: bool,
    scaling: float | None,
    extra_terms: bool,
) -> Tensor:
    """The outputs of new tokens, which the `state` of a `StateCache` gets; `extra_terms`: a bias or dropout."""
    with state.keeping_errors():
        encoded = decoded(layer, attention_mask, query, state.seen, causal)
        if not encoded.causal or layer.window is not None or encoded.window is not None or extra_terms:
            raise ValueError(
                f"layer {layer.label} cannot run on a StateCache: that is for causal attention without a window, a "
                "position bias or dropout"
            )
        if layer.keep is not None or layer.kept_now is not None:
            raise ValueError(
                f"layer {layer.label} cannot keep tokens on a StateCache, which contains sums over all of them; "
                "swap without `keep`"
            )
        mask = mask_of_new(layer, query.shape[2], encoded)
        out: Tensor = state.attend(layer.bound, query, key, value, mask, scaling)
    return out.transpose(1, 2).contiguous()


def _sequence(layer: Attached, module: nn.Module, attention_mask: Tensor | None, dropout: float) -> Any:
    """The sequence of which the layer has this rank's tokens; None where it has all."""
    if layer.split is None and getattr(module, "splits_tokens", False):  # its model gives each rank its tokens
        return in_use(self_attention=not getattr(module, "is_cross_attention", False))
    if layer.split is None:
        refuse_in_use("a Hugging Face model", "give the ranks to it: sq.hf.swap(model, method, parallel=group)")
        return None
    held = layer.split.sequence(layer.label, attention_mask)
    if attention_mask is None:
        raise ValueError(
            f"layer {layer.label} was given no attention mask, not even the empty one that subquad made: another "
            "library took it away, as accelerate's context parallelism does"
        )
    if dropout:
        raise ValueError(
            f"layer {layer.label} drops attention weights at a rate of {dropout:g}, which is not supported with "
            "`parallel`; set it to 0 in the config (attention_dropout, attention_probs_dropout_prob or attn_pdrop)"
        )
    return held


# ---------------------------------------------------------------------- what the mask function is given


def _pattern(mask_function: Callable[..., Any] | None, options: dict[str, Any]) -> LayerPattern:
    """The pattern of the mask function; while compiling, read from its keywords, because its cells cannot be read."""
    if mask_function is None or not torch.compiler.is_compiling():
        return read_pattern(mask_function)
    name = mask_function.__code__.co_qualname
    if options.get("use_vmap") or name not in (
        "causal_mask_function",
        "bidirectional_mask_function",
        "and_masks.<locals>.and_mask",
    ):
        raise ValueError(f"this model masks attention by {name!r}, which subquad cannot read under torch.compile")
    # transformers gives this keyword with bidirectional masks alone; a window, on top of either, is the layer's.
    return EVERYTHING if "allow_is_bidirectional_skip" in options else CAUSAL


def _valid_keys(attention_mask: Tensor | None, kv_length: int, kv_offset: int | Tensor) -> Tensor | None:
    """The 2-D mask of the user at the cache's keys, as bool (B, kv_length)."""
    if attention_mask is None:
        return None
    if isinstance(kv_offset, Tensor):
        index = (torch.arange(kv_length, device=attention_mask.device) + kv_offset).clamp(
            max=attention_mask.shape[1] - 1
        )
        return attention_mask[:, index].bool()
    valid = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
    return F.pad(valid, (0, kv_length - valid.shape[1]))


def _segments(mask_function: Any, batch: int, length: int, device: torch.device | None) -> Tensor | None:
    """Number the packed segments 1, 2, …: a token that may not see the one before it starts a new one. None: one only.

    Windows of two or more tokens see their neighbour, so they start no segment.
    """
    if mask_function is None or mask_function.__code__.co_qualname != "and_masks.<locals>.and_mask":
        return None
    item = torch.arange(batch, device=device)[:, None]
    position = torch.arange(1, length, device=device)
    sees_previous = mask_function(item, 0, position, position - 1)
    sees_previous = torch.as_tensor(sees_previous, device=device).expand(batch, length - 1)
    if not torch.compiler.is_compiling() and bool(sees_previous.all()):
        return None
    return F.pad((~sees_previous).int().cumsum(1), (1, 0)).int() + 1
