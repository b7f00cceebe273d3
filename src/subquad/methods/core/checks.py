"""Checks of a method's arguments: dtypes under autocast, the options of a call, the state of a step."""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from subquad.kernels.tokens.padding import cleared
from subquad.kernels.tokens.rotary import Rotary
from subquad.masks import Mask
from subquad.methods.core.traits import Traits

MAX_SEED = 2**63 - 1
A_CAUSAL_MASK = "a causal mask"
_CAUSAL_REASON = "its output at one position depends on later positions, so the future would leak"


def as_autocast(x: Tensor) -> Tensor:
    """Cast as autocast casts the arguments of SDPA: one by one, all but fp64."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    device = x.device.type
    if not torch.amp.is_autocast_available(device):
        return x
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def without_autocast(device: str) -> AbstractContextManager[object]:
    """Leave autocast inside the block, on devices that have it; the meta device has none."""
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()


def check_options(
    query: Tensor,
    key: Tensor,
    mask: Mask | None,
    bias: Tensor | None,
    scale: float | None,
    dropout_p: float,
    seed: int,
) -> None:
    """Check the options of a call. Errors as in `subquad.attention`."""
    if not (mask is None or isinstance(mask, Mask)):
        raise TypeError(
            f"`mask` is a {type(mask).__name__}, but it must be a sq.Mask: Mask.padding(…) for padding, "
            "Mask.dense(…) for a bool (B,H,N,M)"
        )
    if isinstance(scale, str):
        raise TypeError(f"scale={scale!r}, but it must be a number")
    if scale is not None and not -math.inf < scale < math.inf:  # as Dynamo can trace it, unlike math.isfinite
        raise ValueError(f"scale={scale}, but it must be a finite number")
    if not isinstance(seed, int) or not 0 <= seed <= MAX_SEED:
        raise ValueError(f"seed={seed!r}, but it must be a whole number from 0 to 2⁶³ − 1")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p={dropout_p}, but it must be in [0, 1)")
    if bias is not None:
        check_bias(bias, query, key.shape[2])


def check_bias(bias: Tensor, query: Tensor, keys: int) -> None:
    """Check an additive bias of these queries and a number of keys."""
    want = (query.shape[0], query.shape[1], query.shape[2], keys)
    have = tuple(bias.shape)
    if len(have) != 4 or have[2:] != want[2:] or have[0] not in (1, want[0]) or have[1] not in (1, want[1]):
        raise ValueError(f"`bias` is {tuple(bias.shape)} but attention is (B|1, H|1, N, M) = {want}")
    if not bias.is_floating_point():
        raise TypeError(
            f"`bias` is {bias.dtype}; it is added to the logits and must be floating (use a Mask to hide keys)"
        )
    if bias.device != query.device:
        raise ValueError(f"`bias` is on {bias.device} but `query` is on {query.device}; move them together")


def only_bound(method: Any) -> str:
    """The reason why a method with learned parameters takes no bare call, and where it runs."""
    if method.traits.needs_hidden:
        return (
            f"{method.label!r} has learned parameters and reads the layer's input ({method}), so it runs only in a "
            "layer: sq.nn.MultiheadAttention(…, method=…), or method.bind(heads=…, head_dim=…) called with hidden=…"
        )
    return (
        f"{method.label!r} has learned parameters, so it runs only as a bound method: in sq.nn.MultiheadAttention, by "
        "sq.hf.swap, or by method.bind(heads=…, head_dim=…)"
    )


def checked_hidden(method: Any, query: Tensor, hidden: Tensor | None, mask: Mask) -> Tensor:
    """The layer's input, with its padding cleared. ValueError where it is missing or of another shape or device."""
    B, _, N, _ = query.shape
    if hidden is None:
        raise ValueError(
            f"{method.name!r} reads the layer's input ({method}), which this caller does not hand on; run it in "
            f"sq.nn.MultiheadAttention, or call the bound method with hidden=…, ({B}, {N}, width)"
        )
    if hidden.ndim != 3 or hidden.shape[:2] != (B, N):
        raise ValueError(
            f"`hidden` is {tuple(hidden.shape)} but `query` is {tuple(query.shape)}; the layer's input at the queries "
            f"is ({B}, {N}, width)"
        )
    if hidden.device != query.device:
        raise ValueError(f"`hidden` is on {hidden.device} but `query` is on {query.device}; move them together")
    return cleared(as_autocast(hidden)[:, None], mask.query_padding(N))[:, 0]


def checked_rotary(rotary: Rotary | None, query: Tensor, mask: Mask) -> Rotary | None:
    """The argument `rotary` of a call, on the device of its queries. Errors as in `subquad.attention`."""
    if rotary is None:
        return None
    if not isinstance(rotary, Rotary):
        raise TypeError(f"`rotary` is a {type(rotary).__name__}, but it must be a sq.Rotary")
    pairs, width = rotary.pairs, query.shape[3]
    if 2 * pairs > width:
        raise ValueError(
            f"`rotary` turns {pairs} pairs of components, but `query` is {tuple(query.shape)}, {width} wide"
        )
    if rotary.frequencies.ndim == 2 and len(rotary.frequencies) != len(query):
        raise ValueError(
            f"`rotary` has frequencies of {len(rotary.frequencies)} items, but `query` is {tuple(query.shape)}; give "
            "those of each item, or one for all"
        )
    if rotary.frequencies.ndim == 2 and mask.ids:
        raise ValueError(
            "`rotary` has frequencies of each item, but items contain packed sequences; give packed sequences that all "
            "have the same frequencies"
        )
    return rotary.to(query.device)


def lacking(traits: Traits, mask: Mask, *, bias: bool, cross: bool, lse: bool, keep: bool) -> list[str]:
    """The requests of a call that a method with these traits does not support."""
    on_keys = traits.cross or (traits.cached and mask.offset is not None)
    checks = {
        A_CAUSAL_MASK: mask.is_causal and traits.causal == "no",
        "fewer or more keys than queries (cross-attention, or a step on a cache)": cross and not on_keys,
        "a window": mask.span is not None and not traits.window,
        "a dense mask": bool(mask.allowed) and not traits.dense_mask,
        "an additive bias": bias and not traits.bias,
        "return_lse=True": lse and not traits.lse,
        "`keep`, which needs its log-sum-exp": keep and not traits.lse,
    }
    return [what for what, refused in checks.items() if refused]


def unsupported(label: str, lacks: list[str]) -> str:
    """The reason why a method cannot take a call, in one line with the remedy."""
    why = f": {_CAUSAL_REASON}" if lacks[0] == A_CAUSAL_MASK else ""
    causal = ", or a causal one such as 'local' or 'learned-feature-map'" if lacks == [A_CAUSAL_MASK] else ""
    return f"{label!r} does not support {' or '.join(lacks)}{why}; use method='full' here{causal}"
