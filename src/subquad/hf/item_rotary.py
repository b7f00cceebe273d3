"""Rotary positions that read items longer than the model's own positions by YaRN, each item by its own length.

    R      the model's own positions
    L      tokens of an item in all: those at hand, and those that are still to come
    θ      the model's frequencies
    θ'     those of YaRN (Peng et al. 2024, arXiv 2309.00071) for the length to which the model was extended

    L ≤ R          cos pθ, sin pθ: bit for bit what they were before
    L > R          f·cos pθ', f·sin pθ', with YaRN's attention factor f

A cache holds keys that were turned already, so the choice is made where a cache is filled, is kept on it, and serves
all later tokens. Which tokens are to come is known in `generate`, and inside `reaching`.

The module that makes cos and sin is given positions alone. The start and the end of an item are read from the inputs
of the surrounding model, in its `forward`: SentenceTransformer calls that itself, where torch's hooks do not run.
"""

from __future__ import annotations

import copy
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Cache, EncoderDecoderCache, GenerationMixin, PreTrainedModel

from subquad.core.readable import can_be_read
from subquad.core.versions import cache_in
from subquad.distributed import Ranks
from subquad.hf.item_positions import last_of_runs, span, split_sequence, valid_tokens
from subquad.hf.passes import NOW
from subquad.hf.unwrapping import AnyModel, transformers_model
from subquad.kernels.tokens.rotary import Rotary

YARN = "yarn"

_WATCHED = "_subquad_watched"  # on a model around extended positions
_WATCHING = "_subquad_watching"  # on the `forward` of a class: it keeps the inputs of watched models
_EXTENDED = "_subquad_extended"  # on a cache: whether its items have YaRN's frequencies, a bool or bool (B,1)
_UNDECIDED = "_subquad_undecided"  # on a cache: which items (B,1) have no real token so far; None: none
_EXPECTING = "_subquad_expecting"  # on `generate` after it was wrapped
_FOLLOWING = "_subquad_following"  # on methods of caches after they were wrapped

Extended = bool | Tensor  # whether items are read by YaRN: all or none, or bool (B,1), or (B,N) for packed sequences


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


class ItemRotary(nn.Module):
    """The module of a model that makes cos and sin, for the items of two lengths at the head of this file.

    Attributes:
        longer: the same module with YaRN's frequencies.
        rows: R, the model's own positions.
        reach: the number of positions that an item may have.
        layer_types: the types of layers whose frequencies were extended; empty in a model whose layers have the same.
    """

    longer: nn.Module
    rows: int
    reach: int
    layer_types: tuple[str, ...]

    def forward(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The module's cos and sin (B|1,N,D); (B,N,D) for batches with items of both kinds."""
        layer_type = args[0] if args else kwargs.get("layer_type")
        if self.layer_types and layer_type not in self.layer_types:
            return super().forward(x, position_ids, *args, **kwargs)
        extended = self._extended(x, position_ids)
        if extended is True:
            return self.longer(x, position_ids, *args, **kwargs)
        within = super().forward(x, position_ids, *args, **kwargs)
        if extended is False:
            return within
        beyond = self.longer(x, position_ids, *args, **kwargs)
        if isinstance(within, Tensor):
            return torch.where(extended[..., None], beyond, within)
        return tuple(torch.where(extended[..., None], b, w) for b, w in zip(beyond, within, strict=True))

    def _extended(self, x: Tensor, position: Tensor) -> Extended:
        """The tokens that are read by YaRN; computed once for all types of layers of a pass."""
        current = _running() or RotaryPass()
        if current.extended is None:
            if position.ndim != 2:
                raise ValueError(
                    f"positions of shape {tuple(position.shape)} are read from rotary positions that were extended, "
                    "but their items are known only in (batch, tokens)"
                )
            self._find(current, x, position)
        assert current.extended is not None
        return current.extended

    def _find(self, current: RotaryPass, x: Tensor, position: Tensor) -> None:
        """Find out which tokens and which items of a pass are read by YaRN."""
        traced = not can_be_read(position) or torch.jit.is_tracing()  # type: ignore[attr-defined]
        kept = None if current.cache is None else getattr(current.cache, _EXTENDED, None)
        if not traced and current.past:
            current.extended = current.items = self._on_cache(current, kept, x, position)
            return
        extended, items = self._of_prompt(current, x, position, traced)
        if traced and kept is not None:  # whether a static cache is empty cannot be read here
            filled = torch.as_tensor(current.past, device=position.device) > 0
            before, now, of_items = (torch.as_tensor(each, device=position.device) for each in (kept, extended, items))
            now, of_items = torch.where(filled, before, now), torch.where(filled, before, of_items)
            beyond = self._beyond(current, position, self.rows) & ~now & filled
            torch._assert_async(~beyond.any(), _CROSSED.format(self.rows))
            extended, items = now, of_items
        elif traced and isinstance(current.past, int) and current.past:
            raise ValueError(_UNKNOWN)
        current.extended, current.items = extended, items

    def _of_prompt(self, current: RotaryPass, x: Tensor, position: Tensor, traced: bool) -> tuple[Extended, Extended]:
        """The tokens and the items that have more tokens in all than the model has positions."""
        sequence, numbered = split_sequence(), current.numbered
        tokens = x.shape[1] if sequence is None else sequence.tokens
        past = current.past if isinstance(current.past, int) else 0
        to_come = max((getattr(_RUNNING, "reach", None) or 0) - past - tokens, 0)
        if not traced:
            most = max(tokens, int(position.max()) + 1) if numbered else past + tokens
            if most + to_come <= self.rows:
                return False, False
        if current.unread and not numbered:
            raise ValueError(
                f"the lengths of items that are longer than the model's own {self.rows:,} positions are read from an "
                "attention mask (batch, tokens), but one of another shape is given; give that, or position_ids"
            )
        position = position.expand(len(x), -1)
        valid = valid_tokens(current.mask, past, position, sequence)
        if current.mask is None and numbered:  # `generate` gives all padding one position
            alike = position.diff(dim=1) == 0
            valid = valid & ~(F.pad(alike, (1, 0)) | F.pad(alike, (0, 1)))
        if sequence is not None:
            numbered = NOW.value is not None and NOW.value.positions is None and numbered
            first, last = span(position, valid)
            group = Ranks(sequence.group)
            first, last = group.gathered(first).amin(0), group.gathered(last).amax(0)
        elif numbered:
            first, last = torch.zeros_like(position), last_of_runs(position, valid)
        else:
            first, last = span(position, valid)
        lengths = last + 1 if numbered else last - first + 1
        extended = (lengths + to_come > self.rows) & (last >= 0)
        whole = extended.shape[1] == 1  # of a split item, only some tokens are here
        items = extended if whole else (extended & valid).any(1, keepdim=True)
        if traced:
            return extended, items
        if int(lengths.max()) > self.reach:
            raise ValueError(_TOO_LONG.format(int(lengths.max()), self.reach))
        undecided = ~valid.any(1, keepdim=True)
        current.undecided = undecided if to_come > 0 and bool(undecided.any()) else None
        if not whole and bool(((extended != items) & valid).any()):
            return extended, items
        return _plain(items), _plain(items)

    def _on_cache(self, current: RotaryPass, kept: Any, x: Tensor, position: Tensor) -> Extended:
        """The items of a cache that are read by YaRN; ValueError if the next tokens are past what they can have."""
        batch = len(x)
        if kept is None:
            raise ValueError(_UNKNOWN)
        if isinstance(kept, Tensor) and len(kept) != batch:
            raise ValueError(
                f"this cache was filled with {len(kept)} items, some longer than the model's own {self.rows:,} "
                f"positions and some not, and is used with {batch}: fill a new one with these items"
            )
        undecided = getattr(current.cache, _UNDECIDED, None)
        if undecided is not None:  # a prompt in chunks
            _, begins = self._of_prompt(current, x, position, traced=False)
            begins, before = (torch.as_tensor(each, device=position.device) for each in (begins, kept))
            kept = _plain(torch.where(undecided, begins, before))
            undecided = None if current.undecided is None else undecided & current.undecided
            setattr(current.cache, _EXTENDED, kept)
            setattr(current.cache, _UNDECIDED, undecided if undecided is not None and bool(undecided.any()) else None)
        end = current.past + position.shape[1]
        if end > self.rows and kept is not True:
            beyond = self._beyond(current, position, self.rows)
            if bool((beyond & ~torch.as_tensor(kept, device=beyond.device)).any()):
                raise ValueError(_CROSSED.format(self.rows))
        if end > self.reach and bool(self._beyond(current, position, self.reach).any()):
            raise ValueError(_TOO_LONG.format(int(position.max()) + 1, self.reach))
        return bool(kept) if isinstance(kept, bool) else kept.to(position.device)

    def _beyond(self, current: RotaryPass, position: Tensor, rows: int) -> Tensor:
        """The tokens on a cache that are at least this many positions behind the start of their item."""
        if current.numbered or current.mask is None:
            return position >= rows
        before = current.mask.long().argmax(1, keepdim=True)  # padding at the left
        return position - before >= rows

    def __reduce_ex__(self, protocol: Any) -> Any:  # pickle cannot find a class that was made here
        return _empty, (plain_class(type(self)),), self.__dict__


def _plain(items: Tensor) -> Extended:
    """The items that are read by YaRN, as a bool if that is the same for all."""
    return bool(items.any()) if bool((items == items[:1]).all()) else items


_UNKNOWN = (
    "this cache was not filled by this model since its positions were extended, so it is not known by which of them "
    "its keys were turned: fill a new one"
)
_CROSSED = (
    "the tokens on this cache were read at the model's own {:,} positions, and the next ones are past them; the keys "
    "in a cache cannot be turned again: read the prompt inside `with sq.hf.reaching(model, length)`, which extends a "
    "request from its start, or let `generate` know by max_new_tokens"
)
_TOO_LONG = (
    "an item has {:,} positions, but the model was extended to {:,}; call sq.hf.extend_positions with a larger length"
)


@contextmanager
def reaching(model: AnyModel, length: int) -> Iterator[None]:
    """Read the prompts inside a block as the start of requests of `length` tokens, for a model with rotary positions.

        with sq.hf.reaching(model, 12_000):
            cache = model(**prompt, use_cache=True).past_key_values

    A model that `extend_positions` extended reads a request that fits its own positions by these, and a longer one by
    YaRN's. A cache cannot change from the one to the other, so a loop of your own that will generate past the model's
    positions, and one that reads a prompt in chunks, reads the first tokens inside this block. `generate` knows how
    many tokens will come, and needs no block.

    Args:
        model: an extended model, or a wrapper around one.
        length: tokens of the longest request, its padding included. The other requests of the batch count as many
            tokens less as their prompts have less.

    Raises:
        ValueError: the model's rotary positions were not extended, or not so far.
    """
    reach = min((each.reach for each in item_rotaries(transformers_model(model))), default=None)
    if reach is None:
        raise ValueError(
            f"the rotary positions of this {type(transformers_model(model)).__name__} are not extended; call "
            f"sq.hf.extend_positions(model, {length}) first"
        )
    if not 1 <= length <= reach:
        raise ValueError(
            f"length={length:,}, but the model was extended to {reach:,}; give 1 to {reach:,}, or call "
            "sq.hf.extend_positions with a larger length"
        )
    with _reach_of(length):
        yield


@contextmanager
def _reach_of(length: int | None) -> Iterator[None]:
    before = getattr(_RUNNING, "reach", None)
    _RUNNING.reach = before if length is None else max(length, before or 0)
    try:
        yield
    finally:
        _RUNNING.reach = before


def expect_new_tokens() -> None:
    """Make `generate` read a prompt as the start of a request with all its new tokens."""
    generate, prepare = GenerationMixin.generate, GenerationMixin._prepare_cache_for_generation
    if hasattr(generate, _EXPECTING):
        return
    signature = inspect.signature(prepare)

    @functools.wraps(generate)
    def generate_as_one_request(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _reach_of(None):
            return generate(self, *args, **kwargs)

    @functools.wraps(prepare)
    def prepare_and_expect(self: Any, *args: Any, **kwargs: Any) -> Any:
        longest = signature.bind(self, *args, **kwargs).arguments["max_cache_length"] + 1
        _RUNNING.reach = max(longest, getattr(_RUNNING, "reach", None) or 0)  # an assistant serves the outer request
        return prepare(self, *args, **kwargs)

    setattr(generate_as_one_request, _EXPECTING, True)
    GenerationMixin.generate, GenerationMixin._prepare_cache_for_generation = (
        generate_as_one_request,
        prepare_and_expect,
    )


def follow_items() -> None:
    """Make caches remember which of their items are read by YaRN when these are reordered, selected or repeated."""
    for cls in (Cache, EncoderDecoderCache):
        for name in ("reorder_cache", "batch_select_indices", "batch_repeat_interleave"):
            change = vars(cls).get(name)  # None: inherited, from a class that is wrapped too
            if change is not None and not hasattr(change, _FOLLOWING):
                setattr(cls, name, _followed(change))


def _followed(change: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(change)
    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = change(self, *args, **kwargs)
        (items,) = (*args, *kwargs.values())
        for mark in (_EXTENDED, _UNDECIDED):
            kept = getattr(self, mark, None)
            if isinstance(kept, Tensor):  # else it is the same for all items
                items = items.to(kept.device) if isinstance(items, Tensor) else items
                setattr(self, mark, kept.repeat_interleave(items, 0) if isinstance(items, int) else kept[items])
        return result

    setattr(changed, _FOLLOWING, True)
    return changed


# ---------------------------------------------------------------------- the modules


def item_rotaries(model: nn.Module) -> list[ItemRotary]:
    """The extended rotary positions of a model."""
    return [module for module in model.modules() if isinstance(module, ItemRotary)]


def original_modules(model: nn.Module) -> list[nn.Module]:
    """The modules of a model without those that hold YaRN's frequencies."""
    added = {id(part) for each in item_rotaries(model) for part in each.longer.modules()}
    return [module for module in model.modules() if id(module) not in added]


def extend_rotary(
    module: Any, holder: PreTrainedModel, parameters: Mapping[str, Any], rows: int, length: int, types: tuple[str, ...]
) -> None:
    """Let a module that makes cos and sin read items of `length` positions, in place.

    Args:
        module: the module.
        holder: the innermost model around it.
        parameters: `rope_parameters` of a config with YaRN's frequencies.
        rows: the model's own positions.
        length: the positions that an item may have.
        types: the types of layers that are extended; empty in a model whose layers have the same frequencies.
    """
    config = copy.deepcopy(module.config)
    config.rope_parameters, config.max_position_embeddings = dict(parameters), length
    if getattr(config, "original_max_position_embeddings", None) is not None:
        config.original_max_position_embeddings = rows
    if getattr(config, "head_dim", 0) is None:
        config.head_dim = config.hidden_size // config.num_attention_heads
    plain = plain_class(type(module))
    longer = plain(config)
    device = next((buffer.device for buffer in module.buffers()), None)
    longer = longer if device is None else longer.to(device)
    module.__class__ = _class_for(plain)
    module.longer, module.rows, module.reach, module.layer_types = longer.train(module.training), rows, length, types
    vars(holder)[_WATCHED] = _Watched(type(holder))


def plain_class(cls: type[nn.Module]) -> Any:
    """The class of a module before it was extended."""
    return cls.__bases__[1] if issubclass(cls, ItemRotary) else cls


@cache
def _class_for(plain: Any) -> Any:
    return type(f"Long{plain.__name__}", (ItemRotary, plain), {})


def _empty(plain: Any) -> ItemRotary:
    extended = _class_for(plain)
    made: ItemRotary = extended.__new__(extended)
    return made


# ---------------------------------------------------------------------- the passes


class _Watched:
    """A mark of a model whose inputs are kept; a copy that is unpickled elsewhere changes the class there too."""

    def __init__(self, cls: Any):
        self.cls = cls
        _watch(cls)

    def __reduce__(self) -> Any:
        return _Watched, (self.cls,)


def _watch(cls: Any) -> None:
    """Keep the inputs of the watched models of a class while their forward passes run."""
    forward = cls.forward
    if hasattr(forward, _WATCHING):
        return

    @functools.wraps(forward)
    def watching(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, _WATCHED, None) is None:
            return forward(self, *args, **kwargs)
        inputs = {**dict(zip(_names(forward), args, strict=False)), **kwargs} if args else kwargs
        current, before = _pass_of(inputs), _running()
        _RUNNING.current = current
        try:
            output = forward(self, *args, **kwargs)
        finally:
            _RUNNING.current = before
        if current.items is not None and (torch.compiler.is_compiling() or not current.past):
            _keep(current, output)
        return output

    setattr(watching, _WATCHING, True)
    cls.forward = watching


@cache
def _names(forward: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]


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
            setattr(cached, _EXTENDED, current.items)
            setattr(cached, _UNDECIDED, current.undecided)


def _running() -> RotaryPass | None:
    return getattr(_RUNNING, "current", None)


def extended_items() -> Extended | None:
    """The items of the current forward pass that are read by YaRN, a bool or bool (B,1); None if no pass runs."""
    current = _running()
    return None if current is None else current.items


def is_packed() -> bool:
    """True if the current pass has packed sequences in one item of which some are read by YaRN and some not."""
    current = _running()
    if current is None or not isinstance(current.extended, Tensor):
        return False
    return current.extended.shape[1] > 1 and can_be_read(current.extended)


@dataclass(frozen=True, eq=False)
class TwoRotaries:
    """The rotary positions of a layer whose model reads long items by YaRN: see `item_rotary`."""

    within: Rotary
    beyond: Rotary

    def to(self, device: torch.device) -> TwoRotaries:
        """Move the frequencies to a device."""
        return TwoRotaries(self.within.to(device), self.beyond.to(device))

    def now(self) -> Rotary:
        """Those of the items of the forward pass that runs now.

        Raises:
            ValueError: no pass of the model runs, or it has packed sequences of both kinds in an item.
        """
        items = extended_items()
        if items is None:
            raise ValueError(
                "a layer whose rotary positions were extended runs outside of a forward pass of its model (as under "
                "gradient checkpointing), so the lengths of its items are not known; use queries=rectangle or "
                "queries=block"
            )
        if is_packed():
            raise ValueError(
                "an item contains packed sequences of which some are longer than the model's own positions and some "
                "not; give them apart, or use queries=rectangle or queries=block"
            )
        return self.for_items(items)

    def for_items(self, items: Extended) -> Rotary:
        """Those of some items: see `extended_items`."""
        if isinstance(items, bool):
            return self.beyond if items else self.within
        both = torch.where(items, self.beyond.frequencies[None], self.within.frequencies[None])
        return replace(self.within, frequencies=both)


def with_longer(rotary: Rotary, model: nn.Module) -> Rotary | TwoRotaries:
    """These rotary positions, with YaRN's for long items if the positions of the model were extended."""
    for owner in item_rotaries(model):
        for name, buffer in owner.named_buffers(recurse=False):
            if not holds_frequencies(name, buffer):
                continue
            within, beyond = frequencies_in(buffer), frequencies_in(owner.longer.get_buffer(name))
            for direction in (1, -1):
                if same_frequencies(rotary.frequencies, direction * within):
                    return TwoRotaries(rotary, replace(rotary, frequencies=direction * beyond))
    return rotary


def holds_frequencies(name: str, buffer: Tensor) -> bool:
    """True if a buffer of a module holds rotary frequencies, by its name and shape."""
    return name.endswith("inv_freq") and buffer.ndim == 1 and buffer.is_floating_point()


def frequencies_in(buffer: Tensor) -> Tensor:
    """A copy of the frequencies in a buffer, in fp32 or better."""
    return buffer.detach().to(torch.promote_types(buffer.dtype, torch.float32), copy=True)


def same_frequencies(frequencies: Tensor, other: Tensor) -> bool:
    """True if two sets of frequencies are equal, and on one device."""
    return frequencies.device == other.device and torch.equal(frequencies, other)
