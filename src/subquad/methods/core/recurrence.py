"""Decoding from a state whose size is fixed: what a recurrent method defines, and the checks of a step."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from subquad.core.shapes import Sizes
from subquad.masks import Mask
from subquad.methods.core.call import Call


class Recurrence:
    """The interface of a method whose trait `recurrent` is true."""

    def init_state(self, sizes: Sizes, *, like: Tensor, learned: nn.Module | None = None) -> dict[str, Tensor]:
        """The state before the first token: no N, no M in `sizes`.

        Each tensor's first axis is the batch; floating ones are in fp32, or better where `like` is, on its device.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no init_state")

    def advance(
        self, query: Tensor, key: Tensor, value: Tensor, state: dict[str, Tensor], call: Call
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The outputs of N ≥ 1 new tokens that follow those in the state, and the state with them.

        Inputs are checked and in the state's dtype. `call.mask` is causal among the new tokens and may hold padding,
        such as that on the left of a first prompt: padded tokens change no state. The state given is left as it is,
        and the one returned has the same shapes.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no advance")


def check_step_mask(mask: Mask | None) -> None:
    """A step's mask is padding of its new tokens: they are causal among themselves, and follow those in the state."""
    if not (mask is None or isinstance(mask, Mask)):
        raise TypeError(
            f"`mask` is a {type(mask).__name__}, but it must be a sq.Mask: Mask.padding(…) of the new tokens"
        )
    if mask is not None and (not mask.only_padding or mask.offset is not None or mask.keys or mask.queries):
        raise ValueError(
            f"a step supports only a mask of its new tokens' padding, Mask.padding(bool (B,N)), but this is {mask}; "
            "the new tokens are causal among themselves, and follow those in the state, without being told"
        )


def check_state(
    state: Mapping[str, Tensor],
    shapes: Mapping[str, torch.Size],
    query: Tensor,
    heads: str,
    method: str,
    value_dim: int | None,
) -> None:
    """Check that a state belongs to this layer and to this query; `shapes` is {name: shape of one item}.

    `value_dim` is what `init_state` must be told, None where that is the heads' width.
    """
    if not isinstance(state, Mapping) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise TypeError(
            f"`state` is a {type(state).__name__}, but it must be a dict of tensors: init_state makes the first one, "
            "and each step returns the next"
        )
    have = {name: tuple(tensor.shape[1:]) for name, tensor in state.items()}
    want = {name: tuple(shape) for name, shape in shapes.items()}
    if have != want:
        made = "init_state" if value_dim is None else f"init_state(…, value_dim={value_dim})"
        raise ValueError(
            f"the state contains {have} for each item, but {method!r} with {heads} needs {want}; make it with {made} "
            "of the layer that steps"
        )
    exact = torch.promote_types(query.dtype, torch.float32)
    for name, tensor in state.items():
        if tensor.shape[0] != query.shape[0]:
            raise ValueError(f"the state is of {tensor.shape[0]} items, but the batch of this step is {query.shape[0]}")
        if tensor.device != query.device:
            raise ValueError(f"the state is on {tensor.device} but `query` is on {query.device}; move them together")
        if tensor.is_floating_point() and tensor.dtype != exact:
            raise ValueError(
                f"the state's {name!r} is {tensor.dtype}, but that of a {query.dtype} `query` is {exact}; make it with "
                "init_state(…, like=query)"
            )
