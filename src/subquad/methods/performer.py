"""Performer: softmax's kernel by random features, in linear time.

Choromanski et al. 2021, "Rethinking Attention with Performers", equations 4 to 6:

    e^{q·k} = E[φ(q)·φ(k)],   out_i = Σ_j φ(q_i)·φ(k_j) v_j / Σ_j φ(q_i)·φ(k_j),   q and k times D^{-1/4}

The sums over j are made once, Σ_j φ(k_j) v_jᵀ, and under a causal mask they run along the sequence.
`kernels.attention.feature_maps` has φ of every kind: the paper's positive (FAVOR+), hyperbolic, trigonometric and
ReLU features, and FAVOR++.

==========  ==========================
paper       here
==========  ==========================
m, r        features (hyperbolic and trigonometric ones make two of each)
w           rows
φ           `kernels.attention.feature_maps`
==========  ==========================

Deviations from the paper and its code. Nothing is added to the features or to the denominator: exponents are taken less
their exact maxima, running ones under a causal mask, and the factors come back (`kernels.attention.features.state`).
The orthogonal rows are uniformly random: QR's signs are set right. Padding has no features. Trigonometric features,
which are signed, are computed in fp64, because their sums cancel, and have no recurrent form.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from subquad.core.randomness import directions
from subquad.core.shapes import Sizes
from subquad.kernels.attention.feature_maps import (
    EXPONENTIAL,
    KINDS,
    exponential_map,
    relu_exponents,
    trigonometric_features,
)
from subquad.kernels.attention.features.op import exponents
from subquad.kernels.attention.features.recurrent import advanced, no_tokens
from subquad.kernels.attention.features.signed import crossed, difference, parts
from subquad.kernels.attention.features.visible import attend_features, drop_rows
from subquad.kernels.tokens.heads import repeat_heads
from subquad.kernels.transforms import check_can_change
from subquad.methods.core.fitting import output_error
from subquad.methods.core.method import WIDEST, Call, Fit, Method, Partial, Traits, choice, number, upcast, whole
from subquad.methods.core.residual import Residual


class PerformerParameters(nn.Module):
    """The parameters of a Performer: shift and scale of its inputs, and a count of redraws.

        q' = e^a (q − d),  k' = e^b (k − c)          for each key head its own a, b, c, d
        e^{q'·k' + e^a d·k'} is e^{e^{a+b} q·k}, up to a factor that the keys of a query share

    Centring changes the variance of the estimate alone, as does a − b; a + b is a temperature. All start at 0. `passes`
    counts forward passes in training.
    """

    passes: Tensor
    by_key_head: ClassVar[tuple[str, ...]] = ("query_scale", "key_scale", "query_centre", "key_centre")
    counters: ClassVar[tuple[str, ...]] = ("passes",)

    def __init__(self, kv_heads: int, width: int, moves: bool):
        super().__init__()
        self.moves = moves
        if moves:
            self.query_scale, self.key_scale = (nn.Parameter(torch.zeros(kv_heads, 1, 1)) for _ in range(2))
            self.query_centre, self.key_centre = (nn.Parameter(torch.zeros(kv_heads, 1, width)) for _ in range(2))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def moved(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q', k' and e^a d."""
        dtype = query.dtype
        of_query, of_key = self.query_scale.exp().to(dtype), self.key_scale.exp().to(dtype)
        centre = of_query * self.query_centre.to(dtype)
        heads = query.shape[1]
        query = query * repeat_heads(of_query[None], heads) - repeat_heads(centre[None], heads)
        return query, (key - self.key_centre.to(dtype)) * of_key, centre

    def common(self, query: Tensor, scale: float, shift: Tensor | float) -> tuple[Tensor, Tensor]:
        """q', and shift + scale · q·c: what moving the keys by c took from all logits of q, scaled as they are."""
        moved, _, centre = self.moved(query, query[:, : self.key_centre.shape[0]])
        of_key = (self.key_scale.exp() * self.key_centre).to(query.dtype)
        heads = query.shape[1]
        left_out = (moved + repeat_heads(centre[None], heads)) * repeat_heads(of_key[None], heads)
        return moved, shift + left_out.sum(-1) * scale

    def count(self) -> None:
        """Count a forward pass in training."""
        # Activation checkpointing runs a forward pass again within the backward pass, and must find the same features.
        again = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
        if self.training and torch.is_grad_enabled() and not again:
            check_can_change(self.passes, "the state of 'performer' with redraw, its count of passes,")
            self.passes.add_(1)


@dataclass(frozen=True)
class Performer(Method):
    """Attention by random features that estimate the softmax kernel.

    Args:
        features: R, rows drawn; the paper takes D·ln D, 266 at D = 64.
        kind: "positive" (FAVOR+), "hyperbolic", "favor++", "trigonometric" or "relu".
        rows: "orthogonal" or "iid".
        norm: favor++: E‖q + k‖², of queries and keys times D^{-1/4}, at which its variance is smallest. 0: 2·√D, that
            of standard normal ones.
        inputs: "given", or "learned": each head's queries and keys are moved and scaled by what `subquad calibrate`
            fits.
        redraw: forward passes in training after which new rows are drawn. 0: never; otherwise each pass waits for the
            device, to read how many there were.
        seed: random seed of the rows.

    >>> import torch, subquad as sq
    >>> q, k, v = 0.3 * torch.randn(3, 1, 2, 300, 16)
    >>> out = sq.attention(q, k, v, method=sq.Performer(features=512), is_causal=True)
    >>> exact = sq.attention(q, k, v, method="full", is_causal=True)
    >>> bool((out - exact).abs().max() < 0.05)
    True
    """

    features: int = whole(256, least=1, most=WIDEST)
    kind: str = choice(*KINDS)
    rows: str = choice("orthogonal", "iid")
    norm: float = number(0.0, least=0.0)
    inputs: str = choice("given", "learned")
    redraw: int = whole(0)
    seed: int = whole(0)

    name: ClassVar[str] = "performer"
    traits: ClassVar[Traits] = Traits(
        family="features",
        causal="strict",
        dropout="rows of values, from the sum over keys",
        stochastic=True,
        recurrent=True,
        exact_limit="random features estimate softmax's kernel; the error falls with 1/√R and is never 0",
        example={"features": 16},
        complexity="O((N + M)·R·(D + E)) time, O((N + M)·(D + E) + R·E) memory with R features",
        source="Choromanski et al. 2021; Likhosherstov et al. 2022 (favor++)",
    )

    def describe(self) -> Traits:
        """The traits of signed features, whose sums may be negative: no stable state and no log-sum-exp."""
        signed, moves = self.kind == "trigonometric", self.inputs == "learned"
        fit = Fit(metric="error", learning_rate=1e-1, steps=200) if moves else None
        learned = moves or self.redraw > 0
        return replace(type(self).traits, recurrent=not signed, lse=not signed, learned=learned, fit=fit)

    def make_learned(self, heads: int, kv_heads: int, head_dim: int, max_length: int | None) -> nn.Module | None:
        """The initial parameters, which leave the inputs unchanged, and a count of 0."""
        return PerformerParameters(kv_heads, head_dim, self.inputs == "learned") if self.traits.learned else None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        """Map queries and keys to features, sum over the keys, and read the sums."""
        return self.attend_by(attend_features, query, key, value, call)

    def attend_by(
        self, by_features: Callable[..., tuple[Tensor, Tensor]], query: Tensor, key: Tensor, value: Tensor, call: Call
    ) -> Partial:
        """Attend by any function with the arguments of `attend_features`."""
        if isinstance(call.learned, PerformerParameters) and self.redraw > 0:
            call.learned.count()
        signed = self.kind == "trigonometric"
        query, key, value = (x.double() if signed else x for x in upcast(query, key, value))
        of_query, of_key, maps = self._mapped(query, key, call)
        value = drop_rows(value, call.dropout_p)
        out, lse = by_features(of_query, of_key, value, call.mask, **maps)
        if signed:
            return difference((out, lse), by_features(crossed(of_query), of_key, value, call.mask, **maps)), None
        return out, lse + self._common(query, call) if call.wants_lse else None

    def residual(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Residual:
        """Attention to all keys, with the features that give the weight of each."""
        partial = self.attend(query, key, value, call)
        query, key = upcast(query, key)
        mapped, of_key, maps = self._mapped(query, key, call)
        of_query, of_key = exponents(mapped, of_key, **maps)
        common = self._common(query, call)
        of_query = of_query + (common[..., None] if isinstance(common, Tensor) else common)
        return Residual(partial, of_query, of_key, by_features=True)

    def _common(self, query: Tensor, call: Call) -> Tensor | float:
        """The exponent that all features of a query, and all keys, share: only the log-sum-exp depends on it."""
        if self.kind == "relu":
            return 0.0
        shift: Tensor | float = 0.0 if self.kind == "favor++" else -math.log(self._features)
        if isinstance(call.learned, PerformerParameters) and call.learned.moves:
            query, shift = call.learned.common(query, call.scale, shift)
        return shift - query.square().sum(-1) * (abs(call.scale) / 2)

    def _mapped(self, query: Tensor, key: Tensor, call: Call) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """The inputs of `feature_attention`: queries, keys, and the maps that make exponents of them."""
        centre = None
        if isinstance(call.learned, PerformerParameters) and call.learned.moves:
            query, key, centre = call.learned.moved(query, key)
        rows, factor = self._rows(query, call), abs(call.scale) ** 0.5
        sides = factor, factor if call.scale >= 0 else -factor  # what scales the rows scales queries and keys
        squares = key.square().sum(-1) * (abs(call.scale) / 2)
        squares = squares + 0.0 * squares  # NaN where it is infinite: −inf would hide the key instead
        towards = 0.0 if centre is None else (key * centre).sum(-1) * call.scale
        if self.kind in EXPONENTIAL:
            mapped = exponential_map(self.kind, rows, self.norm or 2 * query.shape[3] ** 0.5)
            of_query, of_key = (mapped.rows.unsqueeze(0) * side for side in sides)
            # The query's and the key's; what is equal for all features makes no difference.
            bias = 2 * mapped.bias.unsqueeze(0) if self.kind == "favor++" else None
            maps = {"of_query": of_query, "of_key": of_key, "feature_bias": bias, "key_bias": towards - squares}
            return query, key, maps
        if self.kind == "trigonometric":
            query, key = (parts(trigonometric_features(x, rows * f)) for x, f in zip((query, key), sides, strict=True))
            return query, key, {"key_bias": towards + squares}
        query, key = (relu_exponents(x, rows * f) for x, f in zip((query, key), sides, strict=True))
        return query, key, {} if centre is None else {"key_bias": towards}

    def _rows(self, like: Tensor, call: Call) -> Float[Tensor, "R D"]:
        draw = None
        if isinstance(call.learned, PerformerParameters) and self.redraw > 0:
            draw = (call.learned.passes - 1).clamp(min=0) // self.redraw
        return directions(call.seed, draw, self.features, like.shape[3], self.rows == "iid", like)

    def fit_loss(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
        """The relative error of the outputs."""
        return output_error(self, query, key, value, call)

    def init_state(self, sizes: Sizes, *, like: Tensor, learned: nn.Module | None = None) -> dict[str, Tensor]:
        """The state before the first token: R·(E + 2) numbers for each key head."""
        return no_tokens(sizes.B, sizes.G, self._features, sizes.E, like)._asdict()

    @property
    def _features(self) -> int:
        return 2 * self.features if self.kind == "hyperbolic" else self.features

    def advance(
        self, query: Tensor, key: Tensor, value: Tensor, state: dict[str, Tensor], call: Call
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Attend to the sums of a state, and add the new tokens to them."""
        query, key, maps = self._mapped(query, key, call)
        return advanced(state, *exponents(query, key, **maps), value, call.mask.key_padding(value.shape[2]))
