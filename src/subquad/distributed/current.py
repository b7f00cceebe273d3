"""`use`: the sequence of calls that name none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from subquad.distributed.sequence import Sequence
from subquad.methods.core.current_shard import refuse_in_use, using


@contextmanager
def use(sequence: Sequence | None) -> Iterator[None]:
    """Make this the sequence of every call of attention inside the block that does not name one.

        sq.nn.swap(model, "performer")
        with sq.distributed.use(sequence):
            loss = model(sequence.shard(x)).square().sum()
            loss.backward()

    For calls of `sq.attention` and of methods, `sq.nn` layers and layers that `sq.nn.swap` swapped. Everything else in
    the model must treat each token by itself; that cannot be checked. Attention that torch computes itself is refused.

    Args:
        sequence: with `keys`, self-attention of layers runs on its `lengths`, cross-attention on both, and so does
            every call of `sq.attention`. None: none, for a part of the model that runs on whole tensors.

    An inner block counts before an outer one, and an argument `parallel` before both. Gradient checkpointing runs the
    forward pass again: call `backward` inside the block.

    Raises:
        TypeError: `sequence` is not one.
        ValueError: inside the block, where torch's own attention runs, `sq.intercept`, a layer for sets, or a Hugging
            Face model, which takes `sq.hf.swap(model, method, parallel=…)`.
        RuntimeError: where a backward pass computes attention again after the block.
    """
    if sequence is not None and not isinstance(sequence, Sequence):
        raise TypeError(f"`use` got a {type(sequence).__name__}, but it needs a sq.distributed.Sequence or None")
    with using(sequence), _NoOtherAttention():
        yield


_OTHERS = (F.scaled_dot_product_attention, F.multi_head_attention_forward)


class _NoOtherAttention(TorchFunctionMode):
    """While entered, torch's own attention is refused. torch leaves out its fused encoder layers under a mode."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OTHERS:
            refuse_in_use(
                f"torch's own {func.__name__}",
                "swap a method in first, sq.nn.swap(module, 'full'), or run this part inside sq.distributed.use(None)",
            )
        return func(*args, **(kwargs or {}))
