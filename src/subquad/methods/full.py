"""Full attention: exact, by `torch.nn.functional.scaled_dot_product_attention` or by this library's kernel.

    out_i = Σ_j softmax_j(a_ij + bias_ij) v_j
    a_ij  = q_i·k_j / √D                                        positions="none": Vaswani et al. 2017, equation 1
    a_ij  = ((q_i + u)·k_j + (q_i + v)·W_R r_{i−j}) / √D         positions="relative": Dai et al. 2019, section 3.3

With SDPA it is the baseline of everything here, so that the gain of `kernel="subquad"` is visible. SDPA runs its
flash kernel where the mask is empty, causal or padding alone; windows, segments, dense masks and biases need a mask
over queries and keys, as in any exact attention: `methods.core.exact`.

Relative positions are those of "local", over all distances; their terms are handed to SDPA as a bias.
"""

import sys
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor, nn

from subquad.kernels.attention.relative_positions import NOT_EXACT, RelativePositions, every_ahead
from subquad.methods.core.call import Prepare
from subquad.methods.core.exact import exact, exact_by_sdpa, prepare_exact, prepare_sdpa, sdpa_instead
from subquad.methods.core.method import Call, Method, Partial, Traits, choice, upcast
from subquad.methods.core.onnx import OnnxSupport

EXACT, FAST_EXACT = "full", "full:kernel=subquad"


def with_distances(query: Tensor, key: Tensor, call: Call) -> tuple[Tensor, Call]:
    """The queries and the call of exact attention in which the terms of the distances are a bias."""
    assert call.learned is not None
    (B, H, N, _), M = query.shape, key.shape[2]
    ahead, pairs = every_ahead(call.mask, N, M, query.device)
    query, terms = call.learned(query, call.scale, ahead)
    bias = terms.gather(3, pairs[:, None].expand(B, H, N, M))
    return query, replace(call, bias=bias if call.bias is None else bias + call.bias)


@dataclass(frozen=True)
class Full(Method):
    """Exact attention, optionally with learned relative positions in its logits.

    Args:
        kernel: "sdpa", torch's, or "subquad": on CPUs with AVX2 or better, or NEON, this library's compiled kernel for
            fp32, bf16 and fp16, which is faster on the x86-64 processors that were measured. It knows causal masks and
            padding, and for up to 32 queries windows; SDPA runs what it does not take (other masks, a bias, dropout,
            fp64, few queries and keys, other devices).
        positions: "none", or "relative": learned terms of the distance in the logits, as in Transformer-XL. With them
            it runs only as a bound method, and is not exact attention.

    >>> import torch, subquad as sq
    >>> q = k = v = torch.eye(3).view(1, 1, 3, 3)
    >>> sq.attention(q, k, v, method="full", is_causal=True)[0, 0, 0]
    tensor([1., 0., 0.])
    """

    positions: str = choice("none", "relative")
    kernel: str = choice("sdpa", "subquad")

    name: ClassVar[str] = EXACT
    onnx: ClassVar[OnnxSupport] = "always"
    traits: ClassVar[Traits] = Traits(
        family="exact",
        causal="strict",
        window=True,
        dense_mask=True,
        bias=True,
        subquadratic=False,
        quadratic_baseline=True,
        exact_limit={},
        complexity="O(N·M·D) time, O(N) memory; O(N·M) memory with a window, segments, a dense mask or a bias",
        source="Vaswani et al. 2017; Dao et al. 2022",
        skips_padding=True,  # by SDPA, if padding is finite
        takes_segments=True,
    )

    @property
    def label(self) -> str:
        """The method with its settings: 'full' alone is the remedy in refusals."""
        return str(self)

    def describe(self) -> Traits:
        """The traits; with relative positions the method has learned parameters, and cross-attention no distances."""
        if self.positions == "none":
            return replace(type(self).traits, quadratic_baseline=self.kernel == "sdpa")
        return replace(
            type(self).traits,
            cross=False,
            cached=True,
            order_free=False,
            positional=True,
            learned=True,
            relative=True,
            skips_padding=False,  # the terms of the distances are products with the queries
            exact_limit=NOT_EXACT,
            complexity="O(N·M·D) time, O(N·M) memory",
        )

    def make_learned(self, heads: int, kv_heads: int, head_dim: int, max_length: int | None) -> nn.Module | None:
        """u, v and W_R, for relative positions."""
        return RelativePositions(heads, head_dim) if self.positions == "relative" else None

    @property
    def exact_queries(self) -> int:
        """Any number, except with relative positions."""
        return sys.maxsize if self.positions == "none" else 0

    @property
    def prepare_exact(self) -> Prepare:
        """The function that prepares exact attention, by the kernel of the settings."""
        return prepare_exact if self.kernel == "subquad" else prepare_sdpa

    def sdpa_instead(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> str | None:
        """The reason why SDPA computes a call, and not subquad's kernel."""
        return sdpa_instead(query, key, value, call) if self.kernel == "subquad" else None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        """Exact attention, with the terms of the distances where there are positions."""
        if self.positions == "none":
            return (exact if self.kernel == "subquad" else exact_by_sdpa)(query, key, value, call)
        query, key, value = upcast(query, key, value)
        query, call = with_distances(query, key, call)
        return exact(query, key, value, call)
