"""Attention to near keys where few of them are another rank's: those of the queries at the borders.

All queries attend to the keys of their own rank, where these are. Those near a border do so again, to the keys around
them, and these rows replace the others. So no rank copies all its keys to put a few next to them.

    keys      [ before | own                         | behind ]
    queries            [ first |               | last ]
"""

from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.autograd.function import once_differentiable

from subquad.distributed.collectives import takes_part
from subquad.distributed.halo import Halo
from subquad.distributed.with_rows import WholeAndRows
from subquad.masks import Mask
from subquad.methods.core.call import Call, Partial
from subquad.methods.core.method import Method

Sides = list[tuple[Tensor, Tensor]]  # what is before and what is behind a rank's own, of keys and of values
Part = tuple[Tensor, Tensor, Tensor, int, int]  # queries, keys, values, numbers of the first query and the first key


def run_with_halo(
    method: Method, query: Tensor, key: Tensor, value: Tensor, call: Call, halo: Halo, reach: tuple[int, int]
) -> Partial:
    """The partial of this rank's queries, each of which sees no keys but those `reach` before and behind it."""
    queries, keys, values = inputs = [WholeAndRows(x) for x in (query, key, value)]
    valid = call.mask.key_padding(key.shape[2])
    sides, _ = halo.sides([*((x, 2) for x in inputs[1:]), *(() if valid is None else ((valid, 1),))])
    if valid is not None:
        before, behind = sides.pop()
        valid = torch.cat([before, valid, behind], dim=1)
    near = _Near(method, call, halo.before, valid, call.mask.query_padding(query.shape[2]))
    out, lse = near.attend(queries.whole, keys.whole, values.whole, 0, 0)
    parts = list(_at_halo(inputs, sides, reach))
    if not parts:
        return takes_part(out, [x for each in sides for x in each]), lse
    starts, results = [first for *_, first, _ in parts], [near.attend(*part) for part in parts]
    out = _replaced(out, starts, [rows for rows, _ in results])
    return out, None if lse is None else _replaced(lse, starts, [rows for _, rows in results if rows is not None])


def _at_halo(inputs: list[WholeAndRows], sides: Sides, reach: tuple[int, int]) -> Iterator[Part]:
    """The queries that see keys before or behind this rank's own, with all that they see."""
    (query, *local), (before, behind) = inputs, zip(*sides, strict=True)
    n, ahead, after = query.shape[2], before[0].shape[2], behind[0].shape[2]
    if ahead:
        keys, values = (
            torch.cat([x, rows.slice(0, ahead + reach[1])], 2) for x, rows in zip(before, local, strict=True)
        )
        yield query.slice(0, ahead), keys, values, 0, -ahead
    if after:
        first = n - after - reach[0]
        keys, values = (torch.cat([rows.slice(first, n), x], 2) for x, rows in zip(behind, local, strict=True))
        yield query.slice(n - after, n), keys, values, n - after, first


@dataclass(frozen=True)
class _Near:
    """The method on some of a rank's queries and of the keys around it, `before` of which come before its own."""

    method: Method
    call: Call
    before: int
    valid: Bool[Tensor, "B M"] | None
    queries: Bool[Tensor, "B N"] | None  # True for real queries

    def attend(self, query: Tensor, key: Tensor, value: Tensor, first: int, first_key: int) -> Partial:
        """The partial, where the first query and the first key have these numbers among the rank's own."""
        mask, at = self.call.mask, first_key + self.before
        part = Mask(
            is_causal=mask.is_causal,
            span=mask.span,
            offset=first - first_key,
            keys=() if self.valid is None else (self.valid[:, at : at + key.shape[2]],),
            queries=() if self.queries is None else (self.queries[:, first : first + query.shape[2]],),
        )
        return self.method.attend_partial(query, key, value, self.call.under(part))


def _replaced(x: Tensor, starts: list[int], rows: list[Tensor]) -> Tensor:
    """x with these rows from these places on; without gradients in place."""
    if rows and (x.requires_grad or any(each.requires_grad for each in rows)):
        return _Replaced.apply(x, starts, *rows)
    return _put(x, starts, rows)


def _put(x: Tensor, starts: list[int], rows: Many[Tensor]) -> Tensor:
    for start, each in zip(starts, rows, strict=True):
        x[:, :, start : start + each.shape[2]] = each
    return x


class _Replaced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, starts: list[int], *rows: Tensor) -> Tensor:
        ctx.positions = [slice(start, start + each.shape[2]) for start, each in zip(starts, rows, strict=True)]
        return _put(x.clone(), starts, rows)  # an op has saved what it returned

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        others = gradient.clone()
        for index in ctx.positions:
            others[:, :, index] = 0
        return others, None, *(gradient[:, :, index] for index in ctx.positions)
