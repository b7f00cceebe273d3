"""How a method runs on a sequence that is split over ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from subquad.masks import Mask
from subquad.methods.call import Call, Partial
from subquad.methods.keep import check_bools, named_tokens
from subquad.methods.keep_in_parallel import run_with_kept
from subquad.parallel.halo import Halo
from subquad.parallel.heads import to_heads, to_tokens
from subquad.parallel.sequence import Sequence

Method = Any  # a `base.Method`, whose module imports this one


def mask_of_rank(mask: Mask, query: Tensor, key: Tensor, of: Any) -> Mask:
    """The mask for the tokens of this rank.

    Raises:
        TypeError: `parallel` is not a `sq.parallel.Sequence`.
        ValueError: this rank has other tokens than the sequence says.
    """
    if not isinstance(of, Sequence):
        raise TypeError(f"`parallel` is a {type(of).__name__}, but it must be a sq.parallel.Sequence")
    of.check_part(query.shape[2], "`query`")
    of.check_part(key.shape[2], "`key`", keys=True)
    return of.local(mask)


def kept_of_rank(keep: Any, query: Tensor, of: Sequence) -> Tensor | None:
    """The argument `keep` as a tensor: numbers of tokens of the sequence, or bools for this rank's.

    Raises:
        TypeError: it holds neither ints nor bools.
        ValueError: it does not fit the tokens, or the keys are other tokens.
    """
    if of.keys is not None:
        raise ValueError("`keep` is for self-attention, but the sequence has keys of its own; leave out one of the two")
    named = named_tokens(keep, of.tokens)
    if named.dtype == torch.bool and named.numel():
        check_bools(named, query)
    return named if named.numel() else None


def check_parallel(method: Method, query: Tensor, key: Tensor, value: Tensor, call: Call, of: Sequence) -> None:
    """Raise ValueError if the ranks disagree, or the call cannot be split."""
    refused = {
        "a mask with an offset": not call.mask.aligned,
        "a dense mask": bool(call.mask.allowed),
        "`bias`": call.bias is not None,
        "`keep`": call.kept is not None and not by_summary(method, call.mask, of),
        "dropout": call.dropout_p > 0,
    }
    reason = refusal(method, call.mask, of)
    if reason:
        raise ValueError(reason)
    for what, asked in refused.items():
        if asked:
            raise ValueError(f"`parallel` does not go with {what}; leave it out, or gather the sequence on one rank")
    of.agree(
        {
            "lengths": (of.lengths, of.keys),
            "mode": of.mode,
            "the method": str(method),
            "a batch of": query.shape[0],
            "heads": (query.shape[1], key.shape[1]),
            "widths": (query.shape[3], value.shape[3]),
            "the dtype": str(query.dtype),
            "the seed": call.seed,
            "the scale": call.scale,
            "the mask": repr(call.mask),
            "return_lse": call.wants_lse,
            "keep": None
            if call.kept is None
            else "bools"
            if call.kept.dtype == torch.bool
            else str(call.kept.tolist()),
        }
    )


def refusal(method: Method, mask: Mask, of: Sequence) -> str | None:
    """Why the method cannot run on this sequence, with the remedy; None if it can."""
    if by_summary(method, mask, of):
        return None
    if of.mode == "summary":
        why = "packed segments" if mask.ids and method.split_by() else f"{method.name!r}"
        return (
            f"mode='summary' is not available for {why}: there is no summary of a rank's keys whose size does not grow "
            f"with their number; use mode='heads'{method.split_needs and ', or ' + method.split_needs}"
        )
    if not method.treats_heads_alike():
        return (
            f"{method.name!r} treats each head in its own way, which mode='heads' cannot divide yet; use a method "
            "without learned parameters such as 'i-clustered', or one with mode='summary' such as 'linear'"
        )
    return None


def by_summary(method: Method, mask: Mask, of: Sequence) -> bool:
    """Whether ranks send summaries and not their tokens."""
    return method.split_by() is not None and of.mode != "heads" and not mask.ids


def run_parallel(method: Method, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
    """The partial of this rank's queries over the keys of all ranks."""
    of: Sequence = call.parallel
    if not by_summary(method, call.mask, of):
        return _by_heads(method, query, key, value, call)
    if call.kept is not None:
        return run_with_kept(partial(_by_summary, method), query, key, value, call)
    return _by_summary(method, query, key, value, call)


def _by_summary(method: Method, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
    """Attention by what ranks send of their keys."""
    if method.split_by() == "halo":
        return _with_halo(method, query, key, value, call)
    return method._attended(query, key, value, call)


def loss_of_rank(method: Method, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor | None:
    """This rank's part of the auxiliary loss: the parts of all ranks add up to that of one device.

    Raises:
        ValueError: the ranks send summaries, from which the loss cannot be computed.
    """
    raise ValueError(
        f"{method.name!r} learns by an auxiliary loss over all tokens, which mode='summary' does not compute; use "
        "mode='heads' in training, or .eval() on its layer"
    )


def _by_heads(method: Method, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
    """Attention to all tokens by this rank's share of the heads."""
    of, heads = call.parallel, query.shape[1]
    whole = replace(call, mask=of.whole(call.mask), parallel=None)
    query, key, value = to_heads(query, key, value, of)
    out, lse = method._attended(query, key, value, whole) if query.shape[1] else _of_no_heads(query, value)
    out = to_tokens(out.to(query.dtype), of, heads)
    return out, None if lse is None or not call.wants_lse else to_tokens(lse, of, heads)


def _of_no_heads(query: Tensor, value: Tensor) -> Partial:
    """What a rank without heads has to send: nothing, and still it receives gradients of nothing."""
    out = query[..., :1] * value.new_zeros(value.shape[3])
    return out, out.sum(-1)


def _with_halo(method: Any, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
    """Attention to this rank's keys and those around them, as a query somewhere among a few more keys."""
    of, mask = call.parallel, call.mask
    before, behind = method.reach(of.tokens, mask)
    halo = Halo.around(of, before, behind)
    width = key.shape[3]
    both = halo.keys(torch.cat([key, value], dim=3))
    real = mask.key_padding(key.shape[2])
    keys = () if real is None else (halo.keys(real.byte(), dim=1).bool(),)
    queries = mask.query_padding(query.shape[2])
    inner = Mask(
        is_causal=mask.is_causal,
        offset=halo.before,
        span=mask.span,
        keys=keys,
        queries=() if queries is None else (queries,),
    )
    inside = replace(call, mask=inner, parallel=None)
    return method._attended(query, both[..., :width], both[..., width:], inside)
