"""Exact attention to the keys of all ranks, which go around in a ring, one block of them on each rank at a time.

Liu et al. 2023, "Ring Attention with Blockwise Transformers". Queries stay where they are; partials over the blocks
merge by their log-sum-exps. The backward pass goes around again, and computes the weights of each block anew:

    forward     keys and values          G·(D + E) numbers per key, R − 1 steps
    backward    these, and gradients     G·(D + E) numbers per key, and as many in fp32 that come home after R steps

While a block is computed with, it is on its way to the next rank. It goes no further than a query sees it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from subquad.distributed.ring import Homeward, Ring
from subquad.distributed.shares import spans
from subquad.distributed.token_split import Alone, TokenSplit
from subquad.kernels.attention.blockwise.kernels import Kernels, fused, widened, with_positive_scale
from subquad.kernels.attention.blockwise.views import Piece, View, needs
from subquad.kernels.attention.softmax import merge_partials
from subquad.kernels.tokens.heads import repeat_heads
from subquad.kernels.tokens.padding import cleared_inputs
from subquad.masks import Mask

Partial = tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]]


def ring_attention(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M E"],
    mask: Mask,
    split: TokenSplit,
    *,
    scale: float,
) -> Partial:
    """Exact attention of this rank's queries to the keys of all ranks, in fp32 or better. Padding may hold NaN."""
    query, key, value = cleared_inputs(query, key, value, mask)
    query, scale = with_positive_scale(query, scale)
    blocks = KeyBlocks(split, split.whole(mask), scale, key.shape[3], value.shape[3])
    out, lse = _Attention.apply(query, torch.cat([key, value], dim=3), blocks)
    return out, lse


def exact_partial(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M E"],
    mask: Mask,
    *,
    scale: float,
) -> Partial:
    """Exact attention to these keys alone, with its log-sum-exp, in memory that is linear in N and M."""
    query, scale = with_positive_scale(query, scale)
    blocks = KeyBlocks(Alone(query.shape[2], key.shape[2]), mask, scale, key.shape[3], value.shape[3])
    out, lse = _Attention.apply(query, torch.cat([key, value], dim=3), blocks)
    return out, lse


@dataclass(frozen=True)
class KeyBlocks:
    """The blocks of keys and values, of widths D and E, and what the mask of all tokens shows of them."""

    split: TokenSplit
    mask: Mask
    scale: float
    D: int
    E: int

    def ring(self) -> Ring:
        """The ring, with the number of ranks that each block passes."""
        queries, keys = spans(self.split.lengths), spans(self.split.key_lengths)
        return Ring(self.split, lambda rank, block: needs(self.mask, queries[rank], keys[block]))

    def pieces(self, block: int | None, query: Tensor) -> list[Piece]:
        """The pieces of a block that this rank's queries see; empty if they see nothing."""
        if block is None:
            return []
        keys, local, M = spans(self.split.key_lengths)[block], self.split.local_tokens, sum(self.split.key_lengths)
        if not needs(self.mask, local, keys):
            return []
        return list(View.cut(self.mask, local, keys, M).pieces(query.device, whole=fused(query)))

    def unpacked(self, both: Tensor, heads: int, width: int) -> list[Tensor]:
        """Keys and values of every query head, in one width."""
        return widened(width, *(repeat_heads(x, heads) for x in both.split([self.D, self.E], dim=3)))

    def joined(self, of_key: Tensor, of_value: Tensor, groups: int) -> Tensor:
        """Gradients of a block's keys and values, as `unpacked` was given them."""
        both = torch.cat([of_key[..., : self.D], of_value[..., : self.E]], dim=3)
        return both.unflatten(1, (groups, -1)).sum(2)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, both: Tensor, blocks: KeyBlocks) -> tuple[Tensor, Tensor]:
        width = -(-max(blocks.D, blocks.E) // 8) * 8
        (local,) = widened(width, query)
        out = query.new_zeros(*query.shape[:3], blocks.E, dtype=torch.promote_types(query.dtype, torch.float32))
        lse = torch.full_like(out[..., 0], -torch.inf)
        for _, block, held in blocks.ring().travel(both.contiguous()):
            pieces = blocks.pieces(block, query)
            key, value = blocks.unpacked(held, query.shape[1], width) if pieces else (held, held)
            for piece in pieces:
                partial = _partial(local, key, value, piece, blocks)
                at = (..., piece.rows, slice(None))
                merged = merge_partials([(out[at], lse[..., piece.rows]), partial])
                out[at], lse[..., piece.rows] = merged
        ctx.blocks = blocks
        ctx.save_for_backward(query, both, out.to(query.dtype), lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        if torch.is_grad_enabled():
            raise RuntimeError("exact attention by blocks has no second derivative; leave create_graph=True out")
        blocks: KeyBlocks = ctx.blocks
        query, both, out, lse = ctx.saved_tensors
        rows = _rows(query, out, lse, *gradients)
        of_query = torch.zeros_like(rows.query, dtype=lse.dtype)
        ring = blocks.ring()
        homeward = Homeward(ring, both.to(lse.dtype))
        for step, block, held in ring.travel(both.contiguous()):
            pieces = blocks.pieces(block, query)
            more = None if block is None else torch.zeros_like(held, dtype=lse.dtype)
            if pieces:
                of_rows, more = _gradients(rows, held, pieces, blocks)
                of_query += of_rows
            homeward.add(step, more)
        return of_query[..., : blocks.D].to(query.dtype), homeward.home().to(both.dtype), None


def _partial(query: Tensor, key: Tensor, value: Tensor, piece: Piece, blocks: KeyBlocks) -> Partial:
    """The partial of some queries over some keys, in the dtype in which partials merge."""
    inputs = query[:, :, piece.rows], key[:, :, piece.keys], value[:, :, piece.keys]
    out, lse = Kernels(piece.bias, piece.causal, blocks.scale).forward(*(x.contiguous() for x in inputs))
    out = out[..., : blocks.E].to(lse.dtype)
    if piece.bias is None:
        return out, lse
    none = torch.isneginf(piece.bias).all(-1)
    return out.masked_fill(none.unsqueeze(-1), 0.0), lse.masked_fill(none, -torch.inf)


@dataclass(frozen=True)
class _QueryRows:
    """Inputs of the backward pass for its queries, in one width: g, q, out, and lse."""

    gradient: Float[Tensor, "B H N W"]
    query: Float[Tensor, "B H N W"]
    out: Float[Tensor, "B H N W"]
    lse: Float[Tensor, "B H N"]


def _rows(query: Tensor, out: Tensor, lse: Tensor, of_out: Tensor, of_lse: Tensor) -> _QueryRows:
    """Rows for kernels that know no gradient of the log-sum-exp.

    With gradients g of out and γ of lse, ∂/∂a_ij = p_ij·(g_i·v_j − g_i·out_i + γ_i). One more column gives γ to a
    kernel: there g is 1, v is 0 and out is −γ.
    """
    g = torch.cat([of_out.to(query.dtype), torch.ones_like(query[..., :1])], dim=3)
    out = torch.cat([out, -of_lse.to(query.dtype).unsqueeze(-1)], dim=3)
    width = -(-max(query.shape[3], g.shape[3]) // 8) * 8
    # If a query sees no key, all logits are −inf, and all weights 0 with any finite number in place of lse.
    g, query, out = widened(width, g, query, out)
    return _QueryRows(g, query, out, lse.masked_fill(torch.isneginf(lse), 0.0))


def _gradients(rows: _QueryRows, held: Tensor, pieces: list[Piece], blocks: KeyBlocks) -> tuple[Tensor, Tensor]:
    """The gradients to the queries from a block, and to the block from the queries, in the dtype of lse."""
    heads, width, fine = rows.query.shape[1], rows.query.shape[3], rows.lse.dtype
    key, value = blocks.unpacked(held, heads, width)
    sums = [torch.zeros_like(x, dtype=fine) for x in (rows.query, key, value)]
    for piece in pieces:
        of_rows = rows.gradient, rows.query, rows.out, rows.lse
        g, query, out, lse = (x[:, :, piece.rows].contiguous() for x in of_rows)
        local_key, local_value = (x[:, :, piece.keys].contiguous() for x in (key, value))
        kernels = Kernels(piece.bias, piece.causal, blocks.scale)
        gradients = kernels.backward(g, query, local_key, local_value, out, lse)
        for total, at, more in zip(sums, (piece.rows, piece.keys, piece.keys), gradients, strict=True):
            total[:, :, at] += more
    of_query, of_key, of_value = sums
    return of_query, blocks.joined(of_key, of_value, held.shape[1])
