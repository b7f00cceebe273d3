"""The arguments of `torch.nn.MultiheadAttention.forward`, as those of methods."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from subquad.core.readable import can_be_read
from subquad.kernels.tokens.nested_padding import pad
from subquad.masks import Mask
from subquad.masks.sdpa import IsBias
from subquad.methods import BoundMethod
from subquad.methods.core.halves import future_leak
from subquad.nn.global_tokens import WithRows
from subquad.nn.padded_queries import attend_all
from subquad.nn.sdpa_arguments import mask_and_bias

MASK = "`attn_mask` (`mask` or `src_mask` of torch's encoder, `tgt_mask` or `memory_mask` of its decoder)"


def refuse_weights(need_weights: bool | None) -> None:
    """Raise ValueError where attention weights are asked for."""
    if need_weights:
        raise ValueError(
            "need_weights=True, torch's default, asks for the N×M attention weights, which no method here computes; "
            "call the layer with need_weights=False"
        )


def check_widths(inputs: Iterable[Tensor], widths: Iterable[int]) -> None:
    """ValueError if queries, keys or values do not have the width that a layer projects."""
    for name, x, width in zip(("queries", "keys", "values"), inputs, widths, strict=True):
        if x.shape[-1] != width:
            raise ValueError(f"the {name} are {x.shape[-1]} wide, but this layer takes {name} of width {width}")


def check_encoder_padding(encoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A hook before the forward pass of torch's encoder, which would not name the shapes of a mask that does not fit.

    Raises:
        ValueError: the padding mask of a batch has another shape than the batch.
    """
    inputs = dict(zip(("src", "mask", "src_key_padding_mask"), args, strict=False)) | kwargs
    source, padding = inputs.get("src"), inputs.get("src_key_padding_mask")
    if torch.compiler.is_compiling() or not isinstance(source, Tensor) or not isinstance(padding, Tensor):
        return
    if source.is_nested or source.ndim != 3:
        return
    first, second = source.shape[:2]
    wanted = (first, second) if _is_batch_first(encoder) else (second, first)
    if padding.shape != wanted:
        raise ValueError(
            f"`src_key_padding_mask` is {tuple(padding.shape)}, but it must be {wanted}, the batch and the tokens of "
            f"`src`, which is {tuple(source.shape)}"
        )


def _is_batch_first(encoder: Any) -> bool:
    """True if the batch is the first axis of the inputs of torch's encoder, which its layers decide."""
    return all(bool(part.batch_first) for part in encoder.modules() if isinstance(part, nn.MultiheadAttention))


def refuse_nested(lengths: Tensor | None, parallel: Any) -> None:
    """Raise ValueError where nested inputs would be split over ranks."""
    if lengths is not None and parallel is not None:
        raise ValueError("nested tensors are not supported with `parallel`; pad them, and mask this rank's tokens")


def as_batches(
    query: Tensor, key: Tensor, value: Tensor, *, batch_first: bool
) -> tuple[list[Tensor], Tensor | None, Callable[[Tensor], Tensor]]:
    """Query, key and value as (B, tokens, width), the items' lengths where they are nested, and the way back.

    Raises:
        ValueError: one is nested and the others are not the same tensor; their numbers of axes differ, or are others.
    """
    inputs = (query, key, value)
    if any(x.is_nested for x in inputs):
        if not (key is query and value is query):
            raise ValueError(
                "nested tensors are for self-attention, layer(x, x, x); pad those of cross-attention, "
                "torch.nested.to_padded_tensor(x, 0.0), and give key_padding_mask"
            )
        padded = pad(query)
        return [padded.values] * 3, padded.lengths, padded.nested_like_it
    axes = tuple(x.ndim for x in inputs)
    if axes not in ((2, 2, 2), (3, 3, 3)):
        order = "(B, tokens, width)" if batch_first else "(tokens, B, width)"
        raise ValueError(
            f"query, key and value have {axes} axes, but they must all be {order}, or all (tokens, width) without batch"
        )

    def batched(x: Tensor) -> Tensor:
        if x.ndim == 2:
            return x[None]
        return x if batch_first else x.transpose(0, 1)

    def back(out: Tensor) -> Tensor:
        if query.ndim == 2:
            return out[0]
        return out if batch_first else out.transpose(0, 1)

    queries = batched(query)
    keys = queries if key is query else batched(key)
    values = keys if value is key else batched(value)
    return [queries, keys, values], None, back


def empty_outputs(query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
    """The outputs (B,H,N,D) of no items or no queries, which methods refuse and torch's layers accept; None: there are.

    They depend on all three, so that every projection gets its gradient, of zeros.
    """
    if query.shape[0] and query.shape[2]:
        return None
    return query + key.sum() + value.sum()


def attend_as_torch(
    bound: BoundMethod | WithRows,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    self_attention: bool,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    is_causal: bool,
    lengths: Tensor | None = None,
    parallel: Any = None,
    refuses_leaks: bool = False,
    **options: Any,
) -> Tensor:
    """A method on the heads (B,H,N,D) of a layer, under torch's masks: True, or −inf, hides a key.

    An empty batch, or one without queries, has empty outputs as in torch's layer.

    Padded queries are computed, as torch does. `attn_mask` takes precedence over `is_causal` if both are given, as the
    hint that it is; only where its numbers cannot be read does the hint tell. `lengths` is the padding of both sides.
    With `parallel`, the outputs of padded queries are those of `attend_all`. `refuses_leaks` refuses, under a causal
    mask, methods whose training would leak the future.

    Raises:
        ValueError: the method does not support the mask, or cross-attention; a mask of another shape.
    """
    (B, H, N, _), M, method = query.shape, key.shape[2], bound.method
    if (empty := empty_outputs(query, key, value)) is not None:
        return empty
    if not (self_attention or method.traits.cross):
        raise ValueError(f"{method.label!r} does not support cross-attention: its keys are those of the queries")
    refuse_nested(lengths, parallel)
    if parallel is not None and attn_mask is not None:
        raise ValueError(
            f"{MASK} is not supported with `parallel`, where each rank has a part of both of its axes; give "
            "is_causal=True alone for a causal mask (`is_causal` of torch's encoder, `tgt_is_causal` of its decoder)"
        )
    options["parallel"] = parallel
    allowed = _allowed(attn_mask, B, H, N, M)
    hint = is_causal and (allowed is None or not can_be_read(allowed))
    mask, bias = mask_and_bias(method, query, key, None if hint else allowed, hint, named=MASK)
    if refuses_leaks and mask.is_causal and method.traits.leaks_in_training:
        raise ValueError(future_leak(method))
    if key_padding_mask is not None:
        mask = mask & _padding(_valid(key_padding_mask, B, M), parallel)
    if lengths is not None:
        return bound(query, key, value, mask=mask & Mask.padding(lengths), bias=bias, **options)
    valid = mask.key_padding(M)
    query_valid = valid if self_attention else None
    out = attend_all(
        bound,
        query,
        key,
        value,
        mask=replace(mask, keys=()),
        valid=valid,
        query_valid=query_valid,
        bias=bias,
        **options,
    )
    sees_keys = mask.query_padding(N)  # by `attn_mask`; otherwise padded queries see the real keys
    return out if sees_keys is None else out.masked_fill(~sees_keys[:, None, :, None], 0.0)


def _allowed(attn_mask: Tensor | None, B: int, H: int, N: int, M: int) -> Tensor | None:
    """torch's mask (N,M) or (B·H,N,M) as SDPA's: True = may attend."""
    if attn_mask is None:
        return None
    if attn_mask.shape not in ((N, M), (B * H, N, M)):
        raise ValueError(f"`attn_mask` is {tuple(attn_mask.shape)}, but it must be {(N, M)} or {(B * H, N, M)}")
    allowed = attn_mask.logical_not() if attn_mask.dtype == torch.bool else attn_mask
    return allowed if allowed.ndim == 2 else allowed.unflatten(0, (B, H))


def _valid(key_padding_mask: Tensor, B: int, M: int) -> Tensor:
    """torch's padding (B,M), or (M,) of an input without batch, as SDPA's: True = real."""
    padding = key_padding_mask[None] if key_padding_mask.ndim == 1 else key_padding_mask
    if padding.shape != (B, M):
        raise ValueError(f"`key_padding_mask` is {tuple(key_padding_mask.shape)}, but it must be {(B, M)}")
    return padding.logical_not() if padding.dtype == torch.bool else padding


def _padding(valid: Tensor, parallel: Any) -> Mask:
    """SDPA's padding (B,M) as a mask, which with `parallel` is there where it hides nothing: another rank has some."""
    try:
        mask = Mask.from_sdpa(valid[:, None, None], batch=len(valid))
    except IsBias as error:
        raise ValueError(
            "`key_padding_mask` contains floats that are added to the logits (other numbers than 0 and −inf, or a "
            "gradient is required), but it can only hide keys; give bools, True for padding, or a bias in `attn_mask`"
        ) from error
    if parallel is None or mask.keys:
        return mask
    return Mask.padding(keys=torch.ones_like(valid, dtype=torch.bool))
