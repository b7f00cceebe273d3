"""From slots to tokens: the partials of a query merged by log-sum-exp, and the gradients of a token's slots summed.

A program takes a tile of tokens and goes through the slots of each in their order, so that results are the same in
every run. If tokens have different numbers of slots, it takes as many steps as the longest list has.
"""

import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.attention.pairs.triton.bucket_sets import SlotIndex
from subquad.kernels.triton.launch import kernel, launch, load_rows, padded, store_rows, strides, tile
from subquad.kernels.triton.recording import LaunchCost

MOST_TOKENS = 32  # of a tile


def merge_slots(partials: Tensor, lses: Tensor, at: SlotIndex, out: Tensor, lse: Tensor) -> None:
    """out (B,H,N,E) = Σ_s e^{lse_s} partial_s / Σ_s e^{lse_s} over the slots s of each query, and lse (B,H,N)."""
    (B, H, N, E), slots = out.shape, lses.shape[2]
    tokens = tile(N, MOST_TOKENS)
    launch(
        merge_tile,
        (triton.cdiv(N, tokens), B * H),
        cost=LaunchCost(0, 4 * B * H * (slots * (E + 3) + N * (E + 2))),
        partials=partials,
        lses=lses,
        **at.arguments(),
        out=out,
        **strides("out", out),
        lse=lse,
        slots=slots,
        H=H,
        N=N,
        E=E,
        TOKENS=tokens,
        WIDTH=padded(E),
    )


def sum_slots(parts: Tensor, at: SlotIndex, out: Tensor) -> None:
    """out (B,G,N,W) = the sum of the parts (B,H,slots,W) in a token's slots, in all heads that share one of out."""
    (B, G, N, W), (_, H, slots, _) = out.shape, parts.shape
    tokens = tile(N, MOST_TOKENS)
    launch(
        sum_tile,
        (triton.cdiv(N, tokens), B * G),
        cost=LaunchCost(0, 4 * B * H * slots * (W + 1) + B * G * N * W * out.element_size()),
        parts=parts,
        **at.arguments(),
        out=out,
        **strides("out", out),
        slots=slots,
        G=G,
        GROUP=H // G,
        N=N,
        W=W,
        TOKENS=tokens,
        WIDTH=padded(W) if W > 1 else 1,
    )


@kernel
def merge_tile(
    partials,
    lses,
    order,
    starts,
    out,
    out_b,
    out_h,
    out_n,
    lse,
    slots,
    H,
    N,
    E,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One tile of queries. A slot with lse = −∞ is skipped: nothing was seen there, or logits of −∞ alone."""
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    present = token < N
    starts += head * (N + 1)
    first = tl.load(starts + token, mask=present, other=0)
    count = tl.load(starts + token + 1, mask=present, other=0) - first
    order += head * slots
    most = tl.max(count)
    highest = tl.full((TOKENS,), -float("inf"), tl.float32)
    for i in range(0, most):
        slot = head * slots + tl.load(order + first + i, mask=i < count, other=0)
        highest = tl.maximum(highest, tl.load(lses + slot, mask=i < count, other=-float("inf")))
    base = tl.where(highest == -float("inf"), 0.0, highest)
    total = tl.zeros((TOKENS,), tl.float32)
    for i in range(0, most):
        slot = head * slots + tl.load(order + first + i, mask=i < count, other=0)
        total += tl.exp(tl.load(lses + slot, mask=i < count, other=-float("inf")) - base)
    reached = total != 0  # NaN is seen
    safe = tl.where(reached, total, 1.0)
    merged = tl.zeros((TOKENS, WIDTH), tl.float32)
    for i in range(0, most):
        slot = head * slots + tl.load(order + first + i, mask=i < count, other=0)
        slot_lse = tl.load(lses + slot, mask=i < count, other=-float("inf"))
        skipped = (slot_lse == -float("inf")) & reached
        part = load_rows(partials, E, slot, (i < count) & (skipped == 0), E, WIDTH)
        # Divided first: the sum of what is not divided yet might overflow. A query that saw nothing keeps its 0 or NaN.
        weight = tl.where(reached, tl.exp(slot_lse - base) / safe, 1.0)
        merged += weight[:, None] * part
    store_rows(out + head // H * out_b + head % H * out_h, out_n, token, present, merged, E, WIDTH)
    tl.store(lse + head * N + token, tl.where(reached, tl.log(safe) + base, -float("inf")), mask=present)


@kernel
def sum_tile(
    parts,
    order,
    starts,
    out,
    out_b,
    out_h,
    out_n,
    slots,
    G,
    GROUP,
    N,
    W,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One tile of tokens, over the heads that share theirs."""
    shared_head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    present = token < N
    total = tl.zeros((TOKENS, WIDTH), tl.float32)
    for head in range(shared_head * GROUP, (shared_head + 1) * GROUP):
        first = tl.load(starts + head * (N + 1) + token, mask=present, other=0)
        count = tl.load(starts + head * (N + 1) + token + 1, mask=present, other=0) - first
        for i in range(0, tl.max(count)):
            slot = head * slots + tl.load(order + head * slots + first + i, mask=i < count, other=0)
            total += load_rows(parts, W, slot, i < count, W, WIDTH)
    store_rows(out + shared_head // G * out_b + shared_head % G * out_h, out_n, token, present, total, W, WIDTH)
