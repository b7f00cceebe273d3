"""Tilted pools of a split sequence: near keys from the neighbouring ranks, sinks from all, pools merged over ranks.

With a window, one exchange: to each other rank a rank sends the keys and values at its border that may be near there,
its share of the sinks, and what it has of the pools that is in no block near that rank's queries. Pools that a rank's
own line cuts are completed there (`tokens.neighbourhood`). Without a window, the sinks and the whole pools.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from subquad.distributed.rows import Rows, combine_together, summed
from subquad.distributed.strategies import Strategy, register
from subquad.distributed.token_split import TokenSplit
from subquad.distributed.tokens.global_index import GlobalIndex, global_indices
from subquad.distributed.tokens.neighbourhood import Neighbourhood, are_sinks, ends_present
from subquad.kernels.attention.pairs.op import attend_pairs
from subquad.kernels.precision import upcast
from subquad.kernels.selection.blocks.op import by_bucket
from subquad.kernels.tokens.heads import repeat_heads
from subquad.kernels.tokens.slots import Buckets, rows_at
from subquad.kernels.tokens.split_pools import Half, empty, halves, joined, merged, pooled_by, running, sizes_of_items
from subquad.masks import Mask
from subquad.methods.core.call import Call
from subquad.methods.tilted_pool import TiltedPool

BLOCK = 64  # queries of a block where all of them meet the same keys

Partial = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class PoolShares:
    """Tokens of a cell, cells of a block, cells of a pool of each item; a pool has at most `longest` cells."""

    cell: Int64[Tensor, "B 1"]
    block: Int64[Tensor, "B 1"]
    pool: Int64[Tensor, "B 1"]
    longest: int


@dataclass(frozen=True)
class TiltedCall:
    """A call: the method, its learned parameters, and this rank's tokens."""

    method: TiltedPool
    call: Call
    split: TokenSplit
    side: GlobalIndex
    sizes: PoolShares
    D: int

    @property
    def scale(self) -> float:
        """The scale of the logits."""
        return self.call.scale

    def pooled(
        self, key: Tensor, value: Tensor, label: Int64[Tensor, "B N"], shown: Bool[Tensor, "B N"], pools: int
    ) -> Float[Tensor, "B G P X"]:
        """Keys and values of the shown tokens by label, as the tilts weigh them."""
        towards = (self.call.learned.towards, key), (self.call.learned.of_values, value)
        logits = [(key @ mu.to(key.dtype)[:, :, None]).squeeze(-1) * self.scale for mu, _ in towards]
        parts = (pooled_by(x, mu, label, shown, pools) for x, (_, mu) in zip(logits, towards, strict=True))
        return joined(*parts)

    def bias(self, pools: Half, heads: int) -> tuple[Float[Tensor, "B H P"], Bool[Tensor, "B P"]]:
        """The bias of the logits of pooled keys, and a bool that marks the pools that have a token."""
        (key, mass), tilt = pools, self.call.learned
        present = (mass > torch.finfo(mass.dtype).min / 2).any(1)
        slope = (key * tilt.towards.to(key.dtype)[:, None]).sum(-1) * self.scale
        added = torch.where(present[:, None], mass - slope, 0.0)
        return repeat_heads(added[..., None], heads)[..., 0] + tilt.shift.to(key.dtype)[:, None], present

    @property
    def pool_tokens(self) -> Int64[Tensor, "B 1"]:
        """Tokens of a pool."""
        return self.sizes.cell * self.sizes.pool


def attend(method: TiltedPool, query: Tensor, key: Tensor, value: Tensor, call: Call, split: TokenSplit) -> Partial:
    """Near keys, sinks and pools in one softmax."""
    query, key, value = upcast(query, key, value)
    mask = call.mask
    if method.window and (mask.keys or mask.queries):
        raise ValueError(
            "'tilted-pool' with mode='summary' takes one padding for both sides; use Mask.padding(real), or "
            "mode='heads'"
        )
    queries, side = global_indices(mask, query, key, split)
    tilted = TiltedCall(method, call, split, side, _sizes(method, side, split), key.shape[3])
    return (_with_near if method.window else _without_near)(tilted, queries, query, key, value)


def _sizes(method: TiltedPool, side: GlobalIndex, split: TokenSplit) -> PoolShares:
    tokens, w = side.tokens[:, None], method.window
    if method.pools == 0:
        return PoolShares(torch.full_like(tokens, w), torch.ones_like(tokens), torch.ones_like(tokens), 1)
    pooled = (-(-tokens // method.pools)).clamp(min=1)
    longest = -(-split.sizes[1] // method.pools)
    return PoolShares(*sizes_of_items(pooled, w), max(1, longest // w) if w else 1)


def _inner(side: GlobalIndex, sinks: int) -> Bool[Tensor, "B M"]:
    """The tokens of the pools."""
    return side.valid & ~are_sinks(side.index, side, sinks, causal=False)


def _without_near(tilted: TiltedCall, queries: GlobalIndex, query: Tensor, key: Tensor, value: Tensor) -> Partial:
    method, side, split = tilted.method, tilted.side, tilted.split
    (B, H), k, s = query.shape[:2], method.pools, method.sinks
    label = side.index // tilted.pool_tokens
    pools = tilted.pooled(key, value, label.expand(B, -1), _inner(side, s), k)
    ends = side.ends(torch.cat([key, value], dim=3), s)
    of_rank = Rows(pools, lambda parts: [merged(list(parts), tilted.D)] * len(parts))
    whole, ends = combine_together([of_rank, summed(ends)], split.group)
    sinks = ends.split([tilted.D, value.shape[3]], dim=3)
    of_keys, (of_values, _) = halves(whole, tilted.D)
    bias, present = tilted.bias(of_keys, H)
    present = torch.cat([ends_present(side, s), present], dim=1)
    bias = torch.cat([bias.new_zeros(B, H, 2 * s), bias], dim=2)
    keys, values = torch.cat([sinks[0], of_keys[0]], dim=2), torch.cat([sinks[1], of_values], dim=2)
    slots = torch.where(present, torch.arange(2 * s + k, device=key.device), 2 * s + k)[:, None]
    return _attended(tilted, query, keys, values, bias, slots, torch.where(queries.valid, 0, 1), BLOCK)


def _attended(
    tilted: TiltedCall,
    query: Float[Tensor, "B H N D"],
    keys: Float[Tensor, "B G M D"],
    values: Float[Tensor, "B G M E"],
    bias: Float[Tensor, "B H M"],
    slots: Int64[Tensor, "B T K"],
    label: Int64[Tensor, "B N"],
    size: int,
) -> Partial:
    """Attention of the queries of each block to the keys of its slots."""
    H = query.shape[1]
    queries, block = by_bucket(label[:, None], slots.shape[1], size)
    queries, keys_of, block = (x.expand(-1, H, *x.shape[2:]) for x in (queries, slots[:, None], block))
    buckets = Buckets(queries, keys_of, block)
    return attend_pairs(query, keys, values, buckets, Mask(), scale=tilted.scale, key_bias=bias)


def _with_near(tilted: TiltedCall, queries: GlobalIndex, query: Tensor, key: Tensor, value: Tensor) -> Partial:
    method, side, split, sizes = tilted.method, tilted.side, tilted.split, tilted.sizes
    (B, H), k, s, w = query.shape[:2], method.pools, method.sinks, method.window
    block = (sizes.cell * sizes.block)[:, 0]
    lines = Neighbourhood(side, split, block, w if k == 0 else 2 * w - 1)  # a block has less than twice the window
    rows = torch.cat([key, value], dim=3)
    none = empty(key, k, tilted.D, value.shape[3])
    left: list[Tensor | None] = _left(tilted, lines, key, value) if k else [none for _ in split.lengths]
    edges, ends, sums = lines.exchange(rows, side.ends(rows, s), left, none, is_causal=False)

    line, width = torch.cat([rows, *edges], dim=2), [tilted.D, value.shape[3]]
    slots = lines.slots()
    shown = (slots < line.shape[2]) & ~are_sinks(lines.numbers(), side, s, causal=False)
    line_key, line_value = rows_at(line, slots).split(width, dim=3)
    sink_key, sink_value = ends.split(width, dim=3)
    keys, values, bias = [line_key, sink_key], [line_value, sink_value], query.new_zeros(B, H, lines.length + 2 * s)
    blocks = LineBlocks.make(tilted, lines)
    lists = [blocks.near(shown), blocks.all(ends_present(side, s), lines.length)]
    if k:
        pools = _pools(tilted, lines, line_key, line_value, shown, [x for x in sums if x is not None])
        of_keys, (of_values, _) = halves(pools, tilted.D)
        keys, values = [*keys, of_keys[0]], [*values, of_values]
        added, present = tilted.bias(of_keys, H)
        lists.append(blocks.pools(present, bias.shape[2]))
        bias = torch.cat([bias, added], dim=2)
    none_slot = bias.shape[2]
    joined = torch.cat([torch.where(x < 0, none_slot, x) for x in lists], dim=2)
    label = torch.where(side.valid, lines.line_positions() // block[:, None], blocks.T)
    return _attended(tilted, query, torch.cat(keys, 2), torch.cat(values, 2), bias, joined, label, lines.most)


def _left(tilted: TiltedCall, lines: Neighbourhood, key: Tensor, value: Tensor) -> list[Tensor | None]:
    """For each other rank, what this one has of the pools outside its line."""
    side, k = tilted.side, tilted.method.pools
    label = (side.index // tilted.pool_tokens).expand(len(key), -1)[:, None, :, None].expand(*value.shape[:3], 1)

    def summed(key: Tensor, both: Tensor, shown: Tensor) -> Tensor:
        value, label = both.split([both.shape[3] - 1, 1], dim=3)
        return tilted.pooled(key, value, label[:, 0, :, 0].detach().long(), shown, k)

    both = torch.cat([value, label.to(value.dtype)], dim=3)
    inner = _inner(side, tilted.method.sinks)
    return lines.sums_for_others(key, both, summed, lambda parts: merged(parts, tilted.D), False, inner)


def _pools(
    tilted: TiltedCall, lines: Neighbourhood, key: Tensor, value: Tensor, shown: Tensor, others: list[Tensor]
) -> Float[Tensor, "B G P X"]:
    """The pools before the line, for each cell of the line what its pool has up to it, and from it on; those behind."""
    rank, sizes, B = lines.split.rank, tilted.sizes, len(key)
    before, behind = (merged(part, tilted.D) for part in (others[: rank + 1], others[rank:]))
    position = torch.arange(lines.length, device=key.device)
    cells = tilted.pooled(key, value, (position // sizes.cell).expand(B, -1), shown, lines.length)
    number = lines.begin[rank][:, None] // sizes.cell + position
    pool = number // sizes.pool
    at = pool.clamp(0, tilted.method.pools - 1)
    first, last = (rows_at(x, at) for x in (before, behind))
    upto = _running(cells, pool, sizes.longest, tilted.D)
    onward = _running(cells.flip(2), pool.flip(1), sizes.longest, tilted.D).flip(2)
    return torch.cat([before, merged([first, upto], tilted.D), merged([onward, last], tilted.D), behind], dim=2)


def _running(cells: Tensor, pool: Tensor, longest: int, D: int) -> Tensor:
    return joined(*(running(half, pool, longest) for half in halves(cells, D)))


@dataclass(frozen=True)
class LineBlocks:
    """The blocks of this rank's line, as numbers of its places and cells; −1 for what is not there.

    Attributes:
        low: the place at which what is near a block begins; `high`: where it ends. `cell`, `pool`: as in `Sizes`.
        start: the number of the line's first cell in the item; `cells`: how many cells the line has.
    """

    T: int
    L: int
    k: int
    near_tokens: int
    low: Int64[Tensor, "B T"]
    high: Int64[Tensor, "B T"]
    cell: Int64[Tensor, "B 1"]
    pool: Int64[Tensor, "B 1"]
    start: Int64[Tensor, "B 1"]
    cells: Int64[Tensor, "B 1"]

    @staticmethod
    def make(tilted: TiltedCall, lines: Neighbourhood) -> "LineBlocks":
        """Lay out the line of this rank."""
        sizes, rank = tilted.sizes, lines.split.rank
        T = -(-lines.length // tilted.method.window)
        block = torch.arange(T, device=lines.block.device)
        begin, end = lines.begin[rank][:, None], lines.end[rank][:, None]
        return LineBlocks(
            T,
            lines.length,
            tilted.method.pools,
            3 * lines.most,
            (block - 1) * lines.block[:, None],
            (block + 2) * lines.block[:, None],
            sizes.cell,
            sizes.pool,
            begin // sizes.cell,
            (end - begin) // sizes.cell,
        )

    def near(self, shown: Bool[Tensor, "B L"]) -> Int64[Tensor, "B T K"]:
        """The places near each block that are shown."""
        token = self.low[..., None] + torch.arange(self.near_tokens, device=self.low.device)
        inside = (token >= 0) & (token < self.L) & (token < self.high[..., None])
        visible = shown.gather(1, token.clamp(0, self.L - 1).flatten(1)).view_as(token)
        return torch.where(inside & visible, token, -1)

    def all(self, visible: Bool[Tensor, "B S"], first: int) -> Int64[Tensor, "B T S"]:
        """Keys that every block sees, which are numbered from `first` on."""
        number = torch.where(visible, first + torch.arange(visible.shape[1], device=visible.device), -1)
        return number[:, None].expand(-1, self.T, -1)

    def pools(self, filled: Bool[Tensor, "B P"], first: int) -> Int64[Tensor, "B T K"]:
        """The parts of pools that are not near a block, in the numbers of `_pools`, which begin at `first`.

        A pool may have a part before what is near and one behind it, but only that in which what is near begins.
        """
        pool = torch.arange(self.k, device=self.low.device)
        before, behind = self._before(pool), self._behind(pool)
        cut = ((self.low[..., None] // self.cell[..., None] + self.start[..., None]) // self.pool[..., None]).clamp(
            0, self.k - 1
        )
        also = torch.where(self._before(cut) >= 0, self._behind(cut), -1)
        number = torch.cat([torch.where(before >= 0, before, behind), also], dim=2)
        visible = filled.gather(1, number.clamp(min=0).flatten(1)).view_as(number)
        return torch.where((number >= 0) & visible, first + number, -1)

    def _span(self, pool: Tensor) -> tuple[Tensor, Tensor]:
        begin = pool * self.pool[..., None] - self.start[..., None]
        return begin, begin + self.pool[..., None]

    def _before(self, pool: Tensor) -> Int64[Tensor, "B T K"]:
        begin, end = self._span(pool)
        low = (self.low // self.cell)[..., None]
        last = end.minimum(low) - 1
        return torch.where(begin >= low, -1, torch.where(last < 0, pool, self.k + last))

    def _behind(self, pool: Tensor) -> Int64[Tensor, "B T K"]:
        begin, end = self._span(pool)
        high = (self.high // self.cell)[..., None]
        first = begin.maximum(high)
        inside = self.k + self.L + first
        return torch.where(
            end <= high, -1, torch.where(first >= self.cells[..., None], self.k + 2 * self.L + pool, inside)
        )


register(TiltedPool, Strategy(kind="partials", attend=attend))
