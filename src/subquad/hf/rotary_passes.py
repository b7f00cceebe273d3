"""The forward passes of models whose rotary positions were extended: what their inputs show of each item's length.

See `item_rotary`.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, GenerationMixin

from subquad.core.readable import can_be_read
from subquad.core.versions import cache_in
from subquad.hf.cache_marks import Extended, mark_cache
from subquad.hf.forward_wrappers import Forward, ForwardMark, positional_names

_WATCHED = "_subquad_watched"  # on a model around extended positions
_WATCHING = "_subquad_watching"  # on the `forward` of a class: it keeps the inputs of watched models
_EXPECTING = "_subquad_expecting"  # on `generate` after it was wrapped


@dataclass
class RotaryPass:
    """The inputs of a model that show where items begin and end, and what follows from them.

    Attributes:
        mask: bool (B,P+N), True for real tokens; None: no mask is given, or one that is not (batch, tokens).
        unread: a mask of another shape is given.
        past: P, the tokens in the cache.
        cache: the cache that is given.
        numbered: whether `position_ids` are given.
        extended: the tokens that are read by YaRN; None before that is known.
        items: the items that are read by YaRN.
        undecided: (B,1), True for items without a real token so far, if there are tokens to come.
    """

    mask: Tensor | None = None
    unread: bool = False
    past: Any = 0
    cache: Any = None
    numbered: bool = True
    extended: Extended | None = None
    items: Extended | None = None
    undecided: Tensor | None = None


# `current`: the pass that runs in this thread. `reach`: how wide its batch will be with the tokens to come, at least.
_RUNNING = threading.local()


def watch(model: nn.Module) -> None:
    """Keep the inputs of a model while its forward pass runs."""
    _Watched(type(model)).put(model, _WATCHED)


def _watching(forward: Forward) -> Forward:
    """The forward pass of a class, which keeps the inputs of its watched models while it runs."""

    def watching(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, _WATCHED, None) is None:
            return forward(self, *args, **kwargs)
        inputs = {**dict(zip(positional_names(forward), args, strict=False)), **kwargs} if args else kwargs
        current, before = _pass_of(inputs), running_pass()
        _RUNNING.current = current
        try:
            output = forward(self, *args, **kwargs)
        finally:
            _RUNNING.current = before
        if current.items is not None and (torch.compiler.is_compiling() or not current.past):
            _keep(current, output)
        return output

    return watching


class _Watched(ForwardMark):
    """A mark of a model whose inputs are kept."""

    on_forward, wrapper = _WATCHING, staticmethod(_watching)


def _pass_of(inputs: Mapping[str, Any]) -> RotaryPass:
    mask, cached = inputs.get("attention_mask"), cache_in(inputs)
    valid = mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None
    past = 0 if cached is None else cached.get_seq_length()
    if isinstance(past, Tensor) and can_be_read(past):
        past = int(past)
    return RotaryPass(valid, mask is not None and valid is None, past, cached, inputs.get("position_ids") is not None)


def _keep(current: RotaryPass, output: Any) -> None:
    """Keep on the cache that a prompt filled how its items are read."""
    outputs = output.values() if isinstance(output, Mapping) else output
    for cached in (current.cache, *(outputs if isinstance(outputs, tuple) or not isinstance(output, Tensor) else ())):
        if isinstance(cached, Cache):
            mark_cache(cached, current.items, current.undecided)


def running_pass() -> RotaryPass | None:
    """The forward pass of an extended model that runs in this thread."""
    return getattr(_RUNNING, "current", None)


def extended_items() -> Extended | None:
    """The items of the current forward pass that are read by YaRN, a bool or bool (B,1); None if no pass runs."""
    current = running_pass()
    return None if current is None else current.items


def is_packed() -> bool:
    """True if the current pass has packed sequences in one item of which some are read by YaRN and some not."""
    current = running_pass()
    if current is None or not isinstance(current.extended, Tensor):
        return False
    return current.extended.shape[1] > 1 and can_be_read(current.extended)


@contextmanager
def reach_of(length: int | None) -> Iterator[None]:
    """Read the prompts inside a block as the start of requests of `length` tokens, or of those around the block."""
    before = getattr(_RUNNING, "reach", None)
    _RUNNING.reach = before if length is None else max(length, before or 0)
    try:
        yield
    finally:
        _RUNNING.reach = before


def current_reach() -> int:
    """The tokens of the longest request that is under way in this thread; 0 if that is not known."""
    return getattr(_RUNNING, "reach", None) or 0


def expect_new_tokens() -> None:
    """Make `generate` read a prompt as the start of a request with all its new tokens."""
    generate, prepare = GenerationMixin.generate, GenerationMixin._prepare_cache_for_generation
    if hasattr(generate, _EXPECTING):
        return
    signature = inspect.signature(prepare)

    @functools.wraps(generate)
    def generate_as_one_request(self: Any, *args: Any, **kwargs: Any) -> Any:
        with reach_of(None):
            return generate(self, *args, **kwargs)

    @functools.wraps(prepare)
    def prepare_and_expect(self: Any, *args: Any, **kwargs: Any) -> Any:
        longest = signature.bind(self, *args, **kwargs).arguments["max_cache_length"] + 1
        _RUNNING.reach = max(longest, current_reach())  # an assistant serves the outer request
        return prepare(self, *args, **kwargs)

    setattr(generate_as_one_request, _EXPECTING, True)
    GenerationMixin.generate, GenerationMixin._prepare_cache_for_generation = (
        generate_as_one_request,
        prepare_and_expect,
    )
