"""The sequence of calls that name none: `use`.

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
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from subquad.parallel.sequence import Sequence


@dataclass
class _State:
    of: Sequence | None = None
    blocks: int = 0  # of `use` that are entered
    ended: bool = False  # whether a block with a sequence has ended
    running: bool = False  # whether a method runs on its rank's share


_state = _State()


@contextmanager
def use(of: Sequence | None) -> Iterator[None]:
    """Inside the block, every call of attention that names no sequence runs on this one.

        sq.nn.swap(model, "performer")
        with sq.parallel.use(of):
            loss = model(of.shard(x)).square().sum()
            loss.backward()

    For calls of `sq.attention` and of methods, `sq.nn` layers and layers that `sq.nn.swap` swapped. Everything else in
    the model must treat each token by itself; that cannot be checked. Attention that torch computes itself is refused.

    Args:
        of: the sequence; with `keys`, self-attention of layers runs on its `lengths`, cross-attention on both, and so
            does every call of `sq.attention`. None: none, for a part of the model that runs on whole tensors.

    An inner block counts before an outer one, and an argument `parallel` before both. Gradient checkpointing runs the
    forward pass again: call `backward` inside the block.

    Raises:
        TypeError: `of` is not a sequence.
        ValueError: inside the block, where torch's own attention runs, `sq.intercept`, a layer for sets, or a Hugging
            Face model, which takes `sq.hf.swap(model, method, parallel=…)`.
        RuntimeError: where a backward pass computes attention again after the block.
    """
    if of is not None and not isinstance(of, Sequence):
        raise TypeError(f"`use` got a {type(of).__name__}, but it takes a sq.parallel.Sequence or None")
    before = _state.of
    _state.of, _state.blocks = of, _state.blocks + 1
    try:
        with _NoOtherAttention():
            yield
    finally:
        _state.of, _state.blocks = before, _state.blocks - 1
        _state.ended = _state.ended or of is not None


def in_use(given: Any = None, *, self_attention: bool = False) -> Any:
    """The sequence of a call: the one that it names, otherwise that of `use`; None: the call is not split.

    Raises:
        RuntimeError: attention is computed again in a backward pass that runs after its block.
    """
    if given is not None or _state.running:
        return given
    if _state.blocks == 0:
        if _state.ended and dist.is_initialized() and torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                "a backward pass computes attention again (gradient checkpointing), but the sq.parallel.use block is "
                "over; call backward() inside it, or inside sq.parallel.use(None) where the model was not split"
            )
        return None
    return _state.of.of_queries if _state.of is not None and self_attention else _state.of


def refuse_in_use(what: str, remedy: str) -> None:
    """Raise ValueError where a sequence is in use."""
    if _state.of is not None and not _state.running:
        raise ValueError(f"{what} does not go with sq.parallel.use: it would see this rank's tokens alone; {remedy}")


@contextmanager
def running_split() -> Iterator[None]:
    """While a method runs on its rank's share, its own calls of attention are what they are."""
    before, _state.running = _state.running, True
    try:
        yield
    finally:
        _state.running = before


_OTHERS = (F.scaled_dot_product_attention, F.multi_head_attention_forward)


class _NoOtherAttention(TorchFunctionMode):
    """While entered, torch's own attention is refused. torch leaves out its fused encoder layers under a mode."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OTHERS:
            refuse_in_use(
                f"torch's own {func.__name__}",
                "swap a method in first, sq.nn.swap(module, 'full'), or run this part inside sq.parallel.use(None)",
            )
        return func(*args, **(kwargs or {}))
