"""Kept tokens: tokens whose row and column of the attention are exact, whatever the method.

    K      = the kept tokens: CLS, separators, registers, prompts
    out_i  = softmax attention of query i over all keys that it may see                              for i in K
    out_i  = the method over the keys outside K, merged with exact attention over the keys in K      for other i

                keys in K     other keys
    i in K    [   exact     |   exact    ]     "rows"
    other i   [   exact     |  the method  ]
               "columns"

The method sees a sequence from which the kept tokens are missing, as if they were padding, so that no key counts twice.
Its output enters the softmax over the kept keys as the value of one more key, whose logit is its log-sum-exp.

Causal masks, segments, padding, dense masks and biases hold for kept tokens too. A window does not restrict them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from subquad.core.readable import can_be_read, check_readable
from subquad.kernels.attention.softmax import visible_logsumexp, visible_softmax
from subquad.kernels.precision import upcast
from subquad.kernels.tokens.heads import repeat_heads
from subquad.kernels.tokens.padding import cleared_inputs
from subquad.kernels.tokens.positions import front_first
from subquad.kernels.tokens.slots import taken
from subquad.masks import Mask
from subquad.methods.core.call import Call, Partial

Keep = Tensor | Sequence[Any]  # ints (S,) or (B,S), or bools (B,N)
_FORMS = "token indices, int (S,) or (B, S), or a bool (B, N)"


@dataclass(frozen=True, eq=False)
class Kept:
    """The kept tokens of each item as slots. An empty slot, where `present` is False, holds the number of any token."""

    tokens: Int64[Tensor, "B S"]
    present: Bool[Tensor, "B S"]

    def among(self, N: int) -> Bool[Tensor, "B {N}"]:
        """A bool that marks the kept ones of the N tokens."""
        counts = self.tokens.new_zeros(self.tokens.shape[0], N)
        return counts.scatter_add(1, self.tokens, self.present.long()) > 0

    def left_out_of(self, mask: Mask, N: int) -> Mask:
        """The mask for the method, in which the kept tokens are padding."""
        return mask & Mask.padding(~self.among(N))

    def which_are(self, valid: Bool[Tensor, "B N"] | None) -> Bool[Tensor, "B S"]:
        """A bool that marks the slots with a token that is real; None: all tokens are."""
        return self.present if valid is None else self.present & valid.gather(1, self.tokens)


def kept_tokens(keep: Keep, query: Tensor, key: Tensor, mask: Mask) -> Kept | None:
    """Check the argument `keep` and list its tokens; None if it names no token.

    Padding is never kept: an index that is padding in some items names no token in those, and so does True there.

    Raises:
        TypeError: it holds neither ints nor bools.
        ValueError: it does not fit the batch or the length, or query and key are not the same tokens.
    """
    B, N, M = query.shape[0], query.shape[2], key.shape[2]
    if N != M:
        raise ValueError(
            f"`keep` is for self-attention, but there are {N} queries and {M} keys; leave it out of cross-attention "
            "and of steps on a cache"
        )
    check_aligned(mask)
    named = named_tokens(keep, N)
    if named.numel() == 0 and named.dtype != torch.bool:
        return None
    if named.dtype != torch.bool:
        # Nobody writes to the memory of what a list became, so that nobody need wait until it is copied.
        listed = not isinstance(keep, Tensor)
        return of_indices(named.to(query.device, torch.int64, non_blocking=listed), B, N)
    check_bools(named, query)
    queries, keys = mask.query_padding(N), mask.key_padding(N)
    if queries is not None and keys is not None:
        named = named & (queries | keys)
    return _of_mask(named)


def check_aligned(mask: Mask) -> None:
    """Raise ValueError if the mask aligns the queries with other keys than their own."""
    if not mask.aligned:
        raise ValueError(
            f"`keep` needs query i at the position of key i, but the mask puts the first query at key {mask.offset}; "
            "leave out the mask's offset, or `keep`"
        )


def named_tokens(keep: Any, N: int) -> Tensor:
    """The tokens that were named as a tensor of ints or bools; indices are checked where they can be read."""
    if not isinstance(keep, Tensor):
        if isinstance(keep, str) or not isinstance(keep, Sequence):
            raise TypeError(f"`keep` is a {type(keep).__name__}, but it must be {_FORMS}, such as [0, -1]")
        try:
            keep = torch.tensor(keep, device="cpu") if len(keep) else torch.zeros(0, dtype=torch.int64, device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"`keep` must be {_FORMS}: {error}") from None
    if keep.is_floating_point() or keep.is_complex():
        raise TypeError(f"`keep` is {keep.dtype}, but it must be {_FORMS}")
    if keep.dtype == torch.bool:
        return keep
    if keep.ndim not in (1, 2):
        raise ValueError(f"`keep` is {tuple(keep.shape)}, but it must be {_FORMS}")
    # On a GPU a check would wait for the device: an index out of range names no token there.
    if keep.device.type == "cpu" and keep.numel() and can_be_read(keep):
        least, most = int(keep.min()), int(keep.max())
        if least < -N or most >= N:
            wrong = most if most >= N else least
            raise ValueError(f"`keep` has the index {wrong}, but the query has {N} positions, so {_indices(N)}")
    return keep


def check_bools(named: Tensor, query: Tensor) -> None:
    """Raise ValueError if bools do not fit the queries."""
    B, N = query.shape[0], query.shape[2]
    if named.shape != (B, N):
        raise ValueError(_misfit(named, B, N))
    if named.device != query.device:
        raise ValueError(f"`keep` is on {named.device} but `query` is on {query.device}; move them together")


def _indices(N: int) -> str:
    return f"indices run from {-N} to {N - 1}" if N else "there is nothing to keep"


def _misfit(named: Tensor, B: int, N: int) -> str:
    """A message about the wrong shape of a bool."""
    if named.ndim != 2:
        return f"`keep` is a bool {tuple(named.shape)}, but a bool must be (B, N) = {(B, N)}"
    if named.shape[1] != N:
        return f"`keep` has {named.shape[1]} columns but the query has {N} positions; they must match"
    return f"`keep` has {named.shape[0]} rows but the batch is {B}; they must match"


def of_indices(named: Int64[Tensor, "... S"], B: int, N: int) -> Kept:
    """The tokens of these indices, each once; negative ones count from the end."""
    if named.ndim == 2 and named.shape[0] != B:
        raise ValueError(f"`keep` has {named.shape[0]} rows of indices but the batch is {B}; they must match")
    tokens = torch.where(named < 0, named + N, named)
    again = (tokens[..., :, None] == tokens[..., None, :]).tril(-1).any(-1)
    present = (tokens >= 0) & (tokens < N) & ~again
    return Kept(tokens.clamp(0, N - 1).expand(B, -1), present.expand(B, -1))


def _of_mask(named: Bool[Tensor, "B N"]) -> Kept | None:
    """Slots for the item with the most kept tokens; reading that number waits for the device once."""
    check_readable(named, "the bools of `keep`", "give indices as `keep`")
    most = int(named.sum(1).max()) if named.numel() else 0
    if most == 0:
        return None
    tokens = front_first(named)[:, :most]
    return Kept(tokens, named.gather(1, tokens))


def inputs_of_residual(
    query: Tensor, key: Tensor, value: Tensor, call: Call, *, skips_padding: bool
) -> tuple[Tensor, Tensor, Tensor, Call]:
    """The inputs of the method itself, in which the kept tokens are padding."""
    inner = replace(call, mask=call.kept.left_out_of(call.mask, query.shape[2]), kept=None, wants_lse=True)
    if not skips_padding:
        query, key, value = cleared_inputs(query, key, value, inner.mask)
    return query, key, value, inner


def completed(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M E"],
    call: Call,
    partial: Partial,
) -> Partial:
    """The partial over all keys, in fp32 or better: `partial`, the columns of the kept tokens, and their rows.

    `partial` is the method's partial over the other keys, with out = 0 and lse = −inf for padded queries. What
    stands in padding must be finite.
    """
    kept: Kept = call.kept
    N, mask = query.shape[2], replace(call.mask, span=None)
    query, key, value = upcast(query, key, value)
    every = torch.arange(N, device=query.device)[None]
    valid_queries, valid_keys = mask.query_padding(N), mask.key_padding(N)

    of_kept = taken(key, kept.tokens), taken(value, kept.tokens)
    others = not_kept(kept, valid_queries, N)
    columns = with_columns(query, *of_kept, every, kept.tokens, others, kept.which_are(valid_keys), call, partial)
    rows = taken(query, kept.tokens), key, value, kept.tokens, every, kept.which_are(valid_queries), valid_keys
    return with_rows(columns, attend_as_kept(*rows, call), kept, valid_queries)


def not_kept(kept: Kept, valid: Bool[Tensor, "B N"] | None, N: int) -> Bool[Tensor, "B N"]:
    """The real tokens that are not kept."""
    others = ~kept.among(N)
    return others if valid is None else valid & others


def with_columns(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B G S D"],
    value: Float[Tensor, "B G S E"],
    queries: Int64[Tensor, "#B N"],
    keys: Int64[Tensor, "B S"],
    others: Bool[Tensor, "B N"],
    present: Bool[Tensor, "B S"],
    call: Call,
    partial: Partial,
) -> Partial:
    """The partial of the queries that are not kept, with the kept keys that are there; (0, −inf) for all others.

    The rest is one more key, with its log-sum-exp as the logit and its output as the value.
    """
    other_out, other_lse = partial
    assert other_lse is not None
    mask = replace(call.mask, span=None)
    allowed = _visible(mask, call.bias, queries, keys, others, present).expand(*other_lse.shape, -1)
    logits = torch.cat([_logits(query, key, call, queries, keys), other_lse[..., None]], dim=-1)
    allowed = torch.cat([allowed, (others[:, None] & ~torch.isneginf(other_lse))[..., None]], dim=-1)
    weights, lse = visible_softmax(logits, allowed), visible_logsumexp(logits, allowed)
    of_kept, of_others = _dropped(weights[..., :-1], call), weights[..., -1:]
    return torch.addcmul(of_kept @ repeat_heads(value, query.shape[1]), upcast(other_out)[0], of_others), lse


def attend_as_kept(
    query: Float[Tensor, "B H S D"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M E"],
    queries: Int64[Tensor, "B S"],
    keys: Int64[Tensor, "#B M"],
    present: Bool[Tensor, "B S"],
    valid_keys: Bool[Tensor, "B M"] | None,
    call: Call,
) -> Partial:
    """The partial of kept queries over these keys; (0, −inf) for a slot that is empty. No lse where nobody wants it."""
    allowed = _visible(replace(call.mask, span=None), call.bias, queries, keys, present, valid_keys)
    logits = _logits(query, key, call, queries, keys)
    weights = _dropped(visible_softmax(logits, allowed), call)
    lse = visible_logsumexp(logits, allowed) if call.wants_lse else None
    return weights @ repeat_heads(value, query.shape[1]), lse


def with_rows(columns: Partial, rows: Partial, kept: Kept, valid_queries: Bool[Tensor, "B N"] | None) -> Partial:
    """The partial of all queries: that of the kept ones is put where `columns` holds nothing."""
    (out, lse), (row_out, row_lse) = columns, rows
    # An empty slot adds 0 to the token whose number it holds.
    present = kept.which_are(valid_queries)
    index = kept.tokens[:, None].expand(-1, out.shape[1], -1)
    row_out = row_out.masked_fill(~present[:, None, :, None], 0.0)
    out = out.scatter_add_(2, index[..., None].expand_as(row_out), row_out)
    if lse is None or row_lse is None:
        return out, None
    row_lse = row_lse.masked_fill(~present[:, None], 0.0)
    lse = lse.masked_fill(kept.among(out.shape[2])[:, None], 0.0).scatter_add(2, index, row_lse)
    return out, lse if valid_queries is None else lse.masked_fill(~valid_queries[:, None], -torch.inf)


def _logits(
    query: Float[Tensor, "B H n D"],
    key: Float[Tensor, "B G m D"],
    call: Call,
    queries: Int64[Tensor, "#B n"],
    keys: Int64[Tensor, "#B m"],
) -> Float[Tensor, "B H n m"]:
    """Logits of these queries and keys, whose numbers are `queries` and `keys`; n or m is that of kept tokens."""
    logits = query @ repeat_heads(key, query.shape[1]).mT * call.scale
    return logits if call.bias is None else logits + _pairs(call.bias, queries, keys)


def _dropped(weights: Tensor, call: Call) -> Tensor:
    return F.dropout(weights, call.dropout_p) if call.dropout_p else weights


def _visible(
    mask: Mask,
    bias: Tensor | None,
    queries: Int64[Tensor, "#B n"],
    keys: Int64[Tensor, "#B m"],
    valid_queries: Bool[Tensor, "B n"],
    valid_keys: Bool[Tensor, "B m"] | None,
) -> Bool[Tensor, "#B #H n m"]:
    """The pairs of these queries and keys that see each other, by their numbers. A bias of −∞ hides a key."""
    pairs = mask.sees(queries[:, None, :, None], keys[:, None, None, :])
    for ids in mask.ids:
        of_query, of_key = (ids.gather(1, tokens.expand(len(ids), -1)) for tokens in (queries, keys))
        pairs = pairs & (of_query[:, None, :, None] == of_key[:, None, None, :])
    for allowed in mask.allowed:
        pairs = pairs & _pairs(allowed, queries, keys)
    pairs = pairs if bias is None else pairs & ~_pairs(bias, queries, keys).isneginf()
    pairs = pairs & valid_queries[:, None, :, None]
    return pairs if valid_keys is None else pairs & valid_keys[:, None, None, :]


def _pairs(x: Tensor, queries: Int64[Tensor, "#B n"], keys: Int64[Tensor, "#B m"]) -> Tensor:
    """The entries of an (B|1, H|1, N, M) at these queries and keys."""
    B, device = max(len(queries), len(keys), len(x)), x.device
    item, head = torch.arange(B, device=device), torch.arange(x.shape[1], device=device)
    at = item[:, None, None, None], head[:, None, None], queries[:, None, :, None], keys[:, None, None, :]
    return x.expand(B, -1, -1, -1)[at]
