"""Partials of all ranks, for the same queries over the keys of each, merged into one."""

import torch
from jaxtyping import Float
from torch import Tensor

from subquad.ops.softmax import merge_partials
from subquad.parallel import Sequence
from subquad.parallel.rows import Rows, combine_together

Partial = tuple[Float[Tensor, "*row E"], Float[Tensor, "*row"]]


def merge_of_ranks(out: Float[Tensor, "*row E"], lse: Float[Tensor, "*row"], of: Sequence) -> Partial:
    """The partial over the keys of all ranks."""
    (both,) = combine_together([merging(out, lse)], of.group)
    return as_partial(both)


def merging(out: Float[Tensor, "*row E"], lse: Float[Tensor, "*row"]) -> Rows:
    """The partial as rows, out | lse, which are merged."""
    return merging_rows(torch.cat([out, lse.unsqueeze(-1)], dim=-1))


def merging_rows(both: Float[Tensor, "*row F"]) -> Rows:
    """A partial that is rows already, which are merged."""
    return Rows(both, lambda parts: [merged(list(parts))] * len(parts))


def as_partial(both: Float[Tensor, "*row F"]) -> Partial:
    """What comes of `merging`."""
    return both[..., :-1], both[..., -1]


def merged(parts: list[Float[Tensor, "*row F"]]) -> Float[Tensor, "*row F"]:
    """Partials as rows, merged."""
    out, lse = merge_partials([as_partial(part) for part in parts])
    return torch.cat([out, lse.unsqueeze(-1)], dim=-1)
