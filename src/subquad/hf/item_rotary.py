"""Rotary positions that read items longer than the model's own positions by YaRN, each item by its own length.

    R      the model's own positions
    L      tokens of an item in all: those at hand, and those that are still to come
    θ      the model's frequencies
    θ'     those of YaRN (Peng et al. 2024, arXiv 2309.00071) for the length to which the model was extended

    L ≤ R          cos pθ, sin pθ: bit for bit what they were before
    L > R          f·cos pθ', f·sin pθ', with YaRN's attention factor f

A cache holds keys that were turned already, so the choice is made where a cache is filled, is kept on it
(`cache_marks`), and serves all later tokens. Which tokens are to come is known in `generate`, and inside `reaching`.

The module that makes cos and sin is given positions alone. The start and the end of an item are read from the inputs
of the surrounding model, in its `forward` (`rotary_passes`): SentenceTransformer calls that itself, where torch's
hooks do not run.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from subquad.core.readable import can_be_read
from subquad.distributed import Ranks
from subquad.hf.cache_marks import Extended, extended_in, mark_cache, undecided_in
from subquad.hf.item_positions import last_of_runs, span, split_sequence, valid_tokens
from subquad.hf.passes import NOW
from subquad.hf.rotary_passes import RotaryPass, current_reach, extended_items, is_packed, reach_of, running_pass, watch
from subquad.hf.unwrapping import AnyModel, transformers_model
from subquad.kernels.tokens.rotary import Rotary

YARN = "yarn"


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
        current = running_pass() or RotaryPass()
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
        kept = extended_in(current.cache)
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
        to_come = max(current_reach() - past - tokens, 0)
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
        undecided = undecided_in(current.cache)
        if undecided is not None:  # a prompt in chunks
            _, begins = self._of_prompt(current, x, position, traced=False)
            begins, before = (torch.as_tensor(each, device=position.device) for each in (begins, kept))
            kept = _plain(torch.where(undecided, begins, before))
            undecided = None if current.undecided is None else undecided & current.undecided
            remaining = undecided if undecided is not None and bool(undecided.any()) else None
            mark_cache(current.cache, kept, remaining)
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
    with reach_of(length):
        yield


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
    watch(holder)


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
