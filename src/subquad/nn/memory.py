"""A memory of the hidden states before the present ones, without a gradient: Dai et al. 2019, "Transformer-XL".

    h̃ = [SG(memory) ∘ x],  q, k, v = x W_Q, h̃ W_K, h̃ W_V          section 3.2

SG stops the gradient. The keys and values of the memory are made with the present weights, which do get a gradient.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from subquad.core.whole_numbers import is_whole
from subquad.masks import Mask
from subquad.methods import Method


def remember(
    x: Float[Tensor, "B N W"], memory: Float[Tensor, "B R W"] | None = None, *, length: int
) -> Float[Tensor, "B S W"]:
    """Return the last `length` hidden states, of the memory followed by the new ones, without a gradient.

    Dai et al. 2019, "Transformer-XL", section 3.2. There are fewer of them where there were not as many.

    Args:
        x: the input of an attention layer, with the tokens along the second axis. With `batch_first=False`, transpose
            it and the memory: `remember(x.transpose(0, 1), length=…)`, and `layer(x, memory=memory.transpose(0, 1))`.
        memory: the states of earlier inputs.
        length: number of states that are kept.

    Raises:
        ValueError: `length` is not a whole number from 0 on, or a memory of another batch, width or device.
        TypeError: a memory of another dtype.

    >>> import torch, subquad as sq
    >>> layer = sq.nn.MultiheadAttention(32, 4)
    >>> x = torch.randn(2, 50, 32)
    >>> first = layer(x[:, :30], is_causal=True)
    >>> memory = sq.nn.remember(x[:, :30], length=30)
    >>> second = layer(x[:, 30:], memory=memory, is_causal=True)
    >>> torch.allclose(torch.cat([first, second], 1), layer(x, is_causal=True), atol=1e-5)
    True
    """
    if not is_whole(length):
        raise ValueError(f"length={length!r}, but the number of hidden states in a memory is a whole number ≥ 0")
    kept = (x if memory is None else preceded(x, memory)).detach()
    return kept[:, max(kept.shape[1] - length, 0) :]


def preceded(x: Tensor, memory: Tensor, axis: int = 1, name: str = "x") -> Tensor:
    """The memory, whose gradient stops, and behind it the new states; errors as `remember`."""
    if memory.ndim != x.ndim:
        raise ValueError(f"`memory` is {tuple(memory.shape)} but `{name}` is {tuple(x.shape)}; only tokens may differ")
    if memory.dtype != x.dtype:
        raise TypeError(f"`memory` is {memory.dtype} but `{name}` is {x.dtype}; they must match")
    if memory.device != x.device:
        raise ValueError(f"`memory` is on {memory.device} but `{name}` is on {x.device}; move them together")
    for what, at in {"items": 1 - axis, "hidden units": -1}.items():
        if x.ndim == 3 or at == -1:
            have, want = memory.shape[at], x.shape[at]
            if have != want:
                raise ValueError(f"`memory` has {have} {what} but `{name}` has {want}; they must match")
    return torch.cat([memory.detach(), x], dim=axis)


def mask_behind(remembered: int, mask: Mask | None, tokens: int, *, is_causal: bool) -> Mask:
    """The mask of new tokens among the keys of a memory and of themselves.

    Padding of both sides is that of the new tokens; remembered tokens are real unless the keys' padding covers them.

    Raises:
        ValueError: the mask places the queries itself.
    """
    mask = mask or Mask()
    if not mask.aligned:
        raise ValueError(f"the memory puts {remembered} keys before the first query, but the mask is {mask}")
    valid = Mask(both=mask.both).query_padding(tokens)
    if valid is not None:
        keys = F.pad(valid, (remembered, 0), value=True)
        mask = replace(mask, both=(), queries=(*mask.queries, valid), keys=(*mask.keys, keys))
    return replace(mask, is_causal=mask.is_causal or is_causal, offset=remembered)


def refuse_without_memory(method: Method) -> None:
    """ValueError where a method needs as many queries as keys."""
    if not (method.traits.cross or method.traits.cached):
        raise ValueError(
            f"{method.label!r} supports no memory: its keys are those of the queries; use another method, such as "
            "'full:positions=relative' or 'local:positions=relative'"
        )
