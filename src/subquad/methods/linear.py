"""Linear attention: a fixed non-negative feature map in place of softmax's kernel.

Katharopoulos et al. 2020, "Transformers are RNNs", equations 5 to 7 and 9 to 12:

    out_i = Σ_j φ(q_i)·φ(k_j) v_j / Σ_j φ(q_i)·φ(k_j),   φ(x) = elu(x) + 1

==========  ===============
paper       here
==========  ===============
φ           `feature_map`
S, Z        `FeatureState`
==========  ===============

Feature maps by name: "elu" (elu(x) + 1), "exp", and "softmax" over the features of a token. All are positive: with
ReLUs alone a query may meet none of the keys.

Deviations from the paper and its code: nothing is added to the denominator. The maps are computed as their logarithms,
so that features of any size keep their ratios. q and k are multiplied by √(scale·√D), which is 1 unless a call gives
another scale.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from subquad.core.shapes import Sizes
from subquad.kernels.attention.features.recurrent import advanced, no_tokens
from subquad.kernels.attention.features.visible import attend_features, drop_rows
from subquad.methods.core.method import Call, Method, Partial, Traits, choice, upcast
from subquad.methods.core.onnx import OnnxSupport
from subquad.methods.core.residual import Residual


def log_elu(x: Tensor) -> Tensor:
    """ln(elu(x) + 1): x up to 0, ln(1 + x) above. The derivative at 0 is 1, whatever clamp has there."""
    return torch.where(x > 0, x.clamp(min=0).log1p(), x)


FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": log_elu,
    "exp": lambda x: x,
    "softmax": lambda x: x.log_softmax(-1),
}


@dataclass(frozen=True)
class LinearAttention(Method):
    """Linear attention with a fixed feature map, for models that are trained with it.

    Args:
        feature_map: "elu" (elu(x) + 1), "exp" or "softmax".

    >>> import torch, subquad as sq
    >>> q, k, v = torch.randn(3, 1, 2, 300, 16)
    >>> sq.attention(q, k, v, method="linear", is_causal=True).shape
    torch.Size([1, 2, 300, 16])
    """

    feature_map: str = choice(*FEATURE_MAPS)

    name: ClassVar[str] = "linear"
    onnx: ClassVar[OnnxSupport] = "without causal masks"
    traits: ClassVar[Traits] = Traits(
        family="features",
        causal="strict",
        dropout="rows of values, from the sum over keys",
        recurrent=True,
        exact_limit="another kernel than softmax's: it equals exact attention only where all weights are equal",
        complexity="O((N + M)·D·E) time, O((N + M)·(D + E) + D·E) memory",
        source="Katharopoulos et al. 2020",
    )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        """Map queries and keys to features, sum over the keys, and read the sums."""
        return self.attend_by(attend_features, query, key, value, call)

    def attend_by(
        self, by_features: Callable[..., tuple[Tensor, Tensor]], query: Tensor, key: Tensor, value: Tensor, call: Call
    ) -> Partial:
        """Attend by any function with the arguments of `attend_features`."""
        query, key, value = upcast(query, key, value)
        query, key = self._exponents(query, key, call.scale)
        return by_features(query, key, drop_rows(value, call.dropout_p), call.mask)

    def residual(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Residual:
        """Attention to all keys, with the features that give the weight of each."""
        query, key, value = upcast(query, key, value)
        of_query, of_key = self._exponents(query, key, call.scale)
        return Residual(self.attend(query, key, value, call), of_query, of_key, by_features=True)

    def _exponents(self, query: Tensor, key: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """ln φ of queries and keys."""
        factor = (abs(scale) * query.shape[3] ** 0.5) ** 0.5
        log_map = FEATURE_MAPS[self.feature_map]
        return log_map(query * factor), log_map(key * (factor if scale >= 0 else -factor))

    def init_state(self, sizes: Sizes, *, like: Tensor, learned: nn.Module | None = None) -> dict[str, Tensor]:
        """The state before the first token: D·(E + 2) numbers for each key head."""
        return no_tokens(sizes.B, sizes.G, sizes.D, sizes.E, like)._asdict()

    def advance(
        self, query: Tensor, key: Tensor, value: Tensor, state: dict[str, Tensor], call: Call
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Attend to the sums of a state, and add the new tokens to them."""
        of_query, of_key = self._exponents(query, key, call.scale)
        return advanced(state, of_query, of_key, value, call.mask.key_padding(value.shape[2]))
