"""A table of learned positions that reads items longer than itself, each item by its own length.

    p      position of a token in its item, 0, 1, …
    R      rows of the table, which are the model's own positions
    L      positions of the item: that of its last token, plus one

    L ≤ R          row p, as the model reads it: bit for bit what it was before
    "interpolate"  between the rows around p·(R − 1)/(L − 1), weighted by their distance
    "tile"         row p mod R

The table is given positions alone. The start and the end of an item are read from the surrounding model's inputs: the
attention mask, `position_ids`, a cache, the tokens of other ranks. The `forward` of that model's class keeps them for
the table.
"""

import threading
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from subquad.core.versions import cache_in
from subquad.distributed import Ranks, Sequence
from subquad.hf.forward_wrappers import Forward, ForwardMark, positional_names
from subquad.hf.passes import NOW
from subquad.methods.core.current_shard import in_use

MODES = ("interpolate", "tile")

_REACH = "_subquad_reach"  # on the model around an extended table: a mark with the positions that an item may have
_NEVER = torch.iinfo(torch.int64).max  # the first position of an item without tokens


class PassInputs(NamedTuple):
    """The inputs of a model that show where items begin and end.

    Attributes:
        mask: bool (B,P+N), which tokens are real; None: no mask is given, or one that is not (batch, tokens).
        unread: a mask of another shape is given.
        past: P, the tokens in the cache.
        numbered: whether `position_ids` are given.
    """

    mask: Tensor | None
    unread: bool
    past: int
    numbered: bool


# `inputs`: of the forward pass that runs in this thread. Compiled code cannot read a `ContextVar`, and it would read a
# class attribute in place of that of the thread.
_RUNNING = threading.local()


class ItemPositions(nn.Embedding):
    """A table of positions that reads items longer than itself, as described at the head of this file.

    Attributes:
        reach: the number of positions that an item may have.
        mode: the way in which longer items are read.
        reserved: rows at the front that no position uses.
    """

    reach: int
    mode: str
    reserved: int

    @property
    def rows(self) -> int:
        """Positions that have a row of their own."""
        return self.num_embeddings - self.reserved

    def forward(self, input: Tensor) -> Tensor:
        """The embeddings (B|1,N,E) of the positions (B|1,N), counted from `reserved`; (B,N,E) for padded batches."""
        running, sequence = _running(), split_sequence()
        tokens = input.shape[-1] if sequence is None else sequence.tokens
        traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined]
        if not traced and tokens <= self.rows and running is not None and not (running.past or running.numbered):
            return super().forward(input)
        if input.ndim != 2:
            raise ValueError(
                f"positions of shape {tuple(input.shape)} are read from a table that was extended, but its items "
                f"are known only in (batch, tokens); give at most {self.rows:,} tokens"
            )
        position, last = self._in_items(input - self.reserved, running, sequence)
        if not traced and int(last.max()) >= self.reach:
            raise _longer_than(self.reach, int(last.max()) + 1)
        return self._read(input, position, last.clamp(min=self.rows - 1))

    def _in_items(
        self, position: Tensor, running: PassInputs | None, sequence: Sequence | None
    ) -> tuple[Tensor, Tensor]:
        """Each token's position in its item, and that of the item's last token."""
        valid = self._valid(position, running, sequence)
        numbered = running is None or running.numbered
        if sequence is not None:
            numbered = NOW.value is not None and NOW.value.positions is None and numbered
            first, last = span(position, valid)
            group = Ranks(sequence.group)
            first, last = group.gathered(first).amin(0), group.gathered(last).amax(0)
        elif running is not None and running.past:
            self._check_cached(position, valid, running)
            return position, position
        elif numbered:
            return position, last_of_runs(position, valid)
        else:
            first, last = span(position, valid)
        if numbered:
            return position, last.expand_as(position)
        # An item at the right end of a padded batch is read as it is alone, if the model could not read it there.
        moved = last >= self.rows
        first = first.where(moved, 0)
        return position - first, last - first

    def _valid(self, position: Tensor, running: PassInputs | None, sequence: Sequence | None) -> Tensor:
        """A mask of the real tokens, (B|1,N)."""
        if running is None or running.mask is None:
            if running is not None and running.unread and not (running.numbered or running.past):
                raise ValueError(
                    "the lengths of items that are longer than the model's own positions are read from an attention "
                    "mask (batch, tokens), but one of another shape is given; give that, or position_ids"
                )
            return position >= 0
        return valid_tokens(running.mask, running.past, position, sequence)

    def _check_cached(self, position: Tensor, valid: Tensor, running: PassInputs) -> None:
        """ValueError where the tokens in the cache were read at other positions than they would be now."""
        if not bool((valid & (position >= self.rows)).any()):
            return
        if self.mode == "interpolate":
            raise ValueError(
                f"a token on a cache is past the model's own {self.rows:,} positions, and interpolated positions of "
                "the tokens in the cache change with each new token; extend with mode='tile', or give use_cache=False"
            )
        if running.mask is None or running.numbered:
            return
        before = running.mask.long().argmax(1, keepdim=True)  # padding at the left
        if bool((position[:, -1:] > running.mask.shape[1] - 1 - before).any() & before.any()):
            raise ValueError(
                f"the positions of a batch with padding at the left would change past the model's own {self.rows:,}; "
                "give position_ids, as generate does"
            )

    def _read(self, input: Tensor, position: Tensor, last: Tensor) -> Tensor:
        """The embeddings of positions in items whose last position, R − 1 or more, is `last`."""
        position = position.clamp(min=0).minimum(last)  # of padding too
        if self.mode == "tile":
            return super().forward((position % self.rows + self.reserved).where(input >= self.reserved, input))
        scaled, steps = position * (self.rows - 1), last.clamp(min=1)
        low = scaled // steps
        high = (low + 1).clamp(max=self.rows - 1)
        below, above = (
            super(ItemPositions, self).forward((row + self.reserved).where(input >= self.reserved, input))
            for row in (low, high)
        )
        dtype = torch.promote_types(below.dtype, torch.float32)
        share = (scaled % steps).to(dtype) / steps
        return torch.lerp(below.to(dtype), above.to(dtype), share[..., None]).to(below.dtype)

    def __reduce_ex__(self, protocol: Any) -> Any:  # pickle cannot find a class that was made here
        return _empty, (_plain_class(type(self)),), self.__dict__


def extend_table(table: nn.Embedding, holder: PreTrainedModel, reserved: int, length: int, mode: str) -> None:
    """Let a table read items of `length` positions, in place; its weight stays as it is.

    `holder` is the innermost model around it, which is given the mask.
    """
    if not isinstance(table, ItemPositions):
        kind: Any = type(table)
        table.__class__ = _class_for(kind)
    table.reach, table.mode, table.reserved = length, mode, reserved  # type: ignore[assignment]
    _Reach(type(holder), length).put(holder, _REACH)


def _keeping_inputs(forward: Forward) -> Forward:
    """The forward pass of a class, which keeps the inputs of its extended models while it runs."""

    def keeping_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        reach = getattr(self, _REACH, None)
        if reach is None:
            return forward(self, *args, **kwargs)
        inputs = {**dict(zip(positional_names(forward), args, strict=False)), **kwargs} if args else kwargs
        before = _running()
        _RUNNING.inputs = _pass_inputs(inputs, reach.value)
        try:
            return forward(self, *args, **kwargs)
        finally:
            _RUNNING.inputs = before

    return keeping_inputs


class _Reach(ForwardMark):
    """A mark of a model around an extended table: the positions that an item may have."""

    on_forward, wrapper = "_subquad_keeps_inputs", staticmethod(_keeping_inputs)


def _pass_inputs(inputs: Mapping[str, Any], reach: int) -> PassInputs:
    mask, cached = inputs.get("attention_mask"), cache_in(inputs)
    valid = mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None
    numbered = inputs.get("position_ids") is not None
    if not numbered and cached is None and not torch.compiler.is_compiling() and split_sequence() is None:
        _check_length(inputs, valid, reach)
    past = 0 if cached is None else cached.get_seq_length()
    return PassInputs(valid, mask is not None and valid is None, past, numbered)


def _check_length(inputs: Mapping[str, Any], valid: Tensor | None, reach: int) -> None:
    """ValueError for an item of more positions than `reach`, before models fail on the buffers of their embeddings."""
    tokens = next((x for x in map(inputs.get, ("input_ids", "inputs_embeds")) if isinstance(x, Tensor)), None)
    if tokens is None or tokens.ndim < 2 or tokens.shape[1] <= reach:
        return
    longest = tokens.shape[1]
    if valid is not None:
        first, last = span(torch.arange(valid.shape[1], device=valid.device)[None], valid)
        longest = int((last - first).max()) + 1
    if longest > reach:
        raise _longer_than(reach, longest)


def _longer_than(reach: int, positions: int) -> ValueError:
    return ValueError(
        f"an item has {positions:,} positions, but the table was extended to {reach:,}; call sq.hf.extend_positions "
        "with a larger length"
    )


def _running() -> PassInputs | None:
    return getattr(_RUNNING, "inputs", None)


def split_sequence() -> Sequence | None:
    """The sequence whose tokens are split over ranks, where this process has a part of them."""
    return in_use() if NOW.value is None else NOW.value.sequence


def valid_tokens(mask: Tensor | None, past: int, position: Tensor, sequence: Sequence | None) -> Tensor:
    """A mask of the real tokens (B|1,N), by a mask (B,P+N) over those in the cache too; None: all."""
    if mask is None:
        return position >= 0
    mask = mask[:, past:]
    if sequence is not None and mask.shape[1] != position.shape[1]:
        mask = sequence.shard(mask)
    # Some models pad their tokens to a multiple of a block.
    return F.pad(mask, (0, position.shape[1] - mask.shape[1]), value=False) & (position >= 0)


def span(position: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the last position (B,1) of each item; −1 is the last of one without tokens."""
    first = position.where(valid, _NEVER).amin(1, keepdim=True)
    return first, position.where(valid, -1).amax(1, keepdim=True)


def last_of_runs(position: Tensor, valid: Tensor) -> Tensor:
    """The last position of each token's item (B,N), where several may be packed: they begin where positions fall."""
    falls = position[:, 1:] <= position[:, :-1]
    item = F.pad(falls.long().cumsum(1), (1, 0)).expand_as(valid)
    last = torch.full_like(item, -1).scatter_reduce(1, item, position.where(valid, -1), "amax")
    return last.gather(1, item)


@cache
def _class_for(plain: Any) -> type[ItemPositions]:
    """The class of an extended table: `super().forward` of the plain one, where it adds an offset, is ours."""
    return ItemPositions if plain is nn.Embedding else type(f"Long{plain.__name__}", (plain, ItemPositions), {})


def _plain_class(extended: type[ItemPositions]) -> type[nn.Embedding]:
    return nn.Embedding if extended is ItemPositions else extended.__bases__[0]


def _empty(plain: Any) -> ItemPositions:
    extended = _class_for(plain)
    return extended.__new__(extended)
