"""The op `visible_key_cells`: cells of keys as a few queries see them, and the keys that each should meet exactly."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from subquad.core.versions import sym_min
from subquad.kernels.attention.tail.key_cells import tail_of
from subquad.kernels.attention.tail.key_choice import top_keys
from subquad.kernels.attention.tail.op import tail_forward
from subquad.kernels.dispatch import Op

# backend -> the lists of exact keys that it saves, as numbers of keys: (top, keys by cell, how many keys) → (B,H,C,K)
_NUMBERS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {}


def lists_of(backend: str) -> Callable[[Callable[[Tensor, Tensor, int], Tensor]], None]:
    """Register how to read the lists of exact keys of a backend."""
    return lambda read: _NUMBERS.update({backend: read})


class VisibleTail(NamedTuple):
    """The cells as each query sees them, without the keys in `top`.

    Attributes:
        key: k̄, the mean of the cell's keys by their weights for the query.
        value: v̄, likewise.
        lse: ln Σ e^{scale·q·k_j} over the keys of the cell; −inf for none.
        top: numbers of keys, ascending; M where a slot is empty.
    """

    key: Float[Tensor, "B H C X D"]
    value: Float[Tensor, "B H C X E"]
    lse: Float[Tensor, "B H C X"]
    top: Int64[Tensor, "B H C K"]


@Op
def visible_key_cells(
    query: Float[Tensor, "B H C D"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M E"],
    cell: Int64[Tensor, "B G M"],
    terms: Float[Tensor, "B H M"],
    *,
    cells: int,
    topk: int,
    scale: float,
) -> VisibleTail:
    """The cells of `attend_with_tail` for queries that are each a cluster of their own, in fp32 or better.

    `top` are the `topk` keys with the largest scale·q·k_j + t_j, with t the `terms`, which are not of these keys and
    queries alone where they are of one rank. The gradient flows through key, value and lse.
    """
    top = top_keys(query.detach(), key.detach(), cell, topk, None, cells, scale, terms)
    tail = tail_of(query, key, value, top, cell, cells, scale)
    lse = tail.bias + (tail.key * query.unsqueeze(2)).sum(-1) * scale
    return VisibleTail(tail.key.transpose(2, 3), tail.value.transpose(2, 3), lse.transpose(2, 3), top)


@visible_key_cells.compiled
def run(backend: str, x: Any) -> VisibleTail:
    """Run on a compiled backend."""
    (B, H, C, _), M = x.query.shape, x.key.shape[2]
    labels = torch.arange(C, device=x.query.device).expand(B, H, C).contiguous()
    inputs = x.query, x.key, x.value, labels, x.cell, None, None, x.terms.float().contiguous(), None, None, None
    outputs = tail_forward.run(backend, *inputs, C, sym_min(x.topk, M), x.cells, x.scale, 0)
    _, _, _, _, key_order, _, top, _, keys, values, lse, *_ = outputs
    return VisibleTail(keys, values, lse, _NUMBERS[backend](top, key_order, M))
