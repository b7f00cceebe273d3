"""The inputs of the backward pass for each query, and the gradients of logits."""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.triton.launch import rows, strides


@dataclass(frozen=True)
class MemberGradients:
    """The inputs of the backward pass for each query: p = e^{logit − shift}, ρ, h, and the gradient of its output.

    Attributes:
        shift: (B,H,N) fp32, the log-sum-exp of its logits.
        rho: (B,H,N) fp32.
        grad_out: (B,H,N,E).
        grad_lse: (B,H,N) fp32, or None. In a tail it is part of ρ.
    """

    shift: Tensor
    rho: Tensor
    grad_out: Tensor
    grad_lse: Tensor | None = None

    def arguments(self) -> dict[str, object]:
        """The arguments of the kernels, which read all but `grad` as contiguous; those of autograd may not be."""
        grad = rows(self.grad_out)
        return {
            "shift": self.shift.contiguous(),
            "rho": self.rho.contiguous(),
            "grad_lse": None if self.grad_lse is None else self.grad_lse.contiguous(),
            "grad": grad,
            **strides("grad", grad),
        }


@triton.jit
def logit_gradients(logits, gv, shift, rho, h, share, allowed):
    """(p, ∂L/∂logit = p (m (g·v − ρ) + h)); 0 where a query does not see a key."""
    p = tl.exp(tl.where(allowed, logits - shift[:, None], float("-inf")))
    return p, tl.where(allowed, p * (share * (gv - rho[:, None]) + h[:, None]), 0.0)


@triton.jit
def load_member(shift, rho, grad_lse, position, member):
    """Load the inputs of the backward pass for each query: (shift, ρ, h)."""
    of_shift = tl.load(shift + position, mask=member, other=0.0)
    of_lse = tl.zeros_like(of_shift)
    if grad_lse is not None:
        of_lse = tl.load(grad_lse + position, mask=member, other=0.0)
    return of_shift, tl.load(rho + position, mask=member, other=0.0), of_lse
