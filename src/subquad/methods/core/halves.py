"""Causal attention by halves, for methods that attend to all keys of a rectangle and return the log-sum-exp.

                   keys
              [0,s)      [s,2s)
    [0,s)   [ halves  |          ]     Causal attention over 2s tokens is causal attention inside each half, and
    [s,2s)  [ method  |  halves  ]     attention of the second half's queries to the first half's keys, a rectangle
                                       without a mask.

The halves are divided in the same way, down to blocks of `block` tokens, which are exact: by default as many as exact
attention meets about as fast as the method, which in 16 bits are more (`default_block`). The results are merged by
log-sum-exp. Rectangles of one size, a *level* of 1, 2, 4, … blocks, are one batch; the last rectangle of a level may
have fewer queries and is a call of its own. With a cost of O(n^1.5) for a rectangle of n tokens, all of them cost
O(N^1.5). HyperAttention (Han et al. 2023, arXiv 2310.05869) has the recursion, with sampling inside the rectangles.

The last queries of an item are exact over all keys: the question of a prompt is there.

No key and no value of the future enters an output. But how a method divides the keys of the past, and what a centroid
of queries is, depends on all queries of a rectangle, later ones too: the trait `causal` is "values-only". With
`queries="block"` it depends on the queries of the same block alone: each block of a rectangle's queries meets the
rectangle's keys by itself, and a prefix of whole blocks has the outputs that it has alone.

                       keys
                  [0,s)      [s,2s)
    [s, s+b)    [ method |          ]
    [s+b, s+2b) [ method |  halves  ]
    …

With `queries="earlier"` nothing depends on later tokens. A rectangle's clusters are made of the queries
at the positions of its keys, all of them earlier, and each query of the rectangle joins the nearest cluster.
With rotary positions these earlier queries are rotated as if they were s tokens later, where the rectangle's queries
are. Keys before the first query of a call have no queries at their positions here: attention to them is exact.

Blocks begin at an item's first real token, so that padding of queries and keys changes nothing, wherever it is.
Queries that continue a cache of t tokens, by the mask's offset, are a rectangle over these t keys, and halves of
their own. An item of at most `block` tokens, with those of its cache, is exact, alone and in a batch of longer ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from subquad.kernels.attention.windows.op import merge_windows
from subquad.kernels.tokens.padding import cleared_inputs
from subquad.kernels.tokens.positions import front_first
from subquad.kernels.tokens.slots import taken
from subquad.kernels.transforms import shapes_may_follow_data
from subquad.masks import Mask
from subquad.methods.core.call import Attend, Call
from subquad.methods.core.exact import exact
from subquad.methods.core.halves_operator import attend_as_operator, is_one_operator
from subquad.methods.core.method import METHODS, Method, Partial, Traits, choice, whole
from subquad.methods.core.rectangles import Rectangles, rectangles_of

LAST = 128
H = TypeVar("H", bound="ByHalves")


def default_block(dtype: torch.dtype) -> int:
    """Tokens of a block where `block` is 0: 1,024, and 2,048 in dtypes of 16 bits, whose exact attention is faster."""
    return 2048 if dtype.itemsize <= 2 else 1024


def block_length() -> Any:
    """Declare the setting `block` of a method that is causal by halves; 0 stands for `default_block`."""
    return whole(0)


def last_rows() -> Any:
    """Declare the setting `last` of a method that is causal by halves."""
    return whole(LAST)


def queries_together(*others: str) -> Any:
    """Declare the setting `queries` of a method that is causal by halves."""
    return choice("rectangle", "block", *others)


def future_leak(method: Method) -> str:
    """The reason why a method that is causal by halves is refused under a causal mask in training, and the remedy."""
    return (
        f"{method.label!r} has centroids of queries, later ones too, so training under a causal mask would leak the "
        "future; run it under torch.no_grad(), or train with a method that is strictly causal, such as 'local' or "
        "'clustered-tail:queries=earlier,last=0'"
    )


class ByHalves(Method):
    """A method that is causal by halves. Its class declares the three settings, and its trait `by_halves` is true.

    block: tokens of a block on the diagonal, whose attention is exact; where there is no other block, all of it is.
        0: the number depends on the dtype (`sized_for`).
    last: queries at the end of each item that are exact over all keys.
    queries: whose queries meet the keys of a rectangle together, all of the "rectangle" or those of each "block"; or
        "earlier": clusters are made of the queries at these keys' positions, for methods that have `attend_by_earlier`.
    """

    block: int
    last: int
    queries: str

    # In exact rows, neither `attend` nor `meetings` is called.
    attends_by: ClassVar[frozenset[str]] = (Method.attends_by - {"attend", "meetings"}) | {"attend_causally"}

    def attend_in_rectangle(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        """Attention of the queries of a rectangle to its keys, of which padding may leave fewer."""
        return self.attend(query, key, value, call)

    def attend_by_earlier(self, query: Tensor, earlier: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        """Attention in which clusters are made of `earlier` queries (B,H,M,D), one for each key, and not of `query`."""
        raise NotImplementedError(f"{type(self).__name__} makes no clusters of earlier queries")

    def describe(self) -> Traits:
        """The traits: strictly causal where neither later queries nor the end of an item change anything."""
        traits = super().describe()
        return replace(traits, causal="strict") if self.queries == "earlier" and self.last == 0 else traits

    def sized_for(self: H, dtype: torch.dtype) -> H:
        """The method with the number of tokens that its blocks have in a dtype."""
        if self.block:
            return self
        sizes: dict[str, Any] = {"block": default_block(dtype)}  # a setting that each class declares
        return replace(self, **sizes)

    def rectangles(self, tokens: int, start: int) -> list[Rectangles]:
        """The parts of the attention, as rectangles of pairs, if `tokens` queries come behind `start` keys.

        Raises:
            ValueError: `block` is 0: the parts depend on the dtype (`sized_for`).
        """
        if self.block == 0:
            raise ValueError(
                f"{self.label} has block=0, whose length depends on the dtype: call sized_for(dtype) first"
            )
        parts = [rectangles for group in rectangles_of(tokens, start, self.block) for rectangles in group]
        if self.queries != "block":
            return parts
        return [rows for rectangles in parts for rows in rectangles.in_blocks(self.block)]

    @property
    def exact_queries(self) -> int:
        """The last queries, which are exact over all keys."""
        return self.last

    def attend_for(self, mask: Mask) -> Attend:
        """`attend_causally` under a causal mask."""
        return self.attend_causally if mask.is_causal else self.attend

    def attend_causally(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        """Attention under a causal mask; otherwise as `attend`. Padded queries are 0."""
        is_known = METHODS.get(self.name) is type(self)
        # The last queries alone, such as a step on a cache, are exact, by an operator of their own.
        if query.shape[2] > self.last and is_known and is_one_operator(query, key, value, call):
            return attend_as_operator(str(self), query, key, value, call)
        out, lse = self._by_halves(query, key, value, call)
        valid = call.mask.query_padding(query.shape[2])
        return (out if valid is None else out.masked_fill(~valid[:, None, :, None], 0.0)), lse

    def _by_halves(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        if self.last >= query.shape[2]:
            return exact(query, key, value, call)
        if self.block == 0:
            return self.sized_for(query.dtype)._by_halves(query, key, value, call)
        query, key, value = cleared_inputs(query, key, value, call.mask)
        line = TokenLine.from_mask(query, key, value, call.mask)
        tokens, inner = line.query.shape[2], replace(call, mask=Mask(), wants_lse=True)
        if line.start + tokens > self.block and not (self.queries == "earlier" and tokens <= self.block):
            return self._on_line(line, inner, rounded=not call.wants_lse)
        # One block, or one behind keys that "earlier" queries meet exactly. With "block" it is computed as it is in a
        # longer call, by the kernel that gives the log-sum-exp.
        out, lse = exact(query, key, value, inner.under(call.mask) if self.queries == "block" else call)
        return out, lse

    def _on_line(self, line: TokenLine, call: Call, rounded: bool) -> tuple[Tensor, Tensor]:
        """Attention of the queries of a line of tokens, which blocks divide from each item's first token on.

        If `rounded`, the output has the dtype of the inputs; otherwise it is in fp32 or fp64, to be merged with others.
        """
        order = line.front_order()
        line = line if order is None else line.in_order(order)
        tokens = line.query.shape[2]
        parts = self.rectangles(tokens, line.start)
        outs, lses = zip(*(self._attend(rectangles, line, call) for rectangles in parts), strict=True)
        windows = [rectangles.query_windows for rectangles in parts]
        out, lse = merge_windows(outs, lses, windows, tokens=tokens, rounded=rounded)
        if self.last:
            out, lse = with_last_rows(out, lse, line, self.last, call)
        if line.start and line.valid_keys is not None:
            out, lse = with_short_items(out, lse, line, self.block, call)
        if order is None:
            return out, lse
        back = order.argsort(1)
        return taken(out, back), taken(lse[..., None], back)[..., 0]

    def _attend(self, rectangles: Rectangles, line: TokenLine, call: Call) -> tuple[Tensor, Tensor]:
        """The partials of these rectangles, in one batch: exact on the diagonal, by the method elsewhere."""
        if rectangles.key_step == 0 and len(line.query) > 1:  # as one batch, these keys would be copied for each block
            items = [
                self._attend(rectangles, line.item(number), call.of_item(number)) for number in range(len(line.query))
            ]
            outs, lses = zip(*items, strict=True)
            return torch.cat(outs), torch.cat(lses)
        query = _as_batch(rectangles.of_queries(line.query))
        key, value = (_as_batch(rectangles.of_keys(x)) for x in (line.key, line.value))
        keys = None if line.valid_keys is None else rectangles.of_keys(line.valid_keys).flatten(0, 1)
        queries = None if line.valid_queries is None else rectangles.of_queries(line.valid_queries).flatten(0, 1)
        if rectangles.diagonal:
            hidden = keys is not None and not line.hides_only_padding
            mask = Mask.causal() & Mask.padding(keys=keys) if hidden else Mask.causal()
            out, lse = exact(query, key, value, call.under(mask))
        else:
            offsets = rectangles.offsets(line.start, query.device)
            mask = Mask(offset=offsets.repeat(len(line.query)) if isinstance(offsets, Tensor) else offsets)
            mask = mask if keys is None else mask & Mask.padding(keys=keys)
            mask = mask if queries is None else mask & Mask.padding(queries=queries)
            method, inner = self.clamped_to(rectangles.queries, rectangles.keys), call.under(mask)
            if self.queries != "earlier":
                out, lse = method.attend_in_rectangle(query, key, value, inner)
            elif rectangles.key < line.start:
                out, lse = exact(query, key, value, inner)
            else:
                earlier = _as_batch(rectangles.of_keys(F.pad(line.query, (0, 0, line.start, 0))))
                if call.rotary is not None:
                    earlier = call.rotary.turned(earlier, line.start + rectangles.query - rectangles.key)
                out, lse = method.attend_by_earlier(query, earlier, key, value, inner)
        assert lse is not None
        return out, lse


@dataclass(frozen=True)
class TokenLine:
    """Tokens in a line: `start` keys, and then one key for each query."""

    query: Float[Tensor, "B H N D"]
    key: Float[Tensor, "B G M D"]
    value: Float[Tensor, "B G M E"]
    valid_queries: Bool[Tensor, "B N"] | None
    valid_keys: Bool[Tensor, "B M"] | None
    start: int

    @staticmethod
    def from_mask(query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> TokenLine:
        """The line of a causal call. Queries of items that are behind caches of different lengths begin together.

        keys, two queries at 1 and 3    0 1 2 · ·       the line, start = 3    · · 0 1 2
                                        0 1 2 3 4                              0 1 2 3 4
        """
        N, M, start = query.shape[2], key.shape[2], first_position(mask)
        queries, keys = mask.query_padding(N), mask.key_padding(M)
        if start is not None:
            return TokenLine(query, key, value, queries, keys, start).with_a_key_for_each_query()
        zero = torch.zeros(len(query), 1, dtype=torch.int64, device=query.device)
        starts = mask.positions(zero).clamp(max=M)  # behind the last key, each query meets all of them
        start = int(starts.max().clamp(min=0)) if shapes_may_follow_data(starts) else M
        at = starts - start + torch.arange(start + N, device=query.device)
        keys = torch.ones(len(key), M, dtype=torch.bool, device=key.device) if keys is None else keys
        queries = torch.ones(len(query), N, dtype=torch.bool, device=query.device) if queries is None else queries
        present, at = (at >= 0) & (at < M), at.clamp(0, M - 1)
        return TokenLine(query, taken(key, at), taken(value, at), queries, present & keys.gather(1, at), start)

    def with_a_key_for_each_query(self) -> TokenLine:
        """The line without keys behind the last query, and with hidden ones for queries behind the last key."""
        end, M = self.start + self.query.shape[2], self.key.shape[2]
        valid = self.valid_keys
        if end > M and valid is None:
            valid = torch.ones(len(self.key), M, dtype=torch.bool, device=self.key.device)
        valid = None if valid is None else F.pad(valid, (0, end - M))
        return replace(self, key=_to_length(self.key, end), value=_to_length(self.value, end), valid_keys=valid)

    @property
    def hides_only_padding(self) -> bool:
        """True if it is known that each hidden key is a padded query too, after which there is no other query."""
        queries, keys = self.valid_queries, self.valid_keys
        if queries is None or keys is None or not shapes_may_follow_data(queries, keys):
            return False
        return torch.equal(queries, keys[:, self.start :])

    def item(self, number: int) -> TokenLine:
        """The line of one item alone."""
        at = slice(number, number + 1)
        queries, keys = (None if valid is None else valid[at] for valid in (self.valid_queries, self.valid_keys))
        return TokenLine(self.query[at], self.key[at], self.value[at], queries, keys, self.start)

    def present(self) -> Bool[Tensor, "B N"] | None:
        """The tokens that are real as a query or as a key; None: all are."""
        if self.valid_queries is None or self.valid_keys is None:
            return None
        return self.valid_queries | self.valid_keys[:, self.start :]

    def front_order(self) -> Int64[Tensor, "B N"] | None:
        """The order in which each item's real tokens come first; None where they do."""
        present = self.present()
        if present is None or (shapes_may_follow_data(present) and bool((present[:, :-1] >= present[:, 1:]).all())):
            return None
        return front_first(present)

    def in_order(self, order: Int64[Tensor, "B N"]) -> TokenLine:
        """The line with its queries, and their keys, in another order."""
        of_keys = torch.cat(
            [torch.arange(self.start, device=order.device).expand(len(order), -1), order + self.start], 1
        )
        queries, keys = self.valid_queries, self.valid_keys
        return TokenLine(
            taken(self.query, order),
            taken(self.key, of_keys),
            taken(self.value, of_keys),
            None if queries is None else queries.gather(1, order),
            None if keys is None else keys.gather(1, of_keys),
            self.start,
        )


def with_last_rows(out: Tensor, lse: Tensor, line: TokenLine, last: int, call: Call) -> tuple[Tensor, Tensor]:
    """The partial in which the last real queries of each item are exact over all keys."""
    N, present = line.query.shape[2], line.present()
    count = min(last, N)
    if present is None:
        mask = Mask.causal(offset=line.start + N - count)
        mask = mask if line.valid_keys is None else mask & Mask.padding(keys=line.valid_keys)
        exact_out, exact_lse = exact(line.query[:, :, N - count :], line.key, line.value, call.under(mask))
        assert exact_lse is not None
        return _ending_with(out, exact_out), _ending_with(lse, exact_lse)
    device = out.device
    lengths, token = present.sum(1)[:, None], torch.arange(N, device=device)
    rows = lengths - count + torch.arange(count, device=device)  # below 0 in an item that has fewer
    allowed = torch.arange(line.key.shape[2], device=device) <= (line.start + rows)[..., None]
    allowed = allowed if line.valid_keys is None else allowed & line.valid_keys[:, None]
    mask = Mask.dense(allowed[:, None])
    exact_out, exact_lse = exact(taken(line.query, rows.clamp(min=0)), line.key, line.value, call.under(mask))
    assert exact_lse is not None
    among = token - (lengths - count)
    is_last = ((among >= 0) & (token < lengths))[:, None]
    at = among.clamp(0, count - 1)
    out = torch.where(is_last[..., None], taken(exact_out, at), out)
    return out, torch.where(is_last, taken(exact_lse[..., None], at)[..., 0], lse)


def with_short_items(out: Tensor, lse: Tensor, line: TokenLine, block: int, call: Call) -> tuple[Tensor, Tensor]:
    """The partial in which items with no more than `block` tokens, those of a cache too, are exact, as they are alone.

    Each item's real queries come first in the line.
    """
    assert line.valid_keys is not None
    N, M, present = line.query.shape[2], line.key.shape[2], line.present()
    lengths = line.valid_keys[:, : line.start].sum(1) + (N if present is None else present.sum(1))
    short = lengths <= block
    if shapes_may_follow_data(short) and not short.any():
        return out, lse
    first, at = min(N, block), front_first(line.valid_keys)[:, : min(M, block)]
    allowed = line.valid_keys.gather(1, at)[:, None] & (
        at[:, None] <= line.start + torch.arange(first, device=at.device)[:, None]
    )
    inputs = line.query[:, :, :first], taken(line.key, at), taken(line.value, at)
    exact_out, exact_lse = exact(*inputs, call.under(Mask.dense(allowed[:, None])))
    assert exact_lse is not None
    is_short = short[:, None] & (torch.arange(N, device=at.device) < first)
    out = torch.where(is_short[:, None, :, None], _to_length(exact_out, N), out)
    return out, torch.where(is_short[:, None], F.pad(exact_lse, (0, N - first)), lse)


def _ending_with(x: Tensor, last: Tensor) -> Tensor:
    """The tensor with other rows at its end; in place where nobody differentiates it."""
    first = x.shape[2] - last.shape[2]
    if x.requires_grad or last.requires_grad:
        return torch.cat([x[:, :, :first], last], 2)
    x[:, :, first:] = last
    return x


def first_position(mask: Mask) -> int | None:
    """The position of the first query among the keys; None if it differs between items, or cannot be read here."""
    offset = mask.offset
    if not isinstance(offset, Tensor):
        return offset or 0
    if not shapes_may_follow_data(offset):
        return None
    first = int(offset.min())
    return first if first >= 0 and first == int(offset.max()) else None


def _as_batch(x: Float[Tensor, "B H R n D"]) -> Float[Tensor, "BR H n D"]:
    return x.transpose(1, 2).flatten(0, 1)


def _to_length(x: Float[Tensor, "B G M D"], length: int) -> Float[Tensor, "B G {length} D"]:
    return x[:, :, :length] if length <= x.shape[2] else F.pad(x, (0, 0, 0, length - x.shape[2]))
