"""Causal linear attention before any normalisation: sums over the past of products with the query."""

from jaxtyping import Float
from torch import Tensor

from subquad.ops.backends import choose
from subquad.ops.causal_product import cpu, reference


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
    if choose(cpu=cpu.refusal(query)) == "cpu":
        return cpu.causal_product(query, key, value)
    return reference.causal_product(query, key, value)
