"""Tokens of a model's input that are split over ranks: `with splitting.over(group): model(**batch)`.

Every rank of the group gives the model the same batch. The model takes its share of the tokens before it embeds them,
and results over all tokens (pooled states, the loss) are added up over the ranks. So each rank has the loss of the
whole batch, and the mean of the ranks' gradients is the gradient on one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from subquad.core.errors import InputError
from subquad.distributed import Ranks, Sequence, use
from subquad.distributed.collectives import add
from subquad.methods.core.current_shard import in_use

_ranks: ContextVar[Ranks | None] = ContextVar("subquad_ranks", default=None)


@contextmanager
def over(group: Any, mode: str = "auto") -> Iterator[None]:
    """Split the tokens of models that run inside the block over this process group; None: do not split."""
    token = _ranks.set(None if group is None else Ranks(group, mode=mode))
    try:
        yield
    finally:
        _ranks.reset(token)


class ModelSplit:
    """The share of a model's tokens that this rank has: all of them outside of `over`."""

    def __init__(self, sequence: Sequence | None):
        self.sequence = sequence

    def shard(self, x: Any, dim: int = 1) -> Any:
        """This rank's part of a tensor over all tokens; None stays None."""
        return x if self.sequence is None or x is None else self.sequence.shard(x, dim)

    def whole(self, x: Tensor, dim: int = 1) -> Tensor:
        """All tokens, from each rank's part."""
        return x if self.sequence is None else self.sequence.unshard(x, dim)

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the ranks."""
        return x if self.sequence is None else add(x, self.sequence.group)

    def mean(self, x: Tensor) -> Tensor:
        """The mean over the tokens of all ranks, axis 1."""
        return x.mean(1) if self.sequence is None else self.sum(x.sum(1)) / self.sequence.tokens

    def first(self, x: Tensor) -> Tensor:
        """The first token of all, which the first rank has; the others add nothing to it, with a gradient of 0."""
        return x[:, 0] if self.sequence is None else self.sum(x[:, : int(self.sequence.rank == 0)].sum(1))

    def attending(self) -> AbstractContextManager[None]:
        """A block in which attention is to the tokens of all ranks."""
        return use(in_use() if self.sequence is None else self.sequence)


def split(tokens: int, keys: int | None = None) -> ModelSplit:
    """The split of `tokens`, and of `keys` where cross-attention has others.

    Raises:
        InputError: fewer tokens than ranks.
    """
    ranks = _ranks.get()
    if ranks is None:
        return ModelSplit(None)
    fewest = tokens if keys is None else min(tokens, keys)
    if fewest < ranks.ranks:
        raise InputError(
            f"an input of {fewest} tokens does not go on {ranks.ranks} ranks: each has at least one; give longer "
            "inputs, or a smaller parallel.sequence"
        )
    return ModelSplit(ranks.even(tokens, keys))


def refuse_when_split(what: str) -> None:
    """ValueError for what is not supported with split tokens, inside `over`."""
    if _ranks.get() is not None:
        raise ValueError(f"{what} is not supported with tokens that are split over ranks; give parallel.sequence=1")
