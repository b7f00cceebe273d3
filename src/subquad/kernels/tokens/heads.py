"""Heads of grouped-query attention."""

from jaxtyping import Shaped
from torch import Tensor


def repeat_heads(x: Shaped[Tensor, "B G M D"], heads: int) -> Shaped[Tensor, "B {heads} M D"]:
    """Give every query head its key/value head: head h uses group ⌊h·G/H⌋."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)
