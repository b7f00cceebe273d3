"""Exact attention to one block of keys, with its log-sum-exp: torch's fused kernels, forward and backward apart.

SDPA returns no log-sum-exp. The kernels below it do, and their backward passes compute the weights of a block again
from the log-sum-exp over all blocks, so that they give this block's share of the gradients. Queries, keys and values
have one width here, and the same heads; see `widened`.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from subquad.kernels.precision import upcast

aten = torch.ops.aten
ALIGNED = 16  # entries of a row of a bias on a GPU
WIDEST = 256  # of the vectors of torch's flash kernel on a GPU


class Kernels(NamedTuple):
    """Options of a block: what is added to its logits, whether it is the causal block of its own queries, the scale."""

    bias: Float[Tensor, "#B 1 #N M"] | None
    causal: bool
    scale: float

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Out, and the log-sum-exp in fp32 or fp64."""
        if on_cpu(query):
            return aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, 0.0, self.causal, attn_mask=self._bias(query), scale=self.scale
            )
        if on_gpu(query):
            if self.bias is None and query.dtype != torch.float32 and query.shape[3] <= WIDEST:
                out, lse, *_ = aten._scaled_dot_product_flash_attention(
                    query, key, value, 0.0, self.causal, scale=self.scale
                )
                return out, lse
            bias = self._bias_of_gpu(query, key)
            out, lse, *_ = aten._scaled_dot_product_efficient_attention(
                query, key, value, bias, True, 0.0, self.causal, scale=self.scale
            )
            return out, lse[..., : query.shape[2]]
        logits = self._logits(query, key)
        return (logits.softmax(-1) @ upcast(value)[0]).to(query.dtype), logits.logsumexp(-1)

    def backward(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients to query, key and value from this block, given out and lse over all blocks."""
        if on_cpu(query):
            return aten._scaled_dot_product_flash_attention_for_cpu_backward(
                gradient, query, key, value, out, lse, 0.0, self.causal, attn_mask=self._bias(query), scale=self.scale
            )
        if on_gpu(query):
            bias, none = self._bias_of_gpu(query, key), torch.zeros((), dtype=torch.int64, device=query.device)
            lse = F.pad(lse, (0, -lse.shape[2] % 32), value=torch.inf)  # as the kernel has laid it out itself
            wanted = [True, True, True, False]
            gradients = aten._scaled_dot_product_efficient_attention_backward(
                gradient, query, key, value, bias, out, lse, none, none, 0.0, wanted, self.causal, scale=self.scale
            )
            return gradients[0], gradients[1], gradients[2]
        exact = upcast(gradient, query, key, value, out)
        gradient, query, key, value, out = exact
        weights = (self._logits(query, key) - lse.unsqueeze(-1)).exp()
        of_weights = gradient @ value.mT - (gradient * out).sum(-1, keepdim=True)
        of_logits = weights * of_weights * self.scale
        return of_logits @ key, of_logits.mT @ query, weights.mT @ gradient

    def _bias(self, like: Tensor) -> Tensor | None:
        return None if self.bias is None else self.bias.to(like.dtype)

    def _bias_of_gpu(self, query: Tensor, key: Tensor) -> Tensor | None:
        if self.bias is None:
            return None
        shape = (*query.shape[:3], key.shape[2])
        return F.pad(self.bias.to(query.dtype), (0, -shape[3] % ALIGNED))[..., : shape[3]].expand(shape)

    def _logits(self, query: Tensor, key: Tensor) -> Tensor:
        query, key = upcast(query, key)
        logits = query @ key.mT * self.scale
        logits = logits if self.bias is None else logits + self.bias
        later = torch.ones(logits.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
        return logits.masked_fill(later, -torch.inf) if self.causal else logits


def on_cpu(query: Tensor) -> bool:
    """True if torch's kernel for CPUs supports these queries."""
    return query.device.type == "cpu"


def on_gpu(query: Tensor) -> bool:
    """True if torch's kernel for GPUs supports these queries."""
    return query.is_cuda and query.dtype != torch.float64


def fused(query: Tensor) -> bool:
    """True if a kernel of torch's supports these queries; otherwise the logits of a piece are in memory."""
    return on_cpu(query) or on_gpu(query)


def with_positive_scale(query: Tensor, scale: float) -> tuple[Tensor, float]:
    """Queries and a scale above 0 with the same logits, for causal masks.

    torch's kernels hide keys before they scale: −∞ times a scale of 0 is NaN, and times a negative one +∞.
    """
    return (query, scale) if scale > 0 else (query * (0 if scale == 0 else -1), -scale or 1.0)


def widened(width: int, *tensors: Tensor) -> list[Tensor]:
    """The tensors with columns of 0 up to a width, which change no logit and no output."""
    return [F.pad(x, (0, width - x.shape[3])).contiguous() for x in tensors]
