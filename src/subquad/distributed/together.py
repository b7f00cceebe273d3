"""Several tensors in one exchange.

One exchange has one node in the graph of gradients, so that all ranks make their backward exchanges in one order, also
where a rank has less to compute than others.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from subquad.distributed.collectives import Shape, add, all_to_all, as_bytes, refuse_second_derivative


def add_together(tensors: Sequence[Tensor], group: Any) -> list[Tensor]:
    """The sum of each over all ranks, in their order, so that each rank has the same bits. Differentiable."""
    total = add(torch.cat([x.reshape(-1) for x in tensors]), group)
    return [part.view_as(x) for part, x in zip(total.split([x.numel() for x in tensors]), tensors, strict=True)]


def exchange_together(
    sent: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[Shape]], group: Any
) -> list[list[Tensor]]:
    """Send the tensors of list p to rank p, and receive tensors of these shapes from each.

    The lists of all ranks hold the same number of tensors, of the same dtypes. Differentiable in those of floats.
    """
    dtypes = [x.dtype for x in sent[0]]
    parts, flat = [x for each in sent for x in each], [tuple(shape) for each in shapes for shape in each]
    flat_results = _Together.apply(group, dtypes, flat, *parts)
    return [list(flat_results[first : first + len(dtypes)]) for first in range(0, len(flat_results), len(dtypes))]


class _Together(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, group: Any, dtypes: list[torch.dtype], shapes: list[tuple[int, ...]], *parts: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.dtypes, ctx.shapes = group, dtypes, [tuple(x.shape) for x in parts]
        received = _swap(parts, shapes, dtypes, group)
        ctx.mark_non_differentiable(*(x for x in received if not x.is_floating_point()))
        return tuple(received)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        kinds = len(ctx.dtypes)
        floats = [n for n in range(len(gradients)) if ctx.dtypes[n % kinds].is_floating_point]
        dtypes = [dtype for dtype in ctx.dtypes if dtype.is_floating_point]
        received = _swap([gradients[n] for n in floats], [ctx.shapes[n] for n in floats], dtypes, ctx.group)
        of_part = dict(zip(floats, received, strict=True))
        return None, None, None, *(of_part.get(n) for n in range(len(gradients)))


def _swap(
    parts: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype], group: Any
) -> list[Tensor]:
    """Exchange as many tensors with each rank as there are dtypes, as bytes."""
    kinds = len(dtypes)
    sizes = [prod(shape) * dtypes[n % kinds].itemsize for n, shape in enumerate(shapes)]
    sent = torch.cat([as_bytes(part) for part in parts])
    to_each, from_each = (
        [sum(lengths[first : first + kinds]) for first in range(0, len(lengths), kinds)]
        for lengths in ([part.numel() * part.element_size() for part in parts], sizes)
    )
    received = all_to_all(sent, to_each, from_each, group).split(sizes)
    return [_read(x, dtypes[n % kinds]).view(shapes[n]) for n, x in enumerate(received)]


def _read(x: Tensor, dtype: torch.dtype) -> Tensor:
    """These bytes as numbers; a copy where they do not begin at a multiple of the numbers' width."""
    return (x if x.storage_offset() % dtype.itemsize == 0 else x.clone()).view(dtype)
