"""Positions of items with padding on the left, for a swapped model with rotary positions.

Without `position_ids`, models count positions from the first token of the batch, padding included, so padding on the
left shifts the positions of an item. Exact attention depends on distances alone, but clusters of rotated queries and
keys depend on the shift, so an item would have other clusters in a batch than alone. Here an item's positions start at
its first real token, as they do alone:

    mask        0 0 0 1 1 1 1
    positions  −3 −2 −1 0 1 2 3

A cache that was filled with such positions is marked, so that later calls with it count in the same way, also after
`restore` and in other models of the class.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from transformers import Cache, PreTrainedModel

from subquad.core.readable import can_be_read
from subquad.core.versions import cache_in
from subquad.hf.call_checks import CALL, Action, arguments_by_name
from subquad.hf.example_inputs import example_inputs
from subquad.hf.layers import Attached
from subquad.hf.positions import holders_of_tables
from subquad.hf.rotary_trial import has_fixed_frequencies
from subquad.hf.split import takes
from subquad.hf.token_positions import tokens_of
from subquad.hf.trial import undisturbed

MARK = "_subquad_from_first_real_token"  # on caches that were filled with positions that were made here
_SHIFTS = 7, -5  # of the trial: a model whose outputs they change depends on more than distances
_ROUNDING = 1e-3, 5e-2  # of fp32 and of 16-bit outputs, relative to the largest
_KNOWN: WeakKeyDictionary[PreTrainedModel, tuple[str, bool]] = WeakKeyDictionary()


def count_from_first_valid_token(model: PreTrainedModel) -> None:
    """Start the positions of each item at its first real token, in calls without position_ids.

    Only models are changed whose own outputs do not depend on a common shift of all positions, as a trial shows, and
    only if a method that approximates attention runs in them.
    """
    for part in _parts_that_count(model):
        _Counting(type(part), _call).put(part, CALL)


def counts_from_first_valid_token(model: PreTrainedModel) -> bool:
    """True if `count_from_first_valid_token` changes a model, for one whose tokens are split over ranks."""
    return any(True for _ in _parts_that_count(model))


def stop_counting(model: nn.Module) -> None:
    """Remove what `count_from_first_valid_token` added."""
    for module in model.modules():
        vars(module).pop(CALL, None)


def _parts_that_count(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and _is_innermost(part) and _depends_on_distances_alone(part):
            yield part


def _is_innermost(part: PreTrainedModel) -> bool:
    """True if a model, and none inside of it, contains layers that approximate attention."""
    inside = [each for each in part.modules() if each is not part and isinstance(each, PreTrainedModel)]
    return _approximates(part) and not any(map(_approximates, inside))


def _approximates(part: nn.Module) -> bool:
    return any(isinstance(each, Attached) and not each.bound.method.is_exact for each in part.modules())


# ---------------------------------------------------------------------- the trial


def _depends_on_distances_alone(part: PreTrainedModel) -> bool:
    """True if a model with rotary positions has the same outputs, by its own attention, if all of them are shifted."""
    if getattr(part, "declares_attention", False) or not takes(part, "position_ids"):
        return False
    if not has_fixed_frequencies(part) or holders_of_tables(part):
        return False
    scope = str(part.dtype)
    known = _KNOWN.get(part)
    if known is None or known[0] != scope:
        _KNOWN[part] = known = scope, _is_same_when_shifted(part)
    return known[1]


def _is_same_when_shifted(part: PreTrainedModel) -> bool:
    try:
        batch: dict[str, Any] = dict(example_inputs(part, batch=1, length=12, images=False))
        if takes(part, "use_cache"):
            batch["use_cache"] = False
        tokens = tokens_of(batch)
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        with undisturbed(part):
            first, *shifted = (part(**batch, position_ids=positions + shift)[0] for shift in (0, *_SHIFTS))
    except Exception:  # a model that does not run alone, or takes other positions
        return False
    limit = _ROUNDING[first.dtype not in (torch.float32, torch.float64)] * first.float().abs().max()
    return all(bool((first.float() - other.float()).abs().max() <= limit) for other in shifted)


# ---------------------------------------------------------------------- the calls


def _call(forward: Callable[..., Any], module: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a model with the positions of a batch with padding on the left, and mark the cache that it fills."""
    inputs = arguments_by_name(module, args, kwargs)
    positions = _positions_of_call(inputs)
    if positions is None:
        return forward(module, *args, **kwargs)
    output = forward(module, **{**inputs, "position_ids": positions})
    outputs = output.values() if isinstance(output, Mapping) else output
    for cache in (cache_in(inputs), *outputs):
        if isinstance(cache, Cache):
            setattr(cache, MARK, True)
    return output


def _call_with_marked(
    forward: Callable[..., Any], module: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a model that counts from the first token of the batch, except on a cache that is marked."""
    cache = cache_in(arguments_by_name(module, args, kwargs))
    if cache is None or not getattr(cache, MARK, False):
        return forward(module, *args, **kwargs)
    return _call(forward, module, args, kwargs)


class _Counting(Action):
    """A mark of a model whose items start at their first real token; its class continues the caches that it fills."""

    def __init__(self, cls: Any, value: Any):
        super().__init__(cls, value)
        setattr(cls, CALL, staticmethod(_call_with_marked))


def _positions_of_call(inputs: Mapping[str, Any]) -> Tensor | None:
    """The positions that a call must have; None if those that it has are right."""
    cache, mask, positions = cache_in(inputs), inputs.get("attention_mask"), inputs.get("position_ids")
    marked = cache is not None and getattr(cache, MARK, False)
    if not marked and (positions is not None or mask is None or (is_compiling() and cache is not None)):
        return None
    cached = 0 if cache is None else int(cache.get_seq_length())
    if cached and not marked:  # its keys were counted from the first token of the batch
        return None
    if marked and not cached:  # it was emptied
        delattr(cache, MARK)
        marked = False
    expected = _positions(mask, cached, inputs)
    if marked:
        _check_step(expected, positions, mask)
    elif mask is not None and expected is not None and can_be_read(mask) and bool(mask[:, 0].all()):
        return None  # no item has padding on the left
    return expected if positions is None else None


def _positions(mask: Any, cached: int, inputs: Mapping[str, Any]) -> Tensor | None:
    """The positions of the new tokens, counted from the first real token; None if the mask does not show it."""
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        return None
    new = tokens_of(inputs).shape[1]
    if mask.shape[1] != cached + new:
        return None
    first = mask.bool().int().argmax(1, keepdim=True)
    return torch.arange(cached, cached + new, device=mask.device)[None] - first


def _check_step(expected: Tensor | None, positions: Tensor | None, mask: Tensor | None) -> None:
    """Raise ValueError for a step on a marked cache that is counted in another way."""
    remedy = "pass the attention_mask (batch, tokens) of all tokens, and leave position_ids out"
    if expected is None or mask is None:
        raise ValueError(
            "this cache was filled from a batch with padding on the left, whose positions start at the first real "
            f"token of each item, but the new tokens have no attention mask that shows the padding: {remedy}"
        )
    if positions is not None:
        valid = mask[:, -expected.shape[1] :].bool()
        if positions.shape[-1] != expected.shape[1] or bool((positions != expected)[valid].any()):
            raise ValueError(
                "this cache was filled from a batch with padding on the left, whose positions start at the first real "
                f"token of each item, but position_ids count in another way: {remedy}"
            )
