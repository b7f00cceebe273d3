"""Attention by features one step after the other: a state of constant size represents all tokens so far."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from subquad.kernels.attention.features.op import feature_attention
from subquad.kernels.attention.features.state import FeatureState, merge, read, state_of
from subquad.kernels.attention.softmax import merge_partials


def no_tokens(batch: int, groups: int, features: int, width: int, like: Tensor) -> FeatureState:
    """The state before the first token, in fp32 or better."""
    totals = like.new_zeros(batch, groups, features, dtype=torch.promote_types(like.dtype, torch.float32))
    return FeatureState(totals.new_zeros(*totals.shape, width), totals, totals - torch.inf)


def advanced(
    state: dict[str, Tensor],
    of_query: Float[Tensor, "B H N R"],
    of_key: Float[Tensor, "B G N R"],
    value: Float[Tensor, "B G N E"],
    valid: Bool[Tensor, "B N"] | None,
) -> tuple[Float[Tensor, "B H N E"], dict[str, Tensor]]:
    """Causal attention of new tokens to those in the state and to each other, and the state with the real ones."""
    if valid is not None:
        pads = ~valid[:, None, :, None]
        of_key, value = of_key.masked_fill(pads, -torch.inf), value.masked_fill(pads, 0.0)
    before = FeatureState(**state)
    after = merge(before, state_of(of_key, value))
    if of_key.shape[2] == 1:  # one token sees all that is in the state now, itself too
        return _allowed(after, of_query)[0], after._asdict()
    within = feature_attention(of_query, of_key, value, causal=True)
    return merge_partials([_allowed(before, of_query), within])[0], after._asdict()


def _allowed(
    state: FeatureState, of_query: Float[Tensor, "B H N R"]
) -> tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]]:
    """The attention of queries to the state of their key head."""
    groups = state.totals.shape[1]
    out, lse = read(FeatureState(*(x.unsqueeze(2) for x in state)), of_query.unflatten(1, (groups, -1)))
    return out.flatten(1, 2), lse.flatten(1, 2)
