"""Kept tokens of a sequence that is split over ranks, where the ranks send summaries of their keys.

Kept tokens are few, so that each rank learns all of them, and each attends for all of them to its own keys:

    tokens    the queries, keys and values of the S kept tokens, from the ranks that have them    S·(H·D + G·(D + E))
    rows      each rank's partial of the kept queries over its own keys; partials merge           S·H·(E + 1)

The method sees what is left on each rank, as in `methods.core.global_tokens`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from subquad.distributed.attention.merging import merge_of_ranks
from subquad.distributed.collectives import add, gather
from subquad.distributed.token_split import TokenSplit
from subquad.kernels.precision import upcast
from subquad.kernels.tokens.positions import front_first
from subquad.kernels.tokens.slots import taken
from subquad.masks import Mask
from subquad.methods.core.call import Call, Partial
from subquad.methods.core.global_tokens import Kept, attend_as_kept, not_kept, of_indices, with_columns, with_rows


def run_with_kept(
    run: Callable[..., Partial], query: Tensor, key: Tensor, value: Tensor, call: Call, split: TokenSplit
) -> Partial:
    """The partial over the keys of all ranks, by `run` for tokens that are not kept; `call.kept` marks the kept ones.

    It makes two exchanges in each direction, and two more to find out which tokens bools name.
    """
    N, mask = query.shape[2], call.mask
    kept = _kept_of_all(call.kept, query, mask, split)
    if kept is None:
        return run(query, key, value, replace(call, kept=None))
    local = _local(kept, split)
    inner = replace(call, mask=local.left_out_of(mask, N), kept=None, wants_lse=True)
    partial = run(query, key, value, inner)

    query, key, value = upcast(query, key, value)
    valid_queries, valid_keys = mask.query_padding(N), mask.key_padding(N)
    numbers = torch.arange(split.local_tokens.start, split.local_tokens.stop, device=query.device)[None]
    kept_query, kept_key, kept_value, present = _from_owners(query, key, value, local, valid_queries, valid_keys, split)
    others = not_kept(local, valid_queries, N)
    columns = with_columns(query, kept_key, kept_value, numbers, kept.tokens, others, present[..., 1], inner, partial)
    rows = attend_as_kept(kept_query, key, value, kept.tokens, numbers, present[..., 0], valid_keys, inner)
    out, lse = rows
    assert lse is not None
    return with_rows(columns, merge_of_ranks(out, lse, split), local, valid_queries)


def kept_among(named: Tensor, query: Tensor, mask: Mask, split: TokenSplit) -> Tensor | None:
    """The kept tokens of this rank as bools; None where bools name no token on any rank."""
    kept = _kept_of_all(named, query, mask, split)
    return None if kept is None else _local(kept, split).among(query.shape[2])


def _kept_of_all(named: Tensor, query: Tensor, mask: Mask, split: TokenSplit) -> Kept | None:
    """The kept tokens of the whole sequence; None where bools name no token."""
    B, N = query.shape[0], query.shape[2]
    if named.dtype != torch.bool:
        return of_indices(named.to(query.device, torch.int64), B, split.tokens)
    queries, keys = mask.query_padding(N), mask.key_padding(N)
    if queries is not None and keys is not None:
        named = named & (queries | keys)
    counts = gather(named.sum(1), [(B,)] * split.ranks, split.group)
    most = torch.stack(counts).amax(1).tolist()
    if not any(most):
        return None
    order = front_first(named)[:, : most[split.rank]]
    tokens = torch.where(named.gather(1, order), order + split.local_tokens.start, -1)
    tokens = torch.cat(gather(tokens, [(B, each) for each in most], split.group), dim=1)
    return Kept(tokens.clamp(min=0), tokens >= 0)


def _local(kept: Kept, split: TokenSplit) -> Kept:
    """The kept tokens that this rank has, as numbers of its own tokens."""
    tokens, present = kept.tokens - split.local_tokens.start, kept.present
    present = present & (tokens >= 0) & (tokens < split.lengths[split.rank])
    return Kept(tokens.clamp(0, split.lengths[split.rank] - 1), present)


def _from_owners(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    of_rank: Kept,
    valid_queries: Tensor | None,
    valid_keys: Tensor | None,
    split: TokenSplit,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key and value of all kept tokens, and whether they are there as queries and as keys, (B,S,2)."""
    flags = torch.stack([of_rank.which_are(valid_queries), of_rank.which_are(valid_keys)], dim=-1).to(query.dtype)
    rows = [taken(x, of_rank.tokens).transpose(1, 2) for x in (query, key, value)]
    sent = torch.cat([*(x.flatten(2) for x in rows), flags], dim=-1)
    # Of each token all ranks but one send 0, so that the sum is what the one has.
    *combined, flags = add(sent.masked_fill(~of_rank.present[..., None], 0.0), split.group).split(
        [*(x[0, 0].numel() for x in rows), 2], dim=-1
    )
    query, key, value = (x.unflatten(2, like.shape[2:]).transpose(1, 2) for x, like in zip(combined, rows, strict=True))
    return query, key, value, flags > 0
