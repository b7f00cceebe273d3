"""How a method runs on a sequence that is split over ranks: what ranks send, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from subquad.masks import Mask
from subquad.methods.by_heads import loss_by_heads, run_by_heads
from subquad.methods.call import Call, Partial
from subquad.methods.checks import check_bias
from subquad.methods.in_halo import run_with_halo, segments_rise
from subquad.methods.keep import check_bools, named_tokens
from subquad.methods.keep_in_parallel import run_with_kept
from subquad.methods.learned_heads import state_of_heads, undeclared
from subquad.ops.transforms import transform
from subquad.parallel.sequence import Sequence
from subquad.shapes import Sizes

Method = Any  # a `base.Method`, whose module imports this one


def mask_of_rank(mask: Mask, sizes: Sizes, of: Any, device: torch.device) -> tuple[Mask, Sizes]:
    """The mask for the tokens of this rank, whose sizes are given, and the sizes of the whole call.

    Raises:
        TypeError: `parallel` is not a `sq.parallel.Sequence`.
        ValueError: this rank has other tokens than the sequence says, or the mask does not fit them.
    """
    if not isinstance(of, Sequence):
        raise TypeError(f"`parallel` is a {type(of).__name__}, but it must be a sq.parallel.Sequence")
    of.check_part(sizes.N, "`query`")
    of.check_part(sizes.M, "`key`", keys=True)
    mask = of.local(mask)
    whole = replace(sizes, N=of.tokens, M=sum(of.key_lengths))
    replace(mask, is_causal=False, span=None, offset=None, allowed=()).check(sizes, device)
    Mask(mask.is_causal, mask.offset, mask.span).check(whole, device)
    Mask(allowed=mask.allowed).check(replace(sizes, M=whole.M), device)
    return mask, whole


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
    if call.dropout_p > 0:
        raise ValueError(
            "`parallel` does not go with dropout, whose numbers follow torch's generator and would not be those of one "
            "device; use dropout_p=0, and drop outputs instead of weights"
        )
    if transform() is not None:
        raise ValueError(
            "`parallel` does not go with vmap, torch.func or forward-mode AD; use autograd's backward pass"
        )
    if call.bias is not None:
        check_bias(call.bias, query, sum(of.key_lengths))
    reason = refusal(method, call, of, query.shape[1])
    if reason:
        raise ValueError(reason)
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
            **_options(call),
            "gradients": _has_gradients(query, key, value, call),
        }
    )


def _options(call: Call) -> dict[str, Any]:
    """The options of a call, as far as ranks must agree on them."""
    rows = {"bias": () if call.bias is None else (call.bias,), "a dense mask": call.mask.allowed}
    shapes = {what: [(*x.shape[:2], str(x.dtype)) for x in given] for what, given in rows.items()}
    kept, hidden = call.kept, call.hidden
    return {
        **{what: str(each) for what, each in shapes.items()},
        "keep": None if kept is None else "bools" if kept.dtype == torch.bool else str(kept.tolist()),
        "hidden": None if hidden is None else (hidden.shape[2], str(hidden.dtype)),
        "training": call.learned is not None and call.learned.training,
    }


def _has_gradients(query: Tensor, key: Tensor, value: Tensor, call: Call) -> bool:
    """Whether a backward pass may follow, in which all ranks must take part."""
    learned = () if call.learned is None else call.learned.parameters()
    given = (x for x in (query, key, value, call.bias, call.hidden, *learned) if x is not None)
    return torch.is_grad_enabled() and any(x.requires_grad for x in given)


def refusal(method: Method, call: Call, of: Sequence, heads: int) -> str | None:
    """Why the method cannot run on this sequence, with the remedy; None if it can."""
    found, needs = way(method, call, of, heads), needs_all_tokens(method, call, of)
    if of.mode == "ring" and found != "ring":
        beyond = [what for what in needs if what not in _IN_A_RING] + ["`keep`"] * (call.kept is not None)
        why = beyond[0] if method.can_ring() and beyond else f"{method.label!r}, whose keys do not go from rank to rank"
        return f"mode='ring' is not available for {why}; use mode='auto', or method='full'"
    if of.mode == "summary" and found != "summary":
        why = needs[0] if method.split_by() and needs else f"{method.label!r}"
        others = f", or {method.split_needs}" if method.split_needs and not needs else ""
        return (
            f"mode='summary' is not available for {why}: there is no summary of a rank's keys whose size does not grow "
            f"with their number; use mode='heads'{' or mode=' + repr('ring') if method.can_ring() else others}"
        )
    learned = call.learned
    if found == "heads" and learned is not None and undeclared(learned) is not None:
        return (
            f"mode='heads' does not know which heads of {method.label!r} the parameter {undeclared(learned)!r} belongs "
            "to; name it in `by_query_head` or `by_key_head` of its module"
        )
    if found == "heads" and learned is not None and learned.training and state_of_heads(learned) is not None:
        return (
            f"in training {method.name!r} moves the {state_of_heads(learned)} of each head by the tokens of all "
            "processes, which mode='heads' does not do; use .eval() on its layer, or train it without `parallel`"
        )
    return None


def refusal_of_method(method: Method, mask: Mask, of: Sequence, heads: int, learned: Any = None) -> str | None:
    """`refusal` of calls with nothing but a mask."""
    return refusal(method, Call(mask, None, 1.0, 0.0, 0, learned=learned), of, heads)


def way_of_method(method: Method, mask: Mask, of: Sequence, heads: int) -> str:
    """`way` of calls with nothing but a mask."""
    return way(method, Call(mask, None, 1.0, 0.0, 0), of, heads)


_IN_CROSS_ATTENTION = "a causal mask or a window in cross-attention"
_IN_A_RING = "packed segments", _IN_CROSS_ATTENTION  # what it can though it has no summary


def needs_all_tokens(method: Method, call: Call, of: Sequence) -> list[str]:
    """What of a call concerns more than the keys by themselves."""
    mask = call.mask
    asked = {
        "packed segments with `keep`": bool(mask.ids) and call.kept is not None,
        "packed segments": len(mask.ids) > (method.split_by() == "halo"),
        "a window": mask.span is not None and method.split_by() == "places",
        "a dense mask": bool(mask.allowed),
        "a mask with an offset": not mask.aligned,
        "`bias`": call.bias is not None,
        # A query stands beside no key of its own rank.
        _IN_CROSS_ATTENTION: of.keys not in (None, of.lengths) and not mask.only_padding,
    }
    return [what for what, there in asked.items() if there]


def way(method: Method, call: Call, of: Sequence, heads: int) -> str:
    """What ranks send: a "summary" of their keys, all keys in a "ring", or all tokens of some "heads"."""
    needs = needs_all_tokens(method, call, of)
    if method.split_by() is not None and of.mode in ("auto", "summary") and not needs:
        return "summary"
    few = of.mode == "auto" and heads < of.ranks
    known = call.kept is None and all(what in _IN_A_RING for what in needs)
    return "ring" if method.can_ring() and known and (of.mode == "ring" or few) else "heads"


def run_parallel(method: Method, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
    """The partial of this rank's queries over the keys of all ranks."""
    found = way(method, call, call.parallel, query.shape[1])
    if found == "heads":
        return run_by_heads(method, query, key, value, call)
    if found == "ring":
        return method._attended(query, key, value, call)
    if call.mask.ids and not segments_rise(call.mask.ids[0], call.parallel):
        if call.parallel.mode == "summary":
            raise ValueError(
                "mode='summary' takes packed segments whose tokens are adjacent and whose ids rise; number them in "
                "their order, or use mode='heads'"
            )
        return run_by_heads(method, query, key, value, call)
    if call.kept is not None:
        return run_with_kept(partial(_by_summary, method), query, key, value, call)
    return _by_summary(method, query, key, value, call)


def _by_summary(method: Method, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
    """Attention by what ranks send of their keys."""
    if method.split_by() in ("halo", "places"):
        return run_with_halo(method, query, key, value, call)
    return method._attended(query, key, value, call)


def loss_of_rank(method: Method, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor | None:
    """This rank's part of the auxiliary loss: the parts of all ranks add up to that of one device.

    Raises:
        ValueError: the ranks send summaries, from which the loss cannot be computed.
    """
    if way(method, call, call.parallel, query.shape[1]) != "heads":
        if not method.loss_reads_tokens:
            loss = method.run_auxiliary_loss(query, key, value, replace(call, parallel=None, kept=None))
            return None if loss is None else loss / call.parallel.ranks
        raise ValueError(
            f"{method.name!r} learns by an auxiliary loss over all tokens, which mode='summary' does not compute; use "
            "mode='heads' in training, or .eval() on its layer"
        )
    return loss_by_heads(method, query, key, value, call)
