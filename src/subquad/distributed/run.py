"""Run a method on a sequence that is split over ranks: the exchanges between ranks, and the calls that are refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from subquad.core.shapes import Sizes
from subquad.distributed.by_halo import segments_rise
from subquad.distributed.by_heads import loss_by_heads, run_by_heads
from subquad.distributed.global_tokens import run_with_kept
from subquad.distributed.strategies import Strategy, needed_settings, ring_of, summary_of
from subquad.distributed.token_split import TokenSplit
from subquad.kernels.tensors import differentiated
from subquad.kernels.transforms import transform
from subquad.masks import Mask
from subquad.methods.core.call import Call, Partial
from subquad.methods.core.checks import check_bias
from subquad.methods.core.global_tokens import check_aligned, check_bools, named_tokens
from subquad.methods.core.learned_heads import state_of_heads, undeclared
from subquad.methods.core.method import Method


def mask_of_rank(mask: Mask, sizes: Sizes, split: TokenSplit, device: torch.device) -> tuple[Mask, Sizes]:
    """The mask for the tokens of this rank, whose sizes are given, and the sizes of the whole call.

    Raises:
        ValueError: this rank's tokens differ from the sequence's numbers, or the mask does not fit them.
    """
    split.check_part(sizes.N, "`query`")
    split.check_part(sizes.M, "`key`", keys=True)
    whole = replace(sizes, N=split.tokens, M=sum(split.key_lengths))
    # What concerns the whole sequence is refused by it: a rank that has one query and one key cannot tell.
    if (mask.both or mask.ids) and split.key_lengths != split.lengths:
        what = "one padding for both sides" if mask.both else "segments"
        raise ValueError(
            f"the mask gives {what}, but the ranks have other numbers of keys than of queries, "
            f"{sum(split.key_lengths)} and {split.tokens} in all; use Mask.padding(keys=…, queries=…) for "
            "cross-attention"
        )
    lengths = {side: tuple(x for x in getattr(mask, side) if x.ndim == 1) for side in ("both", "keys", "queries")}
    Mask(mask.is_causal, mask.offset, mask.span, **lengths).check(whole, device)
    mask = split.local(mask)
    replace(mask, is_causal=False, span=None, offset=None, allowed=()).check(sizes, device)
    Mask(allowed=mask.allowed).check(replace(sizes, M=whole.M), device)
    return mask, whole


def kept_of_rank(keep: Any, query: Tensor, mask: Mask, split: TokenSplit) -> Tensor | None:
    """The argument `keep` as a tensor: numbers of tokens of the sequence, or bools for this rank's.

    Raises:
        TypeError: it holds neither ints nor bools.
        ValueError: it does not fit the tokens, or the keys are other tokens, or are aligned with other queries.
    """
    if split.keys is not None:
        raise ValueError("`keep` is for self-attention, but the sequence has keys of its own; leave out one of the two")
    check_aligned(mask)
    named = named_tokens(keep, split.tokens)
    if named.dtype == torch.bool and named.numel():
        check_bools(named, query)
    return named if named.numel() else None


def check_split(method: Method, query: Tensor, key: Tensor, value: Tensor, call: Call, split: TokenSplit) -> None:
    """Raise ValueError if the ranks disagree, or the call cannot be split."""
    if call.dropout_p > 0:
        raise ValueError(
            "`parallel` is not supported with dropout, whose numbers follow torch's generator and would not be those "
            "of one device; use dropout_p=0, and drop outputs instead of weights"
        )
    if transform() is not None:
        raise ValueError(
            "`parallel` is not supported with vmap, torch.func or forward-mode AD; use autograd's backward pass"
        )
    if call.bias is not None:
        check_bias(call.bias, query, sum(split.key_lengths))
    reason = refusal(method, call, split, query.shape[1])
    if reason:
        raise ValueError(reason)
    split.agree(
        {
            "lengths": (split.lengths, split.keys),
            "mode": split.mode,
            "the method": str(method),
            "a batch of": query.shape[0],
            "heads": (query.shape[1], key.shape[1]),
            "widths": (query.shape[3], value.shape[3]),
            "the dtype": str(query.dtype),
            "the seed": call.seed,
            "the scale": call.scale,
            "the mask": repr(call.mask),
            "return_lse": call.wants_lse,
            **_options(call),
            "gradients": _has_gradients(query, key, value, call),
        }
    )


def _options(call: Call) -> dict[str, Any]:
    """The options of a call, as far as ranks must agree on them."""
    rows = {"bias": () if call.bias is None else (call.bias,), "a dense mask": call.mask.allowed}
    shapes = {what: [(*x.shape[:2], str(x.dtype)) for x in tensors] for what, tensors in rows.items()}
    kept, hidden = call.kept, call.hidden
    return {
        **{what: str(each) for what, each in shapes.items()},
        "keep": None if kept is None else "bools" if kept.dtype == torch.bool else str(kept.tolist()),
        "hidden": None if hidden is None else (hidden.shape[2], str(hidden.dtype)),
        "training": call.learned is not None and call.learned.training,
    }


def _has_gradients(query: Tensor, key: Tensor, value: Tensor, call: Call) -> bool:
    """True if a backward pass may follow, in which all ranks must participate."""
    learned = () if call.learned is None else call.learned.parameters()
    return differentiated(*(x for x in (query, key, value, call.bias, call.hidden, *learned) if x is not None))


def refusal(method: Method, call: Call, split: TokenSplit, heads: int) -> str | None:
    """The reason why the method cannot run on this sequence, with the remedy; None if it can."""
    chosen_way, needs = way(method, call, split, heads), needs_all_tokens(method, call, split)
    rings = ring_of(method) is not None
    if split.mode == "ring" and chosen_way != "ring":
        beyond = [what for what in needs if what not in _IN_A_RING] + ["`keep`"] * (call.kept is not None)
        why = beyond[0] if rings and beyond else f"{method.label!r}, whose keys do not go from rank to rank"
        return f"mode='ring' is not available for {why}; use mode='auto', or method='full'"
    if split.mode == "summary" and chosen_way != "summary":
        why = needs[0] if summary_of(method) is not None and needs else f"{method.label!r}"
        others = f", or {needed_settings(method)}" if needed_settings(method) and not needs else ""
        return (
            f"mode='summary' is not available for {why}: there is no summary of a rank's keys whose size does not grow "
            f"with their number; use mode='heads'{' or mode=' + repr('ring') if rings else others}"
        )
    learned = call.learned
    if chosen_way == "heads" and learned is not None and undeclared(learned) is not None:
        return (
            f"mode='heads' does not know which heads of {method.label!r} the parameter {undeclared(learned)!r} belongs "
            "to; name it in `by_query_head` or `by_key_head` of its module"
        )
    if chosen_way == "heads" and learned is not None and learned.training and state_of_heads(learned) is not None:
        return (
            f"in training {method.name!r} moves the {state_of_heads(learned)} of each head by the tokens of all "
            "processes, which mode='heads' does not do; use .eval() on its layer, or train it without `parallel`"
        )
    return None


def refusal_of_method(method: Method, mask: Mask, split: TokenSplit, heads: int, learned: Any = None) -> str | None:
    """`refusal` of calls with nothing but a mask."""
    return refusal(method, Call(mask, None, 1.0, 0.0, 0, learned=learned), split, heads)


def way_of_method(method: Method, mask: Mask, split: TokenSplit, heads: int) -> str:
    """`way` of calls with nothing but a mask."""
    return way(method, Call(mask, None, 1.0, 0.0, 0), split, heads)


_IN_CROSS_ATTENTION = "a causal mask or a window in cross-attention"
_IN_A_RING = "packed segments", _IN_CROSS_ATTENTION  # what it can though it has no summary


def needs_all_tokens(method: Method, call: Call, split: TokenSplit) -> list[str]:
    """The properties of a call that need all tokens, not only the keys by themselves."""
    mask, strategy = call.mask, summary_of(method)
    kind = None if strategy is None else strategy.kind
    asked = {
        "packed segments with `keep`": bool(mask.ids) and call.kept is not None,
        "packed segments": len(mask.ids) > (kind == "halo"),
        "a window": mask.span is not None and kind == "places",
        "a dense mask": bool(mask.allowed),
        "a causal mask, which it meets by halves": mask.is_causal and method.traits.by_halves,
        "a mask with an offset": not mask.aligned,
        "`bias`": call.bias is not None,
        # A query is aligned with no key of its own rank.
        _IN_CROSS_ATTENTION: split.keys not in (None, split.lengths) and not mask.only_padding,
    }
    return [what for what, is_asked in asked.items() if is_asked]


def way(method: Method, call: Call, split: TokenSplit, heads: int) -> str:
    """The mode of the exchanges: a "summary" of keys, all keys in a "ring", or all tokens of some "heads"."""
    needs = needs_all_tokens(method, call, split)
    if summary_of(method) is not None and split.mode in ("auto", "summary") and not needs:
        return "summary"
    few = split.mode == "auto" and heads < split.ranks
    known = call.kept is None and all(what in _IN_A_RING for what in needs)
    return "ring" if ring_of(method) is not None and known and (split.mode == "ring" or few) else "heads"


def run_split(method: Method, query: Tensor, key: Tensor, value: Tensor, call: Call, split: TokenSplit) -> Partial:
    """The partial of this rank's queries over the keys of all ranks."""
    chosen_way = way(method, call, split, query.shape[1])
    if chosen_way == "heads":
        return run_by_heads(method, query, key, value, call, split)
    strategy = ring_of(method) if chosen_way == "ring" else summary_of(method)
    assert strategy is not None, "`way` has found it"
    attend = partial(_attend, strategy, method, split)
    if chosen_way == "ring":
        return attend(query, key, value, call)
    if call.mask.ids and not segments_rise(call.mask.ids[0], split):
        if split.mode == "summary":
            raise ValueError(
                "mode='summary' takes packed segments whose tokens are adjacent and whose ids rise; number them in "
                "their order, or use mode='heads'"
            )
        return run_by_heads(method, query, key, value, call, split)
    if call.kept is not None:
        return run_with_kept(attend, query, key, value, call, split)
    return attend(query, key, value, call)


def _attend(
    strategy: Strategy[Any], method: Method, split: TokenSplit, query: Tensor, key: Tensor, value: Tensor, call: Call
) -> Partial:
    """Attention by a strategy; padded queries are 0, with lse = −inf."""
    result = strategy.attend(method.clamped_to(*split.sizes), query, key, value, call, split)
    return method.without_padding(result, call)


def loss_of_rank(
    method: Method, query: Tensor, key: Tensor, value: Tensor, call: Call, split: TokenSplit
) -> Tensor | None:
    """This rank's part of the auxiliary loss: the parts of all ranks add up to that of one device.

    Raises:
        ValueError: the ranks send summaries, from which the loss cannot be computed.
    """
    if way(method, call, split, query.shape[1]) != "heads":
        strategy = summary_of(method)
        if strategy is not None and not strategy.loss_reads_tokens:
            loss = method.run_auxiliary_loss(query, key, value, replace(call, kept=None))
            return None if loss is None else loss / split.ranks
        raise ValueError(
            f"{method.name!r} learns by an auxiliary loss over all tokens, which mode='summary' does not compute; use "
            "mode='heads' in training, or .eval() on its layer"
        )
    return loss_by_heads(method, query, key, value, call, split)
