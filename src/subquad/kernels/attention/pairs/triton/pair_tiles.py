"""Tiles of pairs: their edges, what every kernel is told about a call, and which pairs see each other."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.attention.pairs.triton.bucket_sets import BucketSet
from subquad.kernels.triton.launch import padded, rows, strides, tile
from subquad.kernels.triton.tiles import Tiles, tiles_of

FAR = 1 << 60  # an offset beyond all tokens, to which a position can be added


# bytes of a number -> the most queries and keys of a tile where pairs are hidden: their pointers take registers
HIDDEN = {2: (32, 32), 4: (16, 32)}


def tile_of(kernel: str, x: Any, buckets: BucketSet) -> Tiles:
    """The tile of a kernel for the lists of a set, which may be shorter than those that it has by its table."""
    tiles = tiles_of(kernel, x.query.dtype, max(x.query.shape[3], x.value.shape[3]))
    queries, keys = tiles.rows, tiles.keys
    if x.hidden is not None:
        most = HIDDEN[x.query.element_size()]
        queries, keys = min(queries, most[0]), min(keys, most[1])
    return tiles._replace(rows=tile(buckets.queries.shape[3], queries), keys=tile(buckets.keys.shape[3], keys))


def call_arguments(x: Any, excess: int) -> dict[str, Any]:
    """The call as arguments of a kernel, for a set of buckets with this excess."""
    query, key, value = rows(x.query), rows(x.key), rows(x.value)
    (_, H, N, D), (_, G, M, E) = query.shape, value.shape
    return {
        **{"query": query, "key": key, "value": value},
        **strides("query", query),
        **strides("key", key),
        **strides("value", value),
        "key_bias": None if x.key_bias is None else x.key_bias.contiguous(),
        "offsets": None if x.offsets is None else _nearer(_clamped(x.offsets, -FAR, FAR), N, M, excess),
        "hidden": None if x.hidden is None else x.hidden.contiguous(),
        **{"H": H, "GROUP": H // G, "N": N, "M": M, "D": D, "E": E},
        "R": 1 if x.hidden is None else x.hidden.shape[2],
        "offset": _nearer(_clamped(x.offset, -FAR, FAR), N, M, excess),
        "scale": x.scale,
        "CAUSAL": x.causal,
        "OTHERS": x.other_keys_only,
        "D_PADDED": padded(D),
        "E_PADDED": padded(E),
    }


def _nearer(offset: Any, N: int, M: int, excess: int) -> Any:
    """The offset at which queries see the same keys in a window that is narrower by `excess`, and still N + M or more.

    Queries among the keys see all of them either way. Those before or behind all keys come nearer by the excess, but do
    not come among the keys.
    """
    return offset if excess == 0 else offset - _clamped(offset - M, 0, excess) - _clamped(offset + N, -excess, 0)


def _clamped(x: Any, least: int, most: int) -> Any:
    return x.clamp(least, most) if isinstance(x, Tensor) else max(least, min(x, most))


@triton.jit
def load_slots(slots, row, end, tokens):
    """The tokens in these places of a list; −1 for an empty slot, and for a number that no token has."""
    token = tl.load(slots + row, mask=row < end, other=-1)
    return tl.where((token >= 0) & (token < tokens), token, -1).to(tl.int32)


@triton.jit
def load_block(queries, queries_end, keys_end, bucket, head, block, row, N, T, S, C):
    """A block's queries in these places, the row of its bucket among all heads' buckets, and where its keys end."""
    of_block = head * T + block
    token = load_slots(queries + of_block * S, row, tl.load(queries_end + of_block), N)
    key_bucket = block
    if bucket is not None:
        key_bucket = tl.load(bucket + of_block)
    exists = (key_bucket >= 0) & (key_bucket < C)
    key_bucket = head * C + tl.where(exists, key_bucket, 0)
    end = tl.load(keys_end + key_bucket, mask=exists, other=0)
    return token, key_bucket, tl.where(tl.max(token) >= 0, end, 0)  # nothing to do for a tile of empty slots


@triton.jit
def position_of(query, offset, offsets, item, M, span):
    """The positions of the queries among the keys, in int32: beyond what any key sees, all positions are alike."""
    if offsets is not None:
        offset += tl.load(offsets + item)
    position = query.to(tl.int64) + offset
    return tl.minimum(tl.maximum(position, -2 - span), M + 1 + span).to(tl.int32)


@triton.jit
def visible(query, position, key, hidden, M, R, span, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, OTHERS: tl.constexpr):
    """The pairs that see each other; queries and keys are tokens along different axes, −1 for empty slots."""
    allowed = (query >= 0) & (key >= 0)
    if CAUSAL:
        allowed = allowed & (key <= position)
    if WINDOW:
        allowed = allowed & (key - position <= span) & (position - key <= span)
    if OTHERS:
        allowed = allowed & (key != query)
    if hidden is not None:
        allowed = allowed & (tl.load(hidden + (query % R * M + key), mask=allowed, other=1) == 0)
    return allowed
