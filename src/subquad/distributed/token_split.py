"""The distribution of a sequence's tokens over ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from subquad.distributed.collectives import gather
from subquad.distributed.failures import answered
from subquad.distributed.process_group import group_of
from subquad.distributed.shares import spans
from subquad.masks import Mask


class TokenSplit:
    """The distribution of tokens over ranks, and the exchanges of what belongs to tokens: see `sequence.Sequence`."""

    def __init__(
        self, lengths: Iterable[int], *, keys: Iterable[int] | None = None, group: Any = None, mode: str = "auto"
    ) -> None:
        group = group_of(group, mode)
        ranks = dist.get_world_size(group)
        self.lengths = _checked("lengths", lengths, ranks)
        self.keys = None if keys is None else _checked("keys", keys, ranks)
        self.group, self.mode = group, mode
        self._agreed: set[Any] = set()

    @property
    def rank(self) -> int:
        """The number of this process in the group."""
        return dist.get_rank(self.group)

    @property
    def ranks(self) -> int:
        """The number of processes in the group."""
        return len(self.lengths)

    @property
    def key_lengths(self) -> tuple[int, ...]:
        """The number of keys on each rank."""
        return self.lengths if self.keys is None else self.keys

    @property
    def tokens(self) -> int:
        """The number of tokens on all ranks."""
        return sum(self.lengths)

    @property
    def sizes(self) -> tuple[int, int]:
        """The numbers of queries and of keys on all ranks."""
        return self.tokens, sum(self.key_lengths)

    @property
    def local_tokens(self) -> slice:
        """The tokens of this rank in the whole sequence."""
        return spans(self.lengths)[self.rank]

    def positions(self, device: torch.device | str | None = None) -> Tensor:
        """The positions of this rank's tokens in the whole sequence, int64, for rotary or learned positions."""
        return torch.arange(self.local_tokens.start, self.local_tokens.stop, device=device)

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's part of a tensor that holds all tokens along an axis.

        Raises:
            ValueError: there is no such axis, or it has another length than the sequence.
        """
        _check_axis(x, dim)
        if x.shape[dim] != self.tokens:
            raise ValueError(f"axis {dim} has {x.shape[dim]} positions, but the sequence has {self.tokens} tokens")
        return x.narrow(dim, self.local_tokens.start, self.lengths[self.rank])

    def unshard(self, x: Tensor, dim: int = 1) -> Tensor:
        """The whole tensor of which each rank has its part. Differentiable; its size grows with the length."""
        _check_axis(x, dim)
        self.check_part(x.shape[dim], f"axis {dim}")
        shapes = [(*x.shape[:dim], n, *x.shape[dim:][1:]) for n in self.lengths]
        return torch.cat(gather(x, shapes, self.group), dim=dim)

    def check_part(self, have: int, what: str, keys: bool = False) -> None:
        """Raise ValueError if this rank's part has another length than in the sequence."""
        expected = (self.key_lengths if keys else self.lengths)[self.rank]
        if have != expected:
            raise ValueError(
                f"{what} has {have} positions on rank {self.rank}, but its share of the sequence is {expected}"
            )

    def agree(self, what: dict[str, Any]) -> None:
        """Raise ValueError on all ranks, once for each set of values, if these differ between ranks."""
        key = tuple(what.items())
        if key in self._agreed:
            return
        answers = self._gathered(what)
        for rank, other in enumerate(answers):
            for name, value in answers[0].items():
                if other.get(name) != value:
                    raise ValueError(
                        f"rank {rank} has {name} {other.get(name)} but rank 0 has {value}; all ranks must make the "
                        "same call"
                    )
        self._agreed.add(key)

    def _gathered(self, what: Any) -> list[Any]:
        """The answer of each rank."""
        if torch.compiler.is_compiling():  # not a decorator, which would import the compiler with subquad
            return torch.compiler.disable(self._gathered)(what)
        answers: list[Any] = [None] * self.ranks
        with answered(self.group):
            dist.all_gather_object(answers, what, group=self.group)
        return answers

    def local(self, mask: Mask) -> Mask:
        """The mask as this rank sees it: lengths of items, which count all tokens, become its own real tokens."""

        def local(padding: Tensor, lengths: tuple[int, ...]) -> Tensor:
            if padding.ndim == 2:
                return padding
            span = spans(lengths)[self.rank]
            return torch.arange(span.start, span.stop, device=padding.device) < padding[:, None]

        of_queries, of_keys = self.lengths, self.key_lengths
        return replace(
            mask,
            both=tuple(local(x, of_queries) for x in mask.both),
            queries=tuple(local(x, of_queries) for x in mask.queries),
            keys=tuple(local(x, of_keys) for x in mask.keys),
        )

    def whole(self, mask: Mask) -> Mask:
        """The mask of all tokens, whose padding and segments the ranks send each other."""
        return replace(
            mask,
            both=tuple(self._joined(x, self.lengths) for x in mask.both),
            queries=tuple(self._joined(x, self.lengths) for x in mask.queries),
            keys=tuple(self._joined(x, self.key_lengths) for x in mask.keys),
            ids=tuple(self._joined(x, self.lengths) for x in mask.ids),
        )

    def whole_tokens(self, named: Tensor) -> Tensor:
        """Tokens named by bools for this rank's, as bools for all; numbers of tokens stay as they are."""
        return self._joined(named, self.lengths) if named.dtype == torch.bool else named

    def _joined(self, x: Tensor, lengths: tuple[int, ...]) -> Tensor:
        kind = x.dtype
        parts = gather(x.to(torch.uint8) if kind == torch.bool else x, [(len(x), n) for n in lengths], self.group)
        return torch.cat(parts, dim=1).to(kind)


class Alone(TokenSplit):
    """Queries and keys that are all on this process, which needs no process group."""

    def __init__(self, queries: int, keys: int) -> None:
        self.lengths, self.keys = (queries,), (keys,)
        self.group, self.mode, self._agreed = None, "auto", set()

    @property
    def rank(self) -> int:
        """0: there is no other."""
        return 0


def _check_axis(x: Tensor, dim: int) -> None:
    """Raise ValueError if a tensor does not have an axis."""
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(
            f"dim={dim}, but a tensor of shape {tuple(x.shape)} has axes 0 to {x.ndim - 1}; give the axis of its tokens"
        )


def _checked(name: str, lengths: Iterable[int], ranks: int) -> tuple[int, ...]:
    """One length for each rank. ValueError where they are not."""
    known = tuple(lengths)
    if len(known) != ranks or any(not isinstance(n, int) or n < 1 for n in known):
        raise ValueError(
            f"{name}={known}, but the group has {ranks} ranks, and each has at least 1 token: give {ranks} numbers, or "
            "use a smaller group"
        )
    return known
