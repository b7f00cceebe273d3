"""Causal products that forget: a sum over the past in which every token shrinks what came before it.

    S_t = g_t S_{t−1} + k_t v_tᵀ,   out_t = q_tᵀ S_t = Σ_{i≤t} (Π_{i<s≤t} g_s) (q_t·k_i) v_i,   0 < g ≤ 1

By chunks: inside one as a masked product, and one matrix that runs from chunk to chunk. Every factor is a product of
gates, at most 1, so that nothing overflows at any length. O(N·R·E).
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

CHUNK = 64


def gated_product(
    query: Float[Tensor, "B H N R"],
    key: Float[Tensor, "B G N R"],
    value: Float[Tensor, "B G N E"],
    log_gate: Float[Tensor, "B G N"],
    before: Float[Tensor, "B G R E"] | None = None,
) -> tuple[Float[Tensor, "B H N E"], Float[Tensor, "B G R E"]]:
    """out, and S after the last token; `before` is S before the first, 0 without it. log_gate = ln g ≤ 0.

    >>> import torch
    >>> x, halves = torch.ones(1, 1, 3, 1), torch.full((1, 1, 3), 0.5).log()
    >>> gated_product(x, x, x, halves)[0].flatten()
    tensor([1.0000, 1.5000, 1.7500])
    """
    G, N, R, E = *key.shape[1:], value.shape[3]
    q = _chunks(query).unflatten(1, (G, -1))  # (B,G,H/G,T,C,R)
    k, v = (_chunks(x).unsqueeze(2) for x in (key, value))
    decay = (
        _chunks(log_gate.unsqueeze(-1)).squeeze(-1).cumsum(-1).unsqueeze(2)
    )  # ln of the gates from the chunk's start
    earlier = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=query.device).tril()
    between = torch.where(earlier, decay.unsqueeze(-1) - decay.unsqueeze(-2), -torch.inf).exp()
    inside = (q @ k.mT * between) @ v

    to_end = (decay[..., -1:] - decay).exp().unsqueeze(-1)
    added = ((k * to_end).mT @ v).unbind(3)
    shrunk = decay[..., -1].exp()[..., None, None].unbind(3)
    states = [query.new_zeros(len(key), G, 1, R, E) if before is None else before.unsqueeze(2)]
    for more, gate in zip(added, shrunk, strict=True):
        states.append(gate * states[-1] + more)
    out = inside + decay.exp().unsqueeze(-1) * (q @ torch.stack(states[:-1], 3))
    return out.flatten(3, 4).flatten(1, 2)[:, :, :N], states[-1].squeeze(2)


def _chunks(x: Float[Tensor, "B H N R"]) -> Float[Tensor, "B H T C R"]:
    """Cut into chunks; tokens behind the last are 0, with gates of 1."""
    return F.pad(x, (0, 0, 0, -x.shape[2] % CHUNK)).unflatten(2, (-1, CHUNK))
