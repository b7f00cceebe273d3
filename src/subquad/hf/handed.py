"""The mask that transformers carries from its mask function to each layer's attention: one encoding, one decoding.

transformers makes a mask once for each forward pass and hands it through the model's own code. Ours is a plain tensor
of shape (B,1,1,M), never N×M: four axes, because transformers leaves such a mask alone where it prepares masks again.
The dtype says the pattern, because it is known without reading a tensor, also while compiling:

    bool    bidirectional     True = a real key
    int8    causal            1 = a real key, 0 = padding
    int16   causal            the same for a static cache, where −1 is a slot that is not filled yet
    int32   causal, packed    the segment of each token, 0 = padding

A last axis of size 0 says that no key is hidden. Some models make (B,1,1,M) padding masks of their own, bool or
additive; they are read in the same way.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

ALMOST_NOTHING = -1e4  # additive masks hide a key by at least so much


@dataclass(frozen=True)
class Handed:
    """A decoded mask. `offset` is where the first query stands among the keys."""

    causal: bool
    real: Tensor | None = None  # bool (B,M), None: all keys are
    segments: Tensor | None = None  # int (B,M), negative = padding
    offset: int | Tensor = 0

    def queries(self, N: int) -> Tensor | None:
        """The real ones of the N queries, which are the last keys, or the keys before unfilled slots."""
        if self.real is None:
            return None
        if isinstance(self.offset, Tensor):
            return self.real.index_select(1, self.offset + torch.arange(N, device=self.real.device))
        return self.real[:, self.real.shape[1] - N :]


def encode(*, causal: bool, real: Tensor | None, filled: Tensor | None, segments: Tensor | None, batch: int) -> Tensor:
    """The tensor to pass on: `real` and `segments` are (B,M), `filled` is (M), None where there is nothing to say."""
    device = next((x.device for x in (real, filled, segments) if x is not None), None)
    if filled is not None:
        marks = torch.ones(1, len(filled), dtype=torch.int16, device=device) if real is None else real.to(torch.int16)
        hidden = torch.where(filled, marks, -1).to(torch.int16)
    elif segments is not None:
        hidden = (segments if real is None else segments * real).int()
    elif real is None:
        return torch.empty(1, 1, 1, 0, dtype=torch.int8 if causal else torch.bool, device=device)
    else:
        hidden = real.to(torch.int8) if causal else real
    return hidden.expand(batch, -1)[:, None, None, :]


def decode(given: Tensor | None, N: int, M: int, *, causal: bool, label: str) -> Handed:
    """Decode the mask that a layer's attention was given; `causal` applies if it was given no mask.

    Raises:
        ValueError: the mask says more than padding, or is of another length than the keys.
    """
    if given is None:
        return Handed(causal, offset=M - N if causal else 0)
    if given.ndim != 4 or given.shape[1] != 1 or (given.shape[2] != 1 and N != 1):
        raise ValueError(
            f"layer {label} was given an attention mask of shape {tuple(given.shape)}; subquad takes 2-D padding masks "
            "(batch, tokens), of which it makes (batch, 1, 1, keys): prepared 4-D masks would need N×M memory"
        )
    ours = given.dtype in (torch.int8, torch.int16, torch.int32)
    if given.shape[-1] == 0:
        return Handed(ours, offset=M - N if ours else 0)
    if given.shape[-1] != M:
        raise ValueError(f"layer {label}: the attention mask has {given.shape[-1]} positions, but there are {M} keys")
    flat = given[:, 0, 0]
    if given.dtype == torch.bool:
        return Handed(False, flat)
    if given.is_floating_point():
        return Handed(False, _real_of_additive(flat, label))
    if given.dtype == torch.int32:
        return Handed(True, segments=flat - 1)
    if given.dtype == torch.int16:
        return Handed(True, flat > 0, offset=(flat[0] >= 0).sum() - N)
    if given.dtype != torch.int8:
        raise ValueError(f"layer {label} was given a mask of dtype {given.dtype}, which subquad does not know")
    return Handed(True, flat > 0, offset=M - N)


def _real_of_additive(bias: Tensor, label: str) -> Tensor:
    real = bias > ALMOST_NOTHING
    if not torch.compiler.is_compiling() and bool((real & (bias != 0)).any()):
        raise ValueError(
            f"layer {label} was given an additive attention mask with values other than 0 and less than "
            f"{ALMOST_NOTHING:g}; subquad takes padding only"
        )
    return real
