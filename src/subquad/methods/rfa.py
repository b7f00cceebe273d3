"""Random feature attention (RFA): sines and cosines of unit queries and keys, with gates that forget when causal.

Peng et al. 2021, "Random Feature Attention", equations 4 to 7 and section 3.2:

    φ(x)  = [sin w_1·x̂, …, cos w_1·x̂, …] / √R,  x̂ = x/‖x‖,  w_r = σ ∘ w̃_r,  w̃_r ~ N(0, I)
    out_i = Σ_j φ(q_i)·φ(k_j) v_j / Σ_j φ(q_i)·φ(k_j),   E[φ(q)·φ(k)] = e^{−‖σ∘(q̂ − k̂)‖²/2}
    causal, with gates: S_t = g_t S_{t−1} + (1 − g_t) φ(k_t) v_tᵀ,  z_t likewise,  out_t = φ(q_t)·S_t / φ(q_t)·z_t

==========  =======================
paper       here
==========  =======================
σ           `spread`
g           `log_gates`
S, z        one state; values have a last column of ones
==========  =======================

Deviations from the paper: the gate g_t = sigmoid(a·k̂_t + b) reads the key where the paper's reads the layer's input, so
that the method can be swapped into a model. Nothing is added to the denominator, which is an estimate of a positive
number and may come near 0 where R is small; where it is 0, so is the output. A call's `scale` multiplies q̂·k̂ by
scale·√D.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from subquad.core.randomness import directions
from subquad.core.shapes import Sizes
from subquad.kernels.attention.feature_maps import trigonometric_features
from subquad.kernels.attention.features.visible import drop_rows
from subquad.kernels.attention.products.gated import gated_product
from subquad.kernels.tokens.heads import repeat_heads
from subquad.kernels.tokens.positions import ValidPositions, placed
from subquad.kernels.tokens.slots import taken
from subquad.methods.core.method import WIDEST, Call, Method, Partial, Traits, choice, upcast, whole

REMEMBERS = 4.0  # b at the start: gates of 0.982, some 55 tokens


class RfaParameters(nn.Module):
    """σ of each key head, and its gate's a and b. They start at 1, 0 and 4."""

    by_key_head: ClassVar[tuple[str, ...]] = ("spread", "weight", "bias")

    def __init__(self, kv_heads: int, width: int, gated: bool):
        super().__init__()
        self.spread = nn.Parameter(torch.ones(kv_heads, 1, width))
        self.weight = nn.Parameter(torch.zeros(kv_heads, width, 1)) if gated else None
        self.bias = nn.Parameter(torch.full((kv_heads, 1), REMEMBERS)) if gated else None

    def log_gates(self, unit_key: Float[Tensor, "B G N D"]) -> Float[Tensor, "B G N"] | None:
        """ln g; None without gates."""
        if self.weight is None or self.bias is None:
            return None
        scores = (unit_key @ self.weight.to(unit_key.dtype)).squeeze(-1) + self.bias.to(unit_key.dtype)
        return F.logsigmoid(scores)


@dataclass(frozen=True)
class RandomFeature(Method):
    """Random feature attention, whose spread and gates are learned. Only as a bound method.

    Args:
        features: R; each makes a sine and a cosine.
        gates: "learned", for causal attention that forgets, or "none". Without a causal mask there are none.
        seed: random seed of w̃.

    >>> import torch, subquad as sq
    >>> layer = sq.nn.MultiheadAttention(64, 4, method=sq.RandomFeature(features=64))
    >>> layer(torch.randn(2, 100, 64), is_causal=True).shape
    torch.Size([2, 100, 64])
    """

    features: int = whole(128, least=1, most=WIDEST)
    gates: str = choice("learned", "none")
    seed: int = whole(0)

    name: ClassVar[str] = "rfa"
    traits: ClassVar[Traits] = Traits(
        family="features",
        causal="strict",
        dropout="rows of values, from the sum over keys",
        lse=False,  # the sum of the weights is an estimate that may be negative
        stochastic=True,
        learned=True,
        recurrent=True,
        unit="both",
        exact_limit="queries and keys lose their lengths, and the kernel of what is left is estimated",
        example={"features": 96},
        complexity="O((N + M)·R·(D + E)) time, O((N + M)·(R + E)) memory with R features",
        source="Peng et al. 2021",
    )

    def make_learned(self, heads: int, kv_heads: int, head_dim: int, max_length: int | None) -> nn.Module:
        """The initial spreads and gates."""
        return RfaParameters(kv_heads, head_dim, self.gates == "learned")

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        """Map queries and keys to features, sum over the keys (or recurrently, with gates), and read the sums."""
        line = ValidPositions.from_mask(call.mask, query, key)
        of_query, of_key, value, log_gate = self.mapped(query, key, value, call)
        if not call.mask.is_causal:
            sums = of_key.mT @ value
            return normalised(of_query @ repeat_heads(sums, query.shape[1])), None
        if line.aligned:
            return normalised(gated_product(of_query, of_key, value, log_gate)[0]), None
        # Queries aligned with keys; after the last key there is room for those beyond it, and nothing is added there.
        at = line.line_positions
        of_key, value = (F.pad(x, (0, 0, 0, line.N)) for x in (of_key, value))
        beside = placed(of_query, at, line.M + line.N)
        out, _ = gated_product(beside, of_key, value, F.pad(log_gate, (0, line.N)))
        return normalised(taken(out, at)), None

    def mapped(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """φ(q), φ(k), [v, 1] and ln g, in fp32 or better; padded keys add nothing and forget nothing."""
        query, key, value = upcast(query, key, value)
        of_query, of_key, log_gate = self._mapped(query, key, call)
        value = _with_ones(drop_rows(value, call.dropout_p), value)
        return of_query, *_without(call.mask.key_padding(key.shape[2]), of_key, value, log_gate)

    def _mapped(self, query: Tensor, key: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """φ(q), φ(k) and ln g; under a causal mask with gates, φ(k) holds the factor 1 − g."""
        learned = call.learned
        assert isinstance(learned, RfaParameters)
        drawn = directions(call.seed, None, self.features, query.shape[3], True, query)
        spread = learned.spread.to(query.dtype) * (abs(call.scale) * query.shape[3] ** 0.5) ** 0.5
        query, key = F.normalize(query, dim=-1), F.normalize(key, dim=-1)
        of_query = trigonometric_features(query * repeat_heads(spread[None], query.shape[1]), drawn)
        of_key = trigonometric_features(key * (spread if call.scale >= 0 else -spread), drawn)
        log_gate = learned.log_gates(key) if call.mask.is_causal else None
        if log_gate is None:
            return of_query, of_key, key.new_zeros(key.shape[:3])
        return of_query, of_key * -torch.expm1(log_gate).unsqueeze(-1), log_gate

    def init_state(self, sizes: Sizes, *, like: Tensor, learned: nn.Module | None = None) -> dict[str, Tensor]:
        """S and z before the first token: 2R·(E + 1) numbers for each key head."""
        exact = torch.promote_types(like.dtype, torch.float32)
        return {"sums": like.new_zeros(sizes.B, sizes.G, 2 * self.features, sizes.E + 1, dtype=exact)}

    def advance(
        self, query: Tensor, key: Tensor, value: Tensor, state: dict[str, Tensor], call: Call
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Attend to the sums S and z of a state, and add the new tokens to them."""
        of_query, of_key, log_gate = self._mapped(query, key, call)
        valid = call.mask.key_padding(value.shape[2])
        of_key, value, log_gate = _without(valid, of_key, _with_ones(value, value), log_gate)
        out, sums = gated_product(of_query, of_key, value, log_gate, state["sums"])
        return normalised(out), {"sums": sums}


def _with_ones(value: Float[Tensor, "B G M E"], like: Tensor) -> Float[Tensor, "B G M F"]:
    return torch.cat([value, torch.ones_like(like[..., :1])], dim=-1)


def _without(valid: Tensor | None, of_key: Tensor, value: Tensor, log_gate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Padding adds nothing and forgets nothing."""
    if valid is None:
        return of_key, value, log_gate
    pads = ~valid[:, None, :]
    masked = (x.masked_fill(pads.unsqueeze(-1), 0.0) for x in (of_key, value))
    return *masked, log_gate.masked_fill(pads, 0.0)  # type: ignore[return-value]


def normalised(sums: Float[Tensor, "B H N F"]) -> Float[Tensor, "B H N E"]:
    """The sums over the keys by the last one, that of the ones."""
    total = sums[..., -1:]
    return torch.where(total == 0, 0.0, sums[..., :-1] / torch.where(total == 0, 1.0, total))
