"""Tilted pool: the keys near a query exactly, all others as a few pooled keys whose weights are learned.

The item's n real tokens, in order, are cut into runs of ⌈n / `pools`⌉, one for each pool. For pool r and each key head

    w_j   = softmax_{j in r}(scale·μ·k_j),   lse_r = ln Σ_{j in r} e^{scale·μ·k_j},   k̄_r = Σ_j w_j k_j
    w′_j  = softmax_{j in r}(scale·μ′·k_j),                                         v̄_r = Σ_j w′_j v_j
    out_i = one softmax over the keys near i and the sinks, with logits scale·q_i·k_j,
            and over the other pools, with logits scale·(q_i − μ)·k̄_r + lse_r + b

The second kind of logit is the first-order expansion of ln Σ_{j in r} e^{scale·q_i·k_j} at q_i = μ, exact there. At
μ = 0 it is that of a plain mean, and + ln of the number of keys. μ, μ′ and b start at 0 and are learned.

==========  ====================================
here        in the code
==========  ====================================
μ, μ′, b    `towards`, `of_values`, `shift`
k̄, lse      `Pools.key`, `Pools.mass`
v̄           `Pools.value`
==========  ====================================

**Near** are the keys of a query's own block and of the two next to it. A block is a whole number of pools, of at
least `window` tokens; where pools are longer than the window, a pool is a whole number of blocks instead. What is near
then cuts a pool, and what is left of it before and behind is pooled by itself. So each key counts exactly once.
**Sinks** are the first and the last tokens of the item: exact for every query, and in no pool.

An extension of Linformer (Wang et al. 2020), whose projection of keys does not depend on what the keys are. Not causal:
the pools are those of the whole item.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from subquad.kernels.attention.pairs.op import attend_pairs
from subquad.kernels.attention.softmax import hide, logsumexp, visible_softmax
from subquad.kernels.selection.blocks.op import by_bucket
from subquad.kernels.tokens.heads import repeat_heads
from subquad.kernels.tokens.positions import ValidIndex, ValidPositions
from subquad.kernels.tokens.slots import Buckets, vectors_at
from subquad.kernels.tokens.split_pools import Half, one_after_the_other, running, sizes_of_items
from subquad.masks import Mask
from subquad.methods.core.fitting import output_error
from subquad.methods.core.method import Call, Fit, Method, Partial, Traits, upcast, whole

BLOCK = 64  # queries of a block where all of them meet the same keys


class Tilt(nn.Module):
    """μ and μ′ of each key head, and b of each query head."""

    by_query_head: ClassVar[tuple[str, ...]] = ("shift",)
    by_key_head: ClassVar[tuple[str, ...]] = ("towards", "of_values")

    def __init__(self, heads: int, kv_heads: int, head_dim: int):
        super().__init__()
        self.towards = nn.Parameter(torch.zeros(kv_heads, head_dim))
        self.of_values = nn.Parameter(torch.zeros(kv_heads, head_dim))
        self.shift = nn.Parameter(torch.zeros(heads))


class PoolSizes(NamedTuple):
    """Tokens of a cell, cells of a block of queries, cells of a pool. One of the last two is 1."""

    cell: int
    block: int
    pool: int


def sizes_of(pool: int, window: int) -> PoolSizes:
    """Sizes with cells for pools of `pool` tokens or a few more, and blocks of at least `window` tokens."""
    if pool <= window:
        return PoolSizes(pool, -(-window // pool), 1)
    cells = pool // window if window else 1
    return PoolSizes(-(-pool // cells), 1, cells)


@dataclass(frozen=True)
class PoolLayout:
    """The sizes of each item, and how many cells, blocks, tokens of a cell, … an item has at most."""

    ranks: ValidIndex
    cell: Int64[Tensor, "B 1"]
    block: Int64[Tensor, "B 1"]
    pool: Int64[Tensor, "B 1"]
    cells: int
    blocks: int
    longest: PoolSizes
    near: int  # tokens of a block


def layout_of(valid: Bool[Tensor, "B M"] | None, B: int, M: int, device: torch.device, k: int, w: int) -> PoolLayout:
    """Lay out k pools of each item, or blocks alone where k is 0."""
    if not isinstance(M, int):
        raise ValueError(
            "'tilted-pool' lays out its pools by the length, so it is exported for one length; leave the length out "
            "of `dynamic_shapes`"
        )
    longest = -(-M // k) if k else w
    ranks = ValidIndex.from_mask(valid, B, M, device)
    pooled = (-(-ranks.lengths // k)).clamp(min=1) if k else torch.full_like(ranks.lengths, longest)
    lengths = range(1, longest + 1) if k and valid is not None else [longest]
    some = {size: sizes_of(size, w) for size in lengths}
    cell, block, pool = sizes_of_items(pooled[:, None], w)
    ends = {size: min(M, size * k) if k else M for size in some}
    return PoolLayout(
        ranks,
        cell,
        block,
        pool,
        cells=max(-(-ends[size] // layout.cell) for size, layout in some.items()),
        blocks=max(-(-ends[size] // (layout.cell * layout.block)) for size, layout in some.items()),
        longest=PoolSizes(*(max(sizes) for sizes in zip(*some.values(), strict=True))),
        near=max(layout.cell * layout.block for layout in some.values()),
    )


@dataclass(frozen=True)
class Pools:
    """Half keys and values: k̄, lse, v̄; a pool without keys is not `present`."""

    key: Float[Tensor, "B G P D"]
    mass: Float[Tensor, "B G P"]
    value: Float[Tensor, "B G P E"]
    present: Bool[Tensor, "B P"]


def pools_of(key: Tensor, value: Tensor, tilt: Tilt, layout: PoolLayout, scale: float, sinks: int, k: int) -> Pools:
    """The k whole pools, then what of its pool is up to each cell, then what is from each cell on."""
    G, M = key.shape[1:3]
    numbers = torch.arange(layout.cells, device=key.device)
    first = numbers * layout.cell
    inner = (layout.ranks.lengths[:, None] - sinks).clamp(min=0)
    end = (first + layout.cell).minimum(inner)
    tokens = layout.ranks.between(first.clamp(min=sinks), end, layout.longest.cell).tokens
    tokens = tokens[:, None].expand(-1, G, -1, -1)
    keys, values, inside = vectors_at(key, tokens), vectors_at(value, tokens), tokens < M

    pool = numbers // layout.pool
    last = ((torch.arange(min(k, layout.cells), device=key.device) + 1) * layout.pool - 1).clamp(max=layout.cells - 1)

    def pooled(towards: Tensor, pooling: Tensor) -> Half:
        logits = (keys @ towards.to(key.dtype)[:, None, :, None])[..., 0] * scale
        weights = visible_softmax(logits, inside)
        cells = (weights[..., None, :] @ pooling)[..., 0, :], logsumexp(hide(logits, inside))
        if layout.longest.pool == 1:  # a pool is a cell, and nothing near cuts it
            return cells
        upto = running(cells, pool, layout.longest.pool)
        onward = running(_flipped(cells), pool.flip(1), layout.longest.pool)
        return one_after_the_other([_picked(upto, last), upto, _flipped(onward)])

    (pooled_key, mass), (pooled_value, _) = pooled(tilt.towards, keys), pooled(tilt.of_values, values)
    present = ~(mass <= torch.finfo(mass.dtype).min / 2).all(1)  # NaN is there
    return Pools(pooled_key, mass, pooled_value, present)


def _flipped(part: Half) -> Half:
    return part[0].flip(2), part[1].flip(2)


def _picked(part: Half, numbers: Int64[Tensor, "B S"]) -> Half:
    out, lse = part
    at = numbers[:, None].expand(-1, lse.shape[1], -1)
    return out.gather(2, at[..., None].expand(*at.shape, out.shape[3])), lse.gather(2, at)


def blocks_of(mask: Mask, N: int, layout: PoolLayout, window: int) -> tuple[Tensor, Tensor]:
    """The queries by blocks, and the block of each: (B,T,S) and (B,T). Without a window all are of block 0."""
    B, M = layout.ranks.order.shape
    valid = mask.query_padding(N)
    blocks = layout.blocks if window else 1
    if window:
        ranks = ValidPositions(mask, valid, mask.key_padding(M), B, N, M, layout.cell.device).query_ranks
        labels = (ranks // (layout.cell * layout.block)).clamp(max=blocks - 1)
    else:
        labels = torch.zeros(B, N, dtype=torch.int64, device=layout.cell.device)
    labels = labels if valid is None else labels.masked_fill(~valid, blocks)
    queries, bucket = by_bucket(labels[:, None], blocks, layout.near if window else BLOCK)
    return queries[:, 0], bucket[:, 0]


def keys_of_blocks(layout: PoolLayout, pools: Pools | None, window: int, sinks: int, k: int) -> Int64[Tensor, "B T K"]:
    """For each block its near keys, the sinks and its pools, which are numbered from M on; no key appears twice."""
    B, M = layout.ranks.order.shape
    device = layout.cell.device
    block = torch.arange(layout.blocks if window else 1, device=device).expand(B, -1)
    low, high = ((block - 1) * layout.block, (block + 2) * layout.block) if window else (block, block)
    first, end = low * layout.cell, high * layout.cell
    exact = layout.ranks.ends(sinks, sinks, block.shape[1])
    if window:
        exact = exact | layout.ranks.between(first, end, 3 * layout.near)
    lists = [exact.tokens]
    # What is near cuts a pool where pools are longer than the window. With pools of 6 cells, the queries of cell 9 meet
    #
    #     cell   0  1  2  3  4  5 |  6  7  8  9 10 11 | 12 13 14 15 16 17
    #            ---- pool 0 ---- | up to ( exact ) on | ---- pool 2 -----    low = 8, high = 11
    #
    # pools 0 and 2 whole, of pool 1 what is up to cell low − 1 and what is from cell `high` on, and no key twice.
    # `pools_of` numbers them: the whole pools, then for each cell what is up to it, then what is from it on.
    if pools is not None:
        none = M + pools.present.shape[1]
        present = torch.cat([pools.present, pools.present.new_zeros(B, 1)], dim=1)
        whole_pools = min(k, layout.cells)
        begin = torch.arange(whole_pools, device=device) * layout.pool[..., None]  # its first cell
        before, behind = begin + layout.pool[..., None] <= low[..., None], begin >= high[..., None]
        apart = (before | behind) & (begin < layout.cells)
        asked = [torch.where(apart, torch.arange(whole_pools, device=device), none - M)]
        if layout.longest.pool > 1:
            cut = (low >= 1) & (low % layout.pool != 0)
            asked.append(torch.where(cut, whole_pools + low - 1, none - M)[..., None])
            cut = (high < layout.cells) & (high % layout.pool != 0)
            asked.append(torch.where(cut, whole_pools + layout.cells + high, none - M)[..., None])
        numbers = torch.cat(asked, dim=2)
        visible = present.gather(1, numbers.flatten(1)).view_as(numbers)
        lists = [torch.where(x < M, x, none) for x in lists] + [torch.where(visible, M + numbers, none)]
    return torch.cat(lists, dim=2)


@dataclass(frozen=True)
class TiltedPool(Method):
    """Exact attention to near keys and sinks, and to learned pools of all others. Only as a bound method.

    Args:
        pools: pools of each item. 0: none; then it is the window and the sinks alone, and nothing is learned.
        window: tokens to each side that are exact for a query, at least. 0: none, and cross-attention too.
        sinks: tokens at either end of the item that are exact for every query.

    >>> import torch, subquad as sq
    >>> layer = sq.nn.MultiheadAttention(64, 4, method=sq.TiltedPool(pools=8, window=4))
    >>> layer(torch.randn(2, 100, 64)).shape
    torch.Size([2, 100, 64])
    """

    pools: int = whole(64, clamped=True)
    window: int = whole(16, clamped=True)
    sinks: int = whole(1, clamped=True)

    name: ClassVar[str] = "tilted-pool"
    traits: ClassVar[Traits] = Traits(
        family="summary",
        cross=False,
        dropout="attention weights of near keys, sinks and pools",
        order_free=False,
        positional=True,
        learned=True,
        fit=Fit(metric="error", learning_rate=5e-2, steps=300),
        exact_limit={"window": "N"},
        example={"pools": 6, "window": 3},
        complexity="O(N·(S + W)·D) time for S pools and a window of W, O(N·D) memory",
        source="extends Wang et al. 2020",
        zeroes_padding=True,  # it is in no block
    )

    def check(self) -> None:
        """Raise ValueError if there is neither a pool nor a window."""
        if self.pools == self.window == 0:
            raise ValueError(f"{self.name!r}: pools=0 and window=0 leave a query nothing but the sinks; give one")

    def describe(self) -> Traits:
        """The traits: only pools are learned, and cross-attention needs window=0."""
        traits = type(self).traits
        if self.pools == 0:
            return replace(traits, learned=False, fit=None)
        return traits if self.window else replace(traits, cross=True, order_free=True, exact_limit={"pools": "M"})

    def make_learned(self, heads: int, kv_heads: int, head_dim: int, max_length: int | None) -> nn.Module | None:
        """μ, μ′ and b, all 0."""
        return Tilt(heads, kv_heads, head_dim) if self.pools else None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        """Pool the keys, and attend to near keys, sinks and pools together."""
        query, key, value = upcast(query, key, value)
        (B, H, N, _), M, mask = query.shape, key.shape[2], call.mask
        layout = layout_of(mask.key_padding(M), B, M, key.device, self.pools, self.window)
        pools, bias = None, None
        if self.pools:
            assert isinstance(call.learned, Tilt)
            pools = pools_of(key, value, call.learned, layout, call.scale, self.sinks, self.pools)
            # A pool's logit is scale·(q − μ)·k̄ + lse + b = scale·q·k̄ + (lse − scale·μ·k̄ + b): the bracket is its bias.
            slope = (pools.key * call.learned.towards.to(key.dtype)[:, None]).sum(-1) * call.scale
            added = torch.where(pools.present[:, None], pools.mass - slope, 0.0)
            added = repeat_heads(added[..., None], H)[..., 0] + call.learned.shift.to(key.dtype)[:, None]
            bias = torch.cat([added.new_zeros(B, H, M), added], dim=2)
            key, value = torch.cat([key, pools.key], dim=2), torch.cat([value, pools.value], dim=2)
        queries, bucket = blocks_of(mask, N, layout, self.window)
        keys = keys_of_blocks(layout, pools, self.window, self.sinks, self.pools)
        queries, keys, bucket = (x[:, None].expand(-1, H, *x.shape[1:]) for x in (queries, keys, bucket))
        buckets = Buckets(queries, keys, bucket)
        return attend_pairs(
            query, key, value, buckets, Mask(), scale=call.scale, key_bias=bias, dropout_p=call.dropout_p
        )

    def fit_loss(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
        """The relative error of the outputs, and of their mean."""
        return output_error(self, query, key, value, call, of_mean=1.0)
