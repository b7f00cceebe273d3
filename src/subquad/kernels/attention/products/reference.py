"""The sums by chunks: inside a chunk as a masked product, before it as one matrix of the past."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

CHUNK = 64


def causal_product(
    query: Float[Tensor, "B H N R"], key: Float[Tensor, "B G N R"], value: Float[Tensor, "B G N E"]
) -> Float[Tensor, "B H N E"]:
    """Each query's products with the keys so far, times their values, summed:

        out_t = Σ_{i≤t} (q_t·k_i) v_i

    Signed and not normalised. O(N·R·E) time. Inputs are fp32 or fp64; key head ⌊h·G/H⌋ serves query head h.

    The gradient is the same operation. With g = ∂L/∂out and x̃ for a sequence that runs backwards,

        dq = causal_product(g, v, k),   dk = (causal_product(ṽ, g̃, q̃))~,   dv = (causal_product(k̃, q̃, g̃))~

    summed over the query heads of a key head.

    >>> import torch
    >>> ones = torch.ones(1, 1, 4, 1)
    >>> causal_product(ones, ones, torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 4, 1)).flatten()
    tensor([ 1.,  3.,  6., 10.])
    """
    G, N = key.shape[1:3]
    q, k, v = (_chunks(x, min(CHUNK, N)) for x in (query, key, value))
    q, k, v = q.unflatten(1, (G, -1)), k[:, :, None], v[:, :, None]  # (B,G,H/G,chunks,CHUNK,·)
    inside = (q @ k.transpose(-1, -2)).tril() @ v
    states = (k.transpose(-1, -2) @ v).cumsum(3)  # Σ k_i v_iᵀ up to the end of each chunk
    before = F.pad(states, (0, 0, 0, 0, 1, 0))[:, :, :, :-1]
    return (inside + q @ before).flatten(3, 4).flatten(1, 2)[:, :, :N]


def _chunks(x: Float[Tensor, "B H N R"], size: int) -> Float[Tensor, "B H T {size} R"]:
    """Cut into chunks, with 0 behind the last token."""
    return F.pad(x, (0, 0, 0, -x.shape[2] % size)).unflatten(2, (-1, size))
