"""Causal products on GPUs: sums of chunks side by side, then running sums, then every chunk reads the one before it.

    U_c = Σ_{i in chunk c} k_i v_iᵀ,   S_c = Σ_{c' < c} U_c',   out_t = q_t·S_c + Σ_{i ≤ t in the chunk} (q_t·k_i) v_i

Backwards it is i ≥ t, and the chunks behind. One program takes

    sum_products     a tile of a chunk's matrix (R,E)
    scan_products    a tile of a head's matrices, from chunk to chunk
    read_products    a chunk's queries and a tile of E; it walks through R

With more key heads than query heads, a query head's sums are those of all of its key heads.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.attention.products.op import (
    causal_product,
    check_heads,
    directed_product,
    multiplications,
    refusal_of_dtype,
)
from subquad.kernels.operators import shapes_of
from subquad.kernels.triton import refusal_of
from subquad.kernels.triton.launch import dot, kernel, launch, load_rows, rows, store_rows, strides, tile
from subquad.kernels.triton.recording import LaunchCost

CHUNK = 64  # tokens
MOST_FEATURES, MOST_WIDTH = 32, 32  # of R and of E in a tile


@causal_product.refusal("triton")
def refusal(x: Any) -> str | None:
    """The reason why the kernels cannot take this call; None if they can."""
    return refusal_of_dtype(x.query) or refusal_of(x.query, x.key, x.value)


@directed_product.on("triton")
def compute(out: Tensor, inputs: Any) -> None:
    """The Triton backend of `causal_product`, in either direction."""
    check_heads(inputs)
    query, key, value = (rows(x) for x in (inputs.query, inputs.key, inputs.value))
    (B, H, N, R), (_, G, _, E) = query.shape, value.shape
    heads, chunks = min(H, G), triton.cdiv(N, CHUNK)  # heads that have a state
    features, width = tile(R, MOST_FEATURES), tile(E, MOST_WIDTH)
    of_width = triton.cdiv(E, width)
    tiles = triton.cdiv(R, features) * of_width
    states = query.new_empty(B, heads, chunks, R, E)
    shape: dict[str, Any] = {"N": N, "R": R, "E": E, "FEATURES": features, "WIDTH": width}
    keys: dict[str, Any] = {"key": key, **strides("key", key), "value": value, **strides("value", value)}
    products, passed = multiplications(shapes_of(inputs)) // 2, states.nbytes
    launch(
        sum_products,
        (chunks * tiles, B * heads),
        cost=LaunchCost(products, key.nbytes + value.nbytes + passed),
        states=states,
        heads=heads,
        share=G // heads,
        TOKENS=tile(N, CHUNK),
        **keys,
        **shape,
    )
    sizes = {name: x for name, x in shape.items() if name != "N"}
    launch(
        scan_products,
        (tiles, B * heads),
        cost=LaunchCost(0, 2 * passed),
        states=states,
        chunks=chunks,
        REVERSE=inputs.reverse,
        **sizes,
    )
    launch(
        read_products,
        (chunks * of_width, B * H),
        num_warps=8,
        cost=LaunchCost(products, query.nbytes + key.nbytes + value.nbytes + passed),
        query=query,
        **strides("query", query),
        states=states,
        out=out,
        **strides("out", out),
        H=H,
        of_state=H // heads,
        share=G // heads,
        chunks=chunks,
        TOKENS=tile(N, CHUNK),
        REVERSE=inputs.reverse,
        **keys,
        **shape,
    )


@kernel
def sum_products(
    key,
    key_b,
    key_h,
    key_n,
    value,
    value_b,
    value_h,
    value_n,
    states,
    heads,
    share,
    N,
    R: tl.constexpr,
    E: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """A tile of U of a chunk: Σ k_i v_iᵀ over its tokens and over the key heads of a state."""
    OF_WIDTH: tl.constexpr = (E + WIDTH - 1) // WIDTH
    TILES: tl.constexpr = (R + FEATURES - 1) // FEATURES * OF_WIDTH
    chunk, part = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    first, left = part // OF_WIDTH * FEATURES, part % OF_WIDTH * WIDTH
    head = tl.program_id(1).to(tl.int64)
    b = head // heads
    token = chunk * TOKENS + tl.arange(0, TOKENS)
    present = token < N
    sums = tl.zeros((FEATURES, WIDTH), tl.float32)
    for of_head in range(0, share):
        g = head % heads * share + of_head
        keys = load_rows(key + b * key_b + g * key_h + first, key_n, token, present, R - first, FEATURES)
        values = load_rows(value + b * value_b + g * value_h + left, value_n, token, present, E - left, WIDTH)
        sums += dot(tl.trans(keys), values)
    feature = first + tl.arange(0, FEATURES)
    chunks = tl.cdiv(N, TOKENS)
    store_rows(states + (head * chunks + chunk) * R * E + left, E, feature, feature < R, sums, E - left, WIDTH)


@kernel
def scan_products(
    states,
    chunks,
    R: tl.constexpr,
    E: tl.constexpr,
    FEATURES: tl.constexpr,
    WIDTH: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """A tile of all of a head's matrices, U to S: what comes before each chunk, or behind it."""
    OF_WIDTH: tl.constexpr = (E + WIDTH - 1) // WIDTH
    first, left = tl.program_id(0) // OF_WIDTH * FEATURES, tl.program_id(0) % OF_WIDTH * WIDTH
    feature = first + tl.arange(0, FEATURES)
    states += tl.program_id(1).to(tl.int64) * chunks * R * E + left
    sums = tl.zeros((FEATURES, WIDTH), tl.float32)
    for step in range(0, chunks):
        chunk = chunks - 1 - step if REVERSE else step
        of_chunk = states + chunk.to(tl.int64) * R * E  # type: ignore[union-attr]
        more = load_rows(of_chunk, E, feature, feature < R, E - left, WIDTH)
        store_rows(of_chunk, E, feature, feature < R, sums, E - left, WIDTH)
        sums += more


@kernel
def read_products(
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
    states,
    out,
    out_b,
    out_h,
    out_n,
    H,
    of_state,
    share,
    chunks,
    N,
    R: tl.constexpr,
    E: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
    WIDTH: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """A tile of out of a chunk's queries."""
    OF_WIDTH: tl.constexpr = (E + WIDTH - 1) // WIDTH
    chunk, left = tl.program_id(0) // OF_WIDTH, tl.program_id(0) % OF_WIDTH * WIDTH
    head = tl.program_id(1).to(tl.int64)
    b, state = head // H, head // of_state
    token = chunk * TOKENS + tl.arange(0, TOKENS)
    present = token < N
    query += b * query_b + head % H * query_h
    states += (state * chunks + chunk) * R * E + left
    result = tl.zeros((TOKENS, WIDTH), tl.float32)
    for start in range(0, R, FEATURES):
        feature = start + tl.arange(0, FEATURES)
        queries = load_rows(query + start, query_n, token, present, R - start, FEATURES)
        result += dot(queries, load_rows(states, E, feature, feature < R, E - left, WIDTH))
    row, column = tl.arange(0, TOKENS)[:, None], tl.arange(0, TOKENS)[None, :]
    allowed = row <= column if REVERSE else row >= column
    for of_head in range(0, share):
        g = head % H // of_state * share + of_head
        keys = key + b * key_b + g * key_h
        pairs = tl.zeros((TOKENS, TOKENS), tl.float32)
        for start in range(0, R, FEATURES):
            queries = load_rows(query + start, query_n, token, present, R - start, FEATURES)
            pairs += dot(queries, tl.trans(load_rows(keys + start, key_n, token, present, R - start, FEATURES)))
        values = load_rows(value + b * value_b + g * value_h + left, value_n, token, present, E - left, WIDTH)
        result += dot(tl.where(allowed, pairs, 0.0), values)
    store_rows(out + b * out_b + head % H * out_h + left, out_n, token, present, result, E - left, WIDTH)
