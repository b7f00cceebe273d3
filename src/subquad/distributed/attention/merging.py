"""Partials of all ranks, for the same queries over the keys of each, merged into one."""

import torch
from jaxtyping import Float
from torch import Tensor

from subquad.distributed.rows import Rows, combine_together
from subquad.distributed.token_split import TokenSplit
from subquad.kernels.attention.partial_rows import as_partial, merged

Partial = tuple[Float[Tensor, "*row E"], Float[Tensor, "*row"]]


def merge_of_ranks(out: Float[Tensor, "*row E"], lse: Float[Tensor, "*row"], split: TokenSplit) -> Partial:
    """The partial over the keys of all ranks, of the same queries on each."""
    (both,) = combine_together([merging(out, lse)], split.group)
    return as_partial(both)


def merging(out: Float[Tensor, "*row E"], lse: Float[Tensor, "*row"]) -> Rows:
    """The partial as rows, out | lse, which are merged."""
    return merging_rows(torch.cat([out, lse.unsqueeze(-1)], dim=-1))


def merging_rows(both: Float[Tensor, "*row F"]) -> Rows:
    """A partial that is rows already, which are merged."""
    return Rows(both, lambda parts: [merged(list(parts))] * len(parts))
