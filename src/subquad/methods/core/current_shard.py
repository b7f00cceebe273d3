"""The split sequence that calls of attention run on without naming it, inside a block of `sq.distributed.use`.

It is one for the whole process and not for a thread: a backward pass on GPUs runs in threads of its own, and gradient
checkpointing calls attention in there. A rank is a process, and its collectives have one order, so several sequences at
a time would make no sense.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from subquad.methods.core.call import Shard


@dataclass
class _State:
    shard: Shard | None = None
    blocks: int = 0  # number of blocks of `use` that are entered
    ended: bool = False  # whether a block with a sequence has ended
    running: bool = False  # whether a method runs on its rank's share


_state = _State()


@contextmanager
def using(shard: Shard | None) -> Iterator[None]:
    """Inside the block, calls that name no sequence run on this one; None: on none."""
    before = _state.shard
    _state.shard, _state.blocks = shard, _state.blocks + 1
    try:
        yield
    finally:
        _state.shard, _state.blocks = before, _state.blocks - 1
        _state.ended = _state.ended or shard is not None


def in_use(parallel: Any = None, *, self_attention: bool = False) -> Any:
    """The sequence of a call: the one that it names, otherwise that of `use`; None: the call is not split.

    Raises:
        RuntimeError: attention is computed again in a backward pass that runs after its block.
    """
    if parallel is not None or _state.running:
        return parallel
    if _state.blocks == 0:
        if _state.ended and dist.is_initialized() and torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                "a backward pass computes attention again (gradient checkpointing), but the sq.distributed.use block "
                "is over; call backward() inside it, or inside sq.distributed.use(None) where the model was not split"
            )
        return None
    return _state.shard.of_queries if _state.shard is not None and self_attention else _state.shard


def refuse_in_use(what: str, remedy: str) -> None:
    """Raise ValueError where a sequence is in use."""
    if _state.shard is not None and not _state.running:
        raise ValueError(f"{what} is not supported with sq.distributed.use: it would see one rank's tokens; {remedy}")


@contextmanager
def running_split() -> Iterator[None]:
    """While a method runs on its rank's share, its own calls of attention are what they are."""
    before, _state.running = _state.running, True
    try:
        yield
    finally:
        _state.running = before
