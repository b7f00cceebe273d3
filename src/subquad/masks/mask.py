"""`Mask`: which query may attend to which key, without an N×M tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from subquad.core.readable import can_be_read
from subquad.core.shapes import Sizes
from subquad.core.versions import sym_min
from subquad.masks.sdpa import read_mask


@dataclass(frozen=True, eq=False, repr=False)
class Mask:
    """A small immutable value: which queries may attend to which keys. True = may attend. Combine with ``&``.

    Build one with `Mask.causal`, `Mask.padding`, `Mask.segments`, `Mask.window` or `Mask.dense`, or from what another
    library takes with `Mask.from_sdpa` and `Mask.from_cu_seqlens`; the fields are for methods to read. A query that can
    see no key at all, and a padded query, has output 0.

    >>> mask = Mask.causal() & Mask.padding([3, 5])
    >>> mask
    Mask.causal() & Mask.padding(…)
    >>> mask.to_dense(5, 5)[0, 0].int()
    tensor([[1, 0, 0, 0, 0],
            [1, 1, 0, 0, 0],
            [1, 1, 1, 0, 0],
            [0, 0, 0, 0, 0],
            [0, 0, 0, 0, 0]], dtype=torch.int32)
    """

    is_causal: bool = False
    offset: int | Tensor | None = None  # position of the first query among the keys
    span: int | None = None
    both: tuple[Tensor, ...] = ()  # padding of self-attention, lengths (B,) or bool (B,N)
    keys: tuple[Tensor, ...] = ()  # bool (B,M) or lengths (B,)
    queries: tuple[Tensor, ...] = ()  # bool (B,N) or lengths (B,)
    ids: tuple[Tensor, ...] = ()  # segment numbers (B,N); negative = padding
    allowed: tuple[Tensor, ...] = ()  # bool (B|1,H|1,N,M)

    # ------------------------------------------------------------------ makers

    @staticmethod
    def causal(offset: int | Tensor | None = None) -> Mask:
        """A causal mask: query i sees the keys up to i + offset.

        `offset` is the position of the first query among the keys: 0 in self-attention, and t − 1 for a decode step
        with one query and t cached keys. It may be an integer tensor, () or (B,), for caches of a static size. Without
        it N and M must be equal.
        """
        whole = isinstance(offset, int) and not isinstance(offset, bool) and offset >= 0
        if not (offset is None or isinstance(offset, Tensor | torch.SymInt) or whole):
            raise ValueError(f"offset={offset!r}, but the position of the first query is a whole number ≥ 0")
        if isinstance(offset, Tensor):
            _check_offset(offset)
        return Mask(is_causal=True, offset=offset)

    @staticmethod
    def padding(
        both: Tensor | Sequence[int] | None = None,
        *,
        keys: Tensor | Sequence[int] | None = None,
        queries: Tensor | Sequence[int] | None = None,
    ) -> Mask:
        """A padding mask, from lengths (B,) of left-aligned items or a bool (B, positions), True = real.

        `Mask.padding(lengths)` is for self-attention and pads both sides; cross-attention names its sides:
        `Mask.padding(keys=…, queries=…)`, each optional.
        """
        if both is not None and (keys is not None or queries is not None):
            raise ValueError("give Mask.padding one padding for both sides, or keys=… and queries=…, not a mixture")
        if both is None and keys is None and queries is None:
            raise ValueError("Mask.padding needs lengths (B,) or a bool (B, positions)")
        return Mask(both=_paddings(both), keys=_paddings(keys), queries=_paddings(queries))

    @staticmethod
    def segments(ids: Tensor | Sequence[Sequence[int]]) -> Mask:
        """A mask for packed self-attention: tokens see their own segment. `ids` is an int (B,N); negative = padding.

        Most methods take segments apart into a batch, for which they wait for the ids' device once, to read how many
        there are.
        """
        ids = _as_tensor(ids)
        if ids.ndim != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
            raise ValueError(f"segment ids must be an int tensor (B, N), got {ids.dtype} {tuple(ids.shape)}")
        return Mask(ids=(ids,))

    @staticmethod
    def window(width: int) -> Mask:
        """A window: query i sees the keys j with |i − j| ≤ width; with `Mask.causal()`, the last width + 1 keys."""
        if not isinstance(width, int) or isinstance(width, bool) or width < 0:
            raise ValueError(f"a window reaches {width!r} keys to each side, but it must be a whole number ≥ 0")
        return Mask(span=width)

    @staticmethod
    def dense(allowed: Tensor) -> Mask:
        """A mask of any pattern, a bool (B|1, H|1, N, M). Only methods that are quadratic anyway accept it."""
        if allowed.ndim != 4 or allowed.dtype != torch.bool:
            raise ValueError(
                f"a dense mask is a bool (B|1, H|1, N, M) with True = may attend, got {allowed.dtype} "
                f"{tuple(allowed.shape)}"
            )
        return Mask(allowed=(allowed,))

    @staticmethod
    def from_sdpa(attn_mask: Tensor | None, is_causal: bool = False, *, batch: int | None = None) -> Mask:
        """The mask that SDPA's arguments `attn_mask` and `is_causal` mean; ValueError if there is none.

        A mask over keys alone, (B,1,1,M) or expanded from it, is padding of the keys. One over queries and keys is
        compared with padding of the keys or of both sides, causality (from the first query on, or up to the last) and
        windows, element by element, and must equal such a pattern. Queries that see no key are padding.

        Args:
            attn_mask: broadcasts to (B,H,N,M); bool with True = may attend, or floats that are added to the logits: 0,
                and −inf (or −10,000 and less, where the query sees another key, or no query sees its token). None hides
                nothing.
            is_causal: the same as `Mask.causal(offset=0)`; not together with `attn_mask`.
            batch: B, where `attn_mask` is the same for all items. By default its own first axis of four, or 1.

        Raises:
            TypeError: `attn_mask` is neither bool nor floating.
            ValueError: it is another pattern, differs between heads, holds a bias, or requires a gradient, as a bias
                does; `batch` is not its own; it has one column for all keys; or its numbers decide and cannot be read,
                as under `torch.compile`.

        >>> Mask.from_sdpa(torch.ones(5, 5).tril().bool())
        Mask.causal()
        >>> Mask.from_sdpa(torch.tensor([True, True, False]).view(1, 1, 1, 3))
        Mask.padding(keys=…)
        """
        if attn_mask is None:
            return Mask.causal(offset=0) if is_causal else Mask()
        if is_causal:
            raise ValueError("both attn_mask and is_causal=True are given, but SDPA accepts one of them")
        pattern = read_mask(attn_mask)
        N, M = attn_mask.shape[-2:]
        items_of_mask = attn_mask.shape[0] if attn_mask.ndim == 4 else 1
        if batch is not None and items_of_mask not in (1, batch):
            raise ValueError(f"the attn_mask is for a batch of {items_of_mask}, but the batch is {batch}")
        items = items_of_mask if batch is None else batch
        mask = Mask() if pattern.valid is None else Mask.padding(keys=pattern.valid.expand(items, M))
        if pattern.valid_queries is not None:
            mask = mask & Mask.padding(queries=pattern.valid_queries.expand(items, N))
        if pattern.last == math.inf:
            return mask
        if N == M and pattern.first == -pattern.last:
            return mask & Mask.window(int(pattern.last))
        mask = mask & Mask.causal(None if N == M else int(pattern.last))
        return mask if pattern.first == -math.inf else mask & Mask.window(int(pattern.last - pattern.first))

    @staticmethod
    def from_cu_seqlens(cu_seqlens: Tensor | Sequence[int], tokens: int | None = None) -> Mask:
        """A mask for one packed row, from the `cu_seqlens` of flash-attention's variable-length functions.

        Sequence s is the tokens cu_seqlens[s] to cu_seqlens[s + 1] − 1. Tensors of those functions, (tokens, heads,
        width), are `x.transpose(0, 1)[None]` here.

        Args:
            cu_seqlens: int (sequences + 1,), from 0 on, never falling.
            tokens: how many there are; by default the last number. Those behind it are padding.

        Raises:
            ValueError: it is not such a list, or ends behind the last token.

        >>> Mask.from_cu_seqlens([0, 2, 5], tokens=6).ids[0]
        tensor([[ 0,  0,  1,  1,  1, -1]])
        """
        ends = _as_tensor(cu_seqlens)
        if ends.ndim != 1 or len(ends) < 2 or ends.is_floating_point() or ends.dtype == torch.bool:
            raise ValueError(f"cu_seqlens must be int (sequences + 1,), got {ends.dtype} {tuple(ends.shape)}")
        if tokens is None:
            tokens = int(ends[-1])
        ends = ends.long()  # differences of unsigned numbers would never be negative
        if can_be_read(ends):
            if int(ends[0]) != 0 or bool((ends.diff() < 0).any()):
                raise ValueError(f"cu_seqlens must start with 0 and never fall, got {ends[:5].tolist()}, …")
            if int(ends[-1]) > tokens:
                raise ValueError(f"cu_seqlens ends at {int(ends[-1])}, but there are {tokens} tokens")
        position = torch.arange(tokens, device=ends.device)
        ids = torch.searchsorted(ends, position, right=True) - 1
        return Mask.segments(torch.where(position < ends[-1], ids, -1)[None])

    def __and__(self, other: Mask) -> Mask:
        """Both masks at once: what either forbids is forbidden. A window has the offset of a causal mask."""
        if not isinstance(other, Mask):
            return NotImplemented
        if self.is_causal and other.is_causal:
            _check_same_offset(self.offset, other.offset)
        return Mask(
            is_causal=self.is_causal or other.is_causal,
            offset=self.offset if other.offset is None else other.offset,
            span=_narrower(self.span, other.span),
            both=self.both + other.both,
            keys=self.keys + other.keys,
            queries=self.queries + other.queries,
            ids=self.ids + other.ids,
            allowed=self.allowed + other.allowed,
        )

    def __repr__(self) -> str:
        parts = []
        if self.is_causal:
            parts.append("Mask.causal()" if self.offset is None else f"Mask.causal(offset={self.offset})")
        parts += ["Mask.padding(…)"] * len(self.both)
        sides = ", ".join(f"{side}=…" for side in ("keys", "queries") if getattr(self, side))
        parts += [f"Mask.padding({sides})"] if sides else []
        parts += ["Mask.segments(…)"] * len(self.ids)
        parts += [] if self.span is None else [f"Mask.window({self.span})"]
        parts += ["Mask.dense(…)"] * len(self.allowed)
        return " & ".join(parts) or "Mask()"

    # ------------------------------------------------------------------ readers

    def key_padding(self, M: int) -> Tensor | None:
        """The padding mask of the keys, a bool (B,M), True for real keys; None if all are real."""
        return self._valid((*self.both, *self.keys), M)

    def query_padding(self, N: int) -> Tensor | None:
        """The padding mask of the queries, a bool (B,N), True for real queries; None if all are real."""
        return self._valid((*self.both, *self.queries), N)

    @property
    def only_padding(self) -> bool:
        """True if the mask is padding only, without a pattern between queries and keys."""
        return not self.is_causal and self.span is None and len(self.ids) + len(self.allowed) == 0

    @property
    def aligned(self) -> bool:
        """True if query i is known to be at key i, without reading a tensor."""
        return self.offset is None or (isinstance(self.offset, int) and self.offset == 0)

    @property
    def only_causal(self) -> bool:
        """True if this is the plain causal mask of self-attention, with aligned starts and no condition on the keys."""
        others = len(self.both) + len(self.keys) + len(self.ids) + len(self.allowed)
        return self.is_causal and self.aligned and self.span is None and others == 0

    @property
    def only_later_or_padded(self) -> bool:
        """True if the mask hides only padded keys and keys later than a query, with a known offset."""
        known = self.offset is None or isinstance(self.offset, int)
        return known and self.span is None and len(self.ids) + len(self.allowed) == 0

    def visible(self, N: int, M: int, device: torch.device) -> Tensor | None:
        """The keys that each query may see: a bool that broadcasts to (B,H,N,M), (B,1,1,M) for padding; None: all."""
        keys = self.key_padding(M)
        behind = isinstance(self.offset, int) and self.offset >= M - 1  # no key is later than the first query
        if (behind or not self.is_causal) and self.span is None and not (self.ids or self.allowed):
            return None if keys is None else keys[:, None, None, :]
        pattern = (replace(self, is_causal=False) if behind else self).pattern(N, M, device)
        return pattern if keys is None else pattern & keys[:, None, None, :]

    def to_dense(self, N: int, M: int, device: torch.device | None = None) -> Tensor:
        """The whole mask as a bool (B|1, H|1, N, M), padded queries included; by default where its tensors are."""
        dense = self.pattern(N, M, device)
        queries, keys = self.query_padding(N), self.key_padding(M)
        if queries is not None:
            dense = dense & queries[:, None, :, None]
        if keys is not None:
            dense = dense & keys[:, None, None, :]
        return dense

    def pattern(self, N: int, M: int, device: torch.device | None = None) -> Tensor:
        """The mask without padding, as a bool (B|1, H|1, N, M); by default where its tensors are."""
        if device is None:
            tensors = (*self.both, *self.keys, *self.queries, *self.ids, *self.allowed)
            device = next((x.device for x in tensors), None)
        queries, keys = (torch.arange(n, device=device) for n in (N, M))
        dense = self.sees(queries[None, None, :, None], keys)
        for ids in self.ids:
            dense = dense & (ids[:, None, :, None] == ids[:, None, None, :])
        for allowed in self.allowed:
            dense = dense & allowed
        return dense

    def positions(self, queries: Tensor) -> Tensor:
        """The positions of these queries among the keys, from the mask's offset, by item along the first axis."""
        if isinstance(self.offset, Tensor):
            return queries + self.offset.to(queries.device).reshape(-1, *[1] * (queries.ndim - 1))
        return queries if self.offset is None else queries + self.offset

    def sees(self, queries: Tensor, keys: Tensor) -> Tensor:
        """A bool, True for the pairs of query and key numbers that causality and the window let see each other."""
        ahead = keys - self.positions(queries)
        allowed = torch.ones_like(ahead, dtype=torch.bool)
        if self.is_causal:
            allowed = allowed & (ahead <= 0)
        return allowed if self.span is None else allowed & (ahead.abs() <= self.span)

    def check(self, sizes: Sizes, device: torch.device) -> None:
        """Raise ValueError if this mask does not fit attention of these sizes; the message names both."""
        B, H, N, M = sizes.B, sizes.H, sizes.N, sizes.M
        for what, present in (("one padding for both sides", self.both), ("segments", self.ids)):
            if present and N != M:
                raise ValueError(
                    f"the mask gives {what}, but there are {N} queries and {M} keys; "
                    "use Mask.padding(keys=…, queries=…) for cross-attention"
                )
        if (self.is_causal or self.span is not None) and self.offset is None and N != M:
            raise ValueError(
                f"a causal or window mask over {N} queries and {M} keys must give the position of the first query: "
                f"Mask.causal(offset={max(M - N, 0)}) continues a cached sequence, offset=0 aligns the starts"
            )
        if isinstance(self.offset, Tensor) and self.offset.shape not in ((), (1,), (B,)):
            raise ValueError(
                f"the mask's offset is {tuple(self.offset.shape)}, but it must be () or ({B},) for the batch"
            )
        for side, positions in (("both", N), ("queries", N), ("keys", M), ("ids", N)):
            for tensor in getattr(self, side):
                _check_padding(tensor, side, B, positions, device)
        for allowed in self.allowed:
            for axis, (size, have) in enumerate(zip((B, H, N, M), allowed.shape, strict=True)):
                if have != size and not (have == 1 and axis < 2):
                    raise ValueError(f"the dense mask is {tuple(allowed.shape)} but attention is {(B, H, N, M)}")
            _check_device("the dense mask", allowed, device)

    def _valid(self, paddings: tuple[Tensor, ...], positions: int) -> Tensor | None:
        valid = [_as_bool(padding, positions) for padding in paddings] + [ids >= 0 for ids in self.ids]
        if not valid:
            return None
        together = valid[0]
        for more in valid[1:]:
            together = together & more
        return together


def _as_tensor(x: Any) -> Tensor:
    """The tensor itself, which `torch.as_tensor` would move to the default device; of a list, a new one there."""
    return x if isinstance(x, Tensor) else torch.as_tensor(x)


def _paddings(padding: Tensor | Sequence[int] | None) -> tuple[Tensor, ...]:
    if padding is None:
        return ()
    tensor = _as_tensor(padding)
    if tensor.is_floating_point() or tensor.ndim not in (1, 2) or (tensor.ndim == 2) != (tensor.dtype == torch.bool):
        hint = "; for an attention mask of 1 and 0 give its .bool()" if tensor.ndim == 2 else ""
        raise ValueError(
            f"padding is int lengths (B,) or a bool (B, positions) with True = real, got {tensor.dtype} "
            f"{tuple(tensor.shape)}{hint}"
        )
    return (tensor,)


def _as_bool(padding: Tensor, positions: int) -> Tensor:
    if padding.ndim == 2:
        return padding
    return torch.arange(positions, device=padding.device) < padding[:, None]


def _check_padding(tensor: Tensor, side: str, batch: int, positions: int, device: torch.device) -> None:
    what = {"both": "padding", "ids": "segment ids"}.get(side, f"padding of the {side}")
    if tensor.shape[0] != batch:
        raise ValueError(f"the mask's {what} is for a batch of {tensor.shape[0]}, but the batch is {batch}")
    if tensor.ndim == 2 and tensor.shape[1] != positions:
        has = "have" if side == "ids" else "has"
        raise ValueError(f"the mask's {what} {has} {tensor.shape[1]} positions, but there are {positions}")
    _check_device(f"the mask's {what}", tensor, device)
    # Lengths on a CPU can be read without a stall; on a GPU a length past the end acts as the full length.
    if tensor.ndim == 1 and tensor.device.type == "cpu" and can_be_read(tensor):
        longest, shortest = int(tensor.max()), int(tensor.min())
        if longest > positions or shortest < 0:
            wrong = longest if longest > positions else shortest
            raise ValueError(f"the mask's {what} has a length of {wrong}, but there are {positions} positions")


def _check_device(what: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"{what} is on {tensor.device} but `query` is on {device}; move them together")


def _narrower(a: int | None, b: int | None) -> int | None:
    """The smaller of two windows, of which either may be missing; torch's own minimum, which compilers can trace."""
    if a is None or b is None:
        return a if b is None else b
    return sym_min(a, b)


def _check_offset(offset: Tensor) -> None:
    if offset.dtype == torch.bool or offset.is_floating_point() or offset.is_complex():
        raise ValueError(
            f"the offset is a tensor of {offset.dtype}, but the position of the first query is a whole number ≥ 0; "
            "give a tensor of integers"
        )


def _check_same_offset(a: int | Tensor | None, b: int | Tensor | None) -> None:
    """Two causal masks must place the first query alike; without an offset they place it at 0."""
    a, b = (0 if offset is None else offset for offset in (a, b))
    if a is not b and (isinstance(a, Tensor) or isinstance(b, Tensor) or a != b):
        raise ValueError(f"two masks place the first query differently: offset {a} and offset {b}")
