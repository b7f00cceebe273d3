"""A method on a sequence that is split over ranks, each of which runs some of the heads on all tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from subquad.distributed.collectives import gather
from subquad.distributed.head_exchange import of_rank, to_heads, to_tokens
from subquad.distributed.token_split import TokenSplit
from subquad.kernels.tokens.packing import check_adjacent
from subquad.methods.core.call import Call, Partial
from subquad.methods.core.global_tokens import kept_tokens
from subquad.methods.core.learned_heads import counters_of, tied
from subquad.methods.core.method import Method


def run_by_heads(method: Method, query: Tensor, key: Tensor, value: Tensor, call: Call, split: TokenSplit) -> Partial:
    """Attention to all tokens by this rank's share of the heads."""
    heads, learned = query.shape[1], call.learned
    inputs = _of_heads(method, query, key, value, call, split)
    if inputs[0].shape[1]:
        out, lse = method.attend_partial(*inputs)
    else:
        out, lse = _of_no_heads(*inputs[:3])
    read = (inputs[3].bias, inputs[3].hidden, *(() if learned is None else learned.parameters()))
    out = tied(out.to(query.dtype), *read)
    _count_alike(learned, split)
    if lse is None or not call.wants_lse:
        return to_tokens([out], split, heads)[0], None
    out, lse = to_tokens([out, lse], split, heads)
    return out, lse


def _of_heads(
    method: Method, query: Tensor, key: Tensor, value: Tensor, call: Call, split: TokenSplit
) -> tuple[Tensor, Tensor, Tensor, Call]:
    """All tokens of this rank's heads, and the call for them."""
    local = of_rank(split.rank, split.ranks, query.shape[1], key.shape[1])
    rows = [*call.mask.allowed, *(() if call.bias is None else (call.bias,))]
    tokens = () if call.hidden is None else (call.hidden,)
    whole, rows, hidden = to_heads(query, key, value, split, rows, tokens)
    mask = replace(split.whole(call.mask), allowed=tuple(rows[: len(call.mask.allowed)]))
    if not method.traits.takes_segments:
        check_adjacent(mask)  # on ranks without heads too, which would wait for those that refuse
    inner = replace(
        call,
        mask=mask,
        bias=None if call.bias is None else rows[-1],
        hidden=hidden[0] if hidden else None,
        learned=None if call.learned is None else method.of_heads(call.learned, local),
        kept=None if call.kept is None else kept_tokens(split.whole_tokens(call.kept), whole[0], whole[1], mask),
        heads=local,
    )
    return whole[0], whole[1], whole[2], inner


def _of_no_heads(query: Tensor, key: Tensor, value: Tensor) -> Partial:
    """The partial that a rank without heads sends: empty, but part of the backward pass."""
    out = query[..., :1] * value.new_zeros(value.shape[3])
    return out, out.sum(-1, dtype=torch.promote_types(out.dtype, torch.float32))


def _count_alike(learned: Any, split: TokenSplit) -> None:
    """Bring the counters of training to one number: ranks without heads of a module have not counted."""
    counters = [] if learned is None else list(counters_of(learned))
    if counters:
        with torch.no_grad():
            counted = torch.stack(counters)
            most = torch.stack(gather(counted, [counted.shape] * split.ranks, split.group)).amax(0)
            for counter, number in zip(counters, most, strict=True):
                counter.copy_(number)


def loss_by_heads(
    method: Method, query: Tensor, key: Tensor, value: Tensor, call: Call, split: TokenSplit
) -> Tensor | None:
    """The part of this rank's heads in the auxiliary loss."""
    inputs = _of_heads(method, query.detach(), key.detach(), value.detach(), call, split)
    if inputs[0].shape[1]:
        loss = method.run_auxiliary_loss(*inputs)
    else:
        loss = query.new_zeros((), dtype=torch.promote_types(query.dtype, torch.float32))
    return None if loss is None else tied(loss, *call.learned.parameters())
