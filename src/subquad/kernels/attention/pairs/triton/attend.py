"""The forward pass: each tile of a block's query slots meets the keys of its bucket in one online softmax.

    m' = max(m, max_j s_j)      l' = e^{m − m'} l + Σ_j e^{s_j − m'}      o' = e^{m − m'} o + Σ_j e^{s_j − m'} v_j
    out = o / l                 lse = m + ln l

What a query gets in a block stays in its slot, a partial; `combine.py` merges the slots of each query.

            keys of bucket[t]
           ┌─────┬─────┬─────┐
    block  │ ──► │ ──► │ ──► │   a program: one tile of query slots
      t    ├─────┼─────┼─────┤
           │ ──► │ ──► │ ──► │   grid: (tiles of all blocks, heads of all items)
           └─────┴─────┴─────┘
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.attention.pairs.triton.bucket_sets import BucketSet
from subquad.kernels.attention.pairs.triton.pair_tiles import (
    call_arguments,
    load_block,
    load_slots,
    position_of,
    tile_of,
    visible,
)
from subquad.kernels.triton.launch import LOWEST, dot, dot_shrunk, kernel, launch, load_rows, store_rows, unshrunk
from subquad.kernels.triton.recording import LaunchCost


def attend_blocks(x: Any, buckets: BucketSet, partials: Tensor, lses: Tensor) -> None:
    """Fill what the set's query slots hold of the partials (B,H,slots,E) and their log-sum-exps (B,H,slots)."""
    (B, H, _, D), E, tiles = x.query.shape, x.value.shape[3], tile_of("attend_tile", x, buckets)
    moved = (
        buckets.queries.numel() * D + buckets.keys.numel() * (D + E)
    ) * x.query.element_size() + 4 * buckets.queries.numel() * (E + 1)
    launch(
        attend_tile,
        (buckets.queries.shape[2] * triton.cdiv(buckets.queries.shape[3], tiles.rows), B * H),
        **tiles.options(),
        cost=LaunchCost(buckets.pairs * (D + E), moved),
        **call_arguments(x, buckets.excess),
        **buckets.arguments(),
        bucket=buckets.bucket,
        first_query=buckets.first_query,
        partials=partials,
        lses=lses,
        slots=lses.shape[2],
        QUERIES=tiles.rows,
        KEYS=tiles.keys,
    )


@kernel
def attend_tile(
    query,
    query_b,
    query_h,
    query_n,
    key,
    key_b,
    key_h,
    key_n,
    value,
    value_b,
    value_h,
    value_n,
    key_bias,
    offsets,
    hidden,
    queries,
    queries_end,
    keys,
    keys_end,
    bucket,
    partials,
    lses,
    first_query,
    slots,
    H,
    GROUP,
    N,
    M,
    D,
    E,
    R,
    T,
    S,
    C,
    K,
    offset,
    span,
    scale,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    OTHERS: tl.constexpr,
    D_PADDED: tl.constexpr,
    E_PADDED: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """The partials of one tile of a block's query slots."""
    head = tl.program_id(1).to(tl.int64)
    item, h = head // H, head % H
    tiles = tl.cdiv(S, QUERIES)
    block = tl.program_id(0) // tiles
    row = tl.program_id(0) % tiles * QUERIES + tl.arange(0, QUERIES)
    token, of_bucket, end = load_block(queries, queries_end, keys_end, bucket, head, block, row, N, T, S, C)
    position = position_of(token, offset, offsets, item, M, span)

    key += item * key_b + h // GROUP * key_h
    value += item * value_b + h // GROUP * value_h
    if hidden is not None:
        hidden += head * R * M
    q = load_rows(query + item * query_b + h * query_h, query_n, token, token >= 0, D, D_PADDED)
    highest = tl.full((QUERIES,), -float("inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    out = tl.zeros((QUERIES, E_PADDED), tl.float32)
    for start in range(0, end, KEYS):
        number = load_slots(keys + of_bucket * K, start + tl.arange(0, KEYS), end, M)
        k = load_rows(key, key_n, number, number >= 0, D, D_PADDED)
        v = load_rows(value, value_n, number, number >= 0, E, E_PADDED)
        logits = dot(q, tl.trans(k)) * scale
        if key_bias is not None:
            logits += tl.load(key_bias + head * M + number, mask=number >= 0, other=0.0)[None, :]
        pairs = token[:, None], position[:, None], number[None, :], hidden
        allowed = visible(*pairs, M, R, span, CAUSAL, WINDOW, OTHERS)
        logits = tl.where(logits == -float("inf"), LOWEST, logits)
        logits = tl.where(allowed, logits, -float("inf"))
        before, highest = highest, tl.maximum(highest, tl.max(logits, 1))
        base = tl.where(highest == -float("inf"), 0.0, highest)
        weights = tl.exp(logits - base[:, None])
        shrink = tl.exp(before - base)
        total = total * shrink + tl.sum(weights, 1)
        out = out * shrink[:, None] + dot_shrunk(weights, v)
    blind = total == 0
    lost = (highest == LOWEST) & (total == total)  # it sees keys, but with logits of −∞ alone; NaN stays NaN
    out = tl.where(blind[:, None], 0.0, unshrunk(out / tl.where(blind, 1.0, total)[:, None], value))
    out = tl.where(lost[:, None], float("nan"), out)
    lse = tl.where(blind | lost, -float("inf"), highest + tl.log(tl.where(blind, 1.0, total)))
    slot = head * slots + first_query + block * S + row
    tl.store(lses + slot, lse, mask=row < S)
    store_rows(partials, E, slot, row < S, out, E, E_PADDED)
