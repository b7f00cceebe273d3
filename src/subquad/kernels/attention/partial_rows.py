"""Partials as rows, out | lse, in one tensor."""

import torch
from jaxtyping import Float
from torch import Tensor

from subquad.kernels.attention.softmax import merge_partials

Partial = tuple[Float[Tensor, "*row E"], Float[Tensor, "*row"]]


def as_partial(both: Float[Tensor, "*row F"]) -> Partial:
    """The partial of these rows: (out, lse)."""
    return both[..., :-1], both[..., -1]


def merged(parts: list[Float[Tensor, "*row F"]]) -> Float[Tensor, "*row F"]:
    """Partials as rows, merged."""
    out, lse = merge_partials([as_partial(part) for part in parts])
    return torch.cat([out, lse.unsqueeze(-1)], dim=-1)
