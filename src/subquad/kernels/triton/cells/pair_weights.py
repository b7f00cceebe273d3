"""Weights of pairs of clusters and keys in the kernels."""

import triton
import triton.language as tl


@triton.jit
def listed_inside(inside, words, head, C, row, position, present):
    """A bool that is True where the cluster of a row lists the key at a place of the order."""
    pointers = inside + (head * C + row)[:, None] * words + (position >> 5)[None, :]
    word = tl.load(pointers, mask=(row < C)[:, None] & present[None, :], other=0)
    return ((word >> (position & 31)[None, :]) & 1) != 0


@triton.jit
def weight_gradients(weights, ks, vs, constant, allowed, hidden, of_inside):
    """(w where a key is seen, ∂L/∂u): w (dk̄·k + dv̄·v + c), and for keys inside w times their own number, or 0."""
    of_logits = weights * (ks + vs + constant)
    if of_inside is not None:
        of_logits = tl.where(hidden, weights * of_inside, of_logits)
    else:
        of_logits = tl.where(hidden, 0.0, of_logits)
    return tl.where(allowed & ~hidden, weights, 0.0), tl.where(allowed, of_logits, 0.0)
