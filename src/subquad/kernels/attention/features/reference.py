"""Attention by features in plain PyTorch.

The causal form has one state for all the keys before a chunk. Inside a chunk, the triangle of earlier keys is cut into
squares, for s = 1, 2, 4, …: the later s tokens of 2s see all of the earlier s. Every square is attention to keys that
are all visible, so each has the exact maxima of its own keys and no later key can push an earlier query's weights under
the smallest number.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from subquad.kernels.attention.features.state import FeatureState, merge, read, state_of
from subquad.kernels.attention.softmax import merge_partials

CHUNK = 64  # tokens

Partial = tuple[Tensor, Tensor]


def feature_attention(
    of_query: Float[Tensor, "B H N R"],
    of_key: Float[Tensor, "B G M R"],
    value: Float[Tensor, "B G M E"],
    causal: bool,
    lagged: tuple[int, int] | None,
) -> tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]]:
    """The op on exponents."""
    groups = of_key.shape[1]
    query, key, value = of_query.unflatten(1, (groups, -1)), of_key.unsqueeze(2), value.unsqueeze(2)
    if lagged is not None:
        out, lse = _before(query, key, value, *lagged)
    elif causal:
        earlier = _before(query, key, value, CHUNK, 1)
        out, lse = merge_partials([earlier, *_within(query, key, value)])
    else:
        out, lse = read(state_of(key, value), query)
    return out.flatten(1, 2), lse.flatten(1, 2)


def _before(query: Tensor, key: Tensor, value: Tensor, block: int, lag: int) -> Partial:
    """Each block of queries reads the state of the blocks that are at least `lag` before it."""
    N = query.shape[3]
    query, key, value = _blocks(query, block, 0.0), _blocks(key, block, -torch.inf), _blocks(value, block, 0.0)
    of_block = [FeatureState(*parts) for parts in zip(*(x.unbind(3) for x in state_of(key, value)), strict=True)]
    nothing = FeatureState(*(torch.full_like(x, fill) for x, fill in zip(of_block[0], (0, 0, -torch.inf), strict=True)))
    states = [nothing]
    for state in of_block[: max(0, len(of_block) - lag)]:
        states.append(merge(states[-1], state))
    allowed = [states[max(0, number - lag + 1)] for number in range(len(of_block))]
    out, lse = read(FeatureState(*(torch.stack(parts, 3) for parts in zip(*allowed, strict=True))), query)
    return out.flatten(3, 4)[..., :N, :], lse.flatten(3, 4)[..., :N]


def _within(query: Tensor, key: Tensor, value: Tensor) -> list[Partial]:
    """The parts of causal attention to the query's own chunk: the token itself, then squares of 1, 2, 4, … tokens."""
    N = query.shape[3]
    parts = [_itself(query, key, value)]
    size = 1
    while size < min(CHUNK, N):
        pairs = [_blocks(x, 2 * size, fill) for x, fill in ((query, 0.0), (key, -torch.inf), (value, 0.0))]
        (_, later), (earlier, _), (values, _) = (x.split(size, dim=4) for x in pairs)
        out, lse = read(state_of(earlier, values), later)
        out = torch.cat([torch.zeros_like(out), out], dim=4).flatten(3, 4)
        lse = torch.cat([torch.full_like(lse, -torch.inf), lse], dim=4).flatten(3, 4)
        parts.append((out[..., :N, :], lse[..., :N]))
        size *= 2
    return parts


def _itself(query: Tensor, key: Tensor, value: Tensor) -> Partial:
    """Each query's own key alone, as a state of one key."""
    out, lse = read(state_of(key.unsqueeze(4), value.unsqueeze(4)), query.unsqueeze(4))
    return out.squeeze(4), lse.squeeze(4)


def _blocks(x: Float[Tensor, "B G J N _"], size: int, fill: float) -> Float[Tensor, "B G J T {size} _"]:
    """Cut into blocks, the last one filled up."""
    return F.pad(x, (0, 0, 0, -x.shape[3] % size), value=fill).unflatten(3, (-1, size))
