"""Learned feature map: linear attention by learned features (Hedgehog), in which keys near a query are exact.

    ln φ_q(q)_r = ln softmax_r([W_q q, −W_q q] + b_q) + λ·q         ln φ_k(k)_r likewise, with W_k, b_k and κ
    w_ij        = e^{scale·q_i·k_j}             for keys near i, and for the sinks
                = e^g · Σ_r φ_q(q_i)_r φ_k(k_j)_r   for all others
    out_i       = Σ_j w_ij v_j / Σ_j w_ij

q and k are taken times √scale in the features. W starts as the identity, g as ln R, b, λ and κ as 0.

==========  ==========================================
paper       here
==========  ==========================================
W, b        `of_query`, `of_key`, `query_bias`, `key_bias`
λ, κ        `query_tilt`, `key_tilt`
g           `gain`
R           `features`
==========  ==========================================

**Near** are the keys of a query's own block of `window` tokens and of the block before it; without a causal mask the
block behind it too. Blocks count real tokens. The other keys come in as sums over the blocks before and those behind,
added up and never subtracted. **Sinks** are the first tokens of the item, and without a causal mask the last ones too.

With window=0 and sinks=0 it is the paper's feature map. Deviations from it: λ, κ and g, without which the far part has
no size of its own in addition to the near one; one softmax over both halves of the features, as in the paper's code;
a start that rows of random directions complete where there are more features than 2·D.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from subquad.core.randomness import orthogonal
from subquad.core.rounding import ceil_div
from subquad.core.shapes import Sizes
from subquad.kernels.attention.features.far_keys import far, in_blocks, near_keys
from subquad.kernels.attention.features.recurrent import no_tokens
from subquad.kernels.attention.features.state import FeatureState, merge, read, state_of
from subquad.kernels.attention.features.visible import attend_features, drop_rows
from subquad.kernels.attention.pairs.op import attend_pairs
from subquad.kernels.attention.softmax import merge_partials
from subquad.kernels.tokens.positions import KeyLine, ValidIndex, ValidPositions
from subquad.kernels.tokens.slots import Buckets, taken, valid_slots
from subquad.masks import Mask
from subquad.methods.core.fitting import output_error
from subquad.methods.core.method import WIDEST, Call, Fit, Method, Partial, Traits, upcast, whole
from subquad.methods.core.residual import Residual

BLOCK = 64  # queries of a block where all of them meet the same keys


class FeatureMaps(nn.Module):
    """W, b, λ and κ of each head and each key head, and g of each head."""

    by_query_head: ClassVar[tuple[str, ...]] = ("of_query", "query_bias", "query_tilt", "gain")
    by_key_head: ClassVar[tuple[str, ...]] = ("of_key", "key_bias", "key_tilt")

    def __init__(self, heads: int, kv_heads: int, head_dim: int, features: int, seed: int):
        super().__init__()
        rows = ceil_div(features, 2)
        more = orthogonal(seed, max(0, rows - head_dim), head_dim, like=torch.zeros(1))
        start = torch.cat([torch.eye(min(rows, head_dim), head_dim), more])
        self.of_query, self.of_key = (nn.Parameter(start.repeat(n, 1, 1)) for n in (heads, kv_heads))
        self.query_bias, self.key_bias = (nn.Parameter(torch.zeros(n, features)) for n in (heads, kv_heads))
        self.query_tilt, self.key_tilt = (nn.Parameter(torch.zeros(n, head_dim)) for n in (heads, kv_heads))
        self.gain = nn.Parameter(torch.full((heads,), math.log(features)))

    def forward(
        self, query: Float[Tensor, "B H N D"], key: Float[Tensor, "B G M D"], scale: float
    ) -> tuple[Float[Tensor, "B H N R"], Float[Tensor, "B G M R"]]:
        """ln φ_q + g and ln φ_k."""
        root = abs(scale) ** 0.5
        query, key = query * root, key * (root if scale >= 0 else -root)
        gain = self.gain.to(query.dtype)[:, None, None]
        of_query = log_features(query, self.of_query, self.query_bias, self.query_tilt)
        return of_query + gain, log_features(key, self.of_key, self.key_bias, self.key_tilt)


def log_features(
    x: Float[Tensor, "B H N D"], weight: Float[Tensor, "H P D"], bias: Float[Tensor, "H R"], tilt: Float[Tensor, "H D"]
) -> Float[Tensor, "B H N R"]:
    """ln softmax([W x, −W x] + b) + tilt·x."""
    weight, bias, tilt = (p.to(x.dtype) for p in (weight, bias, tilt))
    both = torch.cat([weight, -weight], dim=1)[:, : bias.shape[1]]
    return (x @ both.mT + bias[:, None]).log_softmax(-1) + x @ tilt[..., None]


@dataclass(frozen=True)
class LearnedFeatureMap(Method):
    """Exact attention to near keys and sinks, and learned features for all others. Only as a bound method.

    Args:
        features: R; half of them are the negatives of the others.
        window: tokens of a block; a query attends to those of its own and of the adjacent ones exactly. 0: none, and
            cross-attention too.
        sinks: tokens at either end of the item that are exact for every query; under a causal mask, at its start.
        seed: random seed of the rows of W behind the first D, where features > 2·D.

    >>> import torch, subquad as sq
    >>> layer = sq.nn.MultiheadAttention(64, 4, method=sq.LearnedFeatureMap(features=32, window=8))
    >>> layer(torch.randn(2, 100, 64), is_causal=True).shape
    torch.Size([2, 100, 64])
    """

    features: int = whole(64, least=2, most=WIDEST)
    window: int = whole(16, clamped=True)
    sinks: int = whole(1, clamped=True)
    seed: int = whole(0)

    name: ClassVar[str] = "learned-feature-map"
    traits: ClassVar[Traits] = Traits(
        family="features",
        causal="strict",
        cross=False,
        cached=True,
        dropout="attention weights of near keys and sinks; rows of values, from the sum over the others",
        order_free=False,
        recurrent=True,
        positional=True,
        learned=True,
        fit=Fit(metric="error", learning_rate=4e-2),
        exact_limit={"window": "N"},
        example={"features": 12, "window": 4},
        complexity="O(N·(R + W)·(D + E)) time with a window of W, O(N·R + N·R·E/W) memory",
        source="Zhang et al. 2024 (Hedgehog); the window and the sinks are additions",
    )

    def describe(self) -> Traits:
        """The traits without a window: queries may be other tokens than the keys, and no setting is exact."""
        if self.window:
            return type(self).traits
        why = "another kernel than softmax's: its weights are sums over the features"
        free: dict[str, Any] = {"cross": True, "order_free": True, "recurrent": False, "positional": self.sinks > 0}
        return replace(type(self).traits, exact_limit=why, **free)

    def make_learned(self, heads: int, kv_heads: int, head_dim: int, max_length: int | None) -> nn.Module:
        """The initial parameters: W = I, g = ln R, and 0 for the others."""
        return FeatureMaps(heads, kv_heads, head_dim, self.features, self.seed)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        """Attend to near keys, to sinks and to the sums over the others, with one normalisation."""
        query, key, value = upcast(query, key, value)
        return (self._with_near if self.window else self._without_near)(query, key, value, call)

    @property
    def keeps_residual(self) -> str | None:
        """The settings with which the method has no exact keys; None if it has them already."""
        return "window=0,sinks=0" if self.window or self.sinks else None

    def residual(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Residual:
        """Attention to all keys without near keys and sinks, with the features that give the weight of each."""
        query, key, value = upcast(query, key, value)
        of_query, of_key = self.maps(query, key, call)
        return Residual(self.attend(query, key, value, call), of_query, of_key, by_features=True)

    def _with_near(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        B, is_causal = query.shape[0], call.mask.is_causal
        # Blocks count real tokens, so all are aligned without padding first, and each query with its key. With
        # window = 4, a query of block 2 meets its neighbours one by one, and the rest by features (`far`):
        #
        #     line     0 1 2 3 | 4 5 6 7 | 8 9 . . | . . . . | . . .
        #              s f f f |  exact  |  exact  |  exact  | f f s       s: a sink, exact for all
        line = KeyLine.from_positions(ValidPositions.from_mask(call.mask, query, key))
        length = line.valid.shape[1]
        query, key, value = (in_blocks(x, self.window) for x in (line.queries(query), line.keys(key), line.keys(value)))
        valid = F.pad(line.valid, (0, query.shape[2] - length))
        ranks = replace(ValidIndex.from_mask(None, B, query.shape[2], key.device), lengths=line.lengths)
        slots = near_keys(ranks, query.shape[2] // self.window, self.window, self.sinks, is_causal)
        near = self.exact(query, key, value, slots, valid, call, Mask(is_causal=is_causal))
        of_query, of_key = self.maps(query, key, call)
        hidden = ~valid | self._are_sinks(ranks, is_causal)
        parts = far(of_query, of_key, drop_rows(value, call.dropout_p), hidden, self.window, is_causal)
        out, lse = merge_partials([near, *parts])
        return line.back(out[:, :, :length]), line.back(lse[:, :, :length, None])[..., 0]

    def _without_near(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        B, M, mask = query.shape[0], key.shape[2], call.mask
        of_query, of_key = self.maps(query, key, call)
        values = drop_rows(value, call.dropout_p)
        if self.sinks == 0:
            return attend_features(of_query, of_key, values, mask)
        ranks = ValidIndex.from_mask(mask.key_padding(M), B, M, key.device)
        slots = ranks.ends(self.sinks, 0 if mask.is_causal else self.sinks, 1).tokens
        sinks = torch.zeros(B, M + 1, dtype=torch.bool, device=key.device).scatter(1, slots[:, 0], True)[:, :M]
        bias = torch.zeros_like(sinks, dtype=key.dtype).masked_fill(sinks, -torch.inf)[:, None]
        pattern = Mask(is_causal=mask.is_causal, offset=mask.offset)
        exact = self.exact(query, key, value, slots, None, call, pattern)
        return merge_partials([exact, attend_features(of_query, of_key, values, mask, key_bias=bias)])

    def maps(self, query: Tensor, key: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """The exponents of the features of the queries, and of the keys."""
        assert isinstance(call.learned, FeatureMaps)
        return call.learned(query, key, call.scale)

    def exact(
        self, query: Tensor, key: Tensor, value: Tensor, keys: Tensor, valid: Tensor | None, call: Call, mask: Mask
    ) -> tuple[Tensor, Tensor]:
        """The exact part: consecutive blocks of queries, each with its keys."""
        B, H, N, _ = query.shape
        size = self.window or BLOCK
        blocks = ceil_div(N, size)
        queries = torch.arange(blocks * size, device=query.device).clamp(max=N).view(1, 1, blocks, size)
        keys = valid_slots(keys[:, None], valid).expand(B, H, -1, -1)
        bucket = None if self.window else torch.zeros(B, H, blocks, dtype=torch.int64, device=query.device)
        buckets = Buckets(queries.expand(B, H, blocks, size), keys, bucket)
        return attend_pairs(query, key, value, buckets, mask, scale=call.scale, dropout_p=call.dropout_p)

    def _are_sinks(self, ranks: ValidIndex, is_causal: bool) -> Bool[Tensor, "B M"]:
        rank, lengths = torch.arange(ranks.tokens, device=ranks.order.device), ranks.lengths[:, None]
        first = rank < self.sinks
        return first.expand(len(lengths), -1) if is_causal else first | (rank >= lengths - self.sinks)

    def init_state(self, sizes: Sizes, *, like: Tensor, learned: nn.Module | None = None) -> dict[str, Tensor]:
        """The state before the first token: empty sums, and space for the sinks and two blocks of keys and values."""
        past = no_tokens(sizes.B, sizes.G, self.features, sizes.E, like)
        kept = {
            f"{name}_{what}": past.sums.new_zeros(sizes.B, sizes.G, tokens, width)
            for name, tokens in (("near", 2 * self.window), ("sink", self.sinks))
            for what, width in (("keys", sizes.D), ("values", sizes.E))
        }
        return past._asdict() | kept | {"count": torch.zeros(sizes.B, dtype=torch.int64, device=like.device)}

    def advance(
        self, query: Tensor, key: Tensor, value: Tensor, state: dict[str, Tensor], call: Call
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Attend to near keys and to the sums over earlier blocks, and update both."""
        (B, _, N, _), w, device = query.shape, self.window, query.device
        valid = call.mask.key_padding(N)
        valid = torch.ones(B, N, dtype=torch.bool, device=device) if valid is None else valid
        # The keys of two blocks are kept, the query's own and the one before it; `base` is the rank of the first. Those
        # that have left this range since the step before go into the sums, and the new range is kept.
        #
        #     rank          … base                 count          new
        #     kept and new    [ k k k k | k k . . ][ n n n n n n ]
        count, new = state["count"], state["count"] + valid.sum(1)
        base, new_base = ((n // w - 1).clamp(min=0) * w for n in (count, new))  # ranks of the first that is kept
        present = torch.arange(2 * w, device=device) < (count - base)[:, None]
        mask = Mask.causal(offset=2 * w) & Mask.padding(keys=torch.cat([present, valid], dim=1), queries=valid)
        line = KeyLine.from_positions(ValidPositions(mask, valid, mask.key_padding(2 * w + N), B, N, 2 * w + N, device))
        key, value = (
            in_blocks(line.keys(torch.cat([state[f"near_{what}"], x], dim=2)), w)
            for what, x in (("keys", key), ("values", value))
        )
        query = in_blocks(line.queries(query), w)
        M = query.shape[2]
        rank = torch.arange(M, device=device) + base[:, None]
        hidden = ~F.pad(line.valid, (0, M - 2 * w - N)) | (rank < self.sinks)
        of_query, of_key = self.maps(query, key, call)

        first = torch.arange(self.sinks, device=device).expand(B, -1)
        begun = (first >= count[:, None])[:, None, :, None]  # those that were not there before
        kept = (new_base - base)[:, None] + torch.arange(2 * w, device=device)
        moved = {"count": new}
        for what, x in (("keys", key), ("values", value)):
            moved[f"near_{what}"] = taken(x, kept.clamp(max=M - 1))
            fresh = taken(x, (first - base[:, None]).clamp(0, M - 1))
            moved[f"sink_{what}"] = torch.where(begun, fresh, state[f"sink_{what}"])

        past = FeatureState(*(state[name] for name in FeatureState._fields))
        out, lse = read(FeatureState(*(x.unsqueeze(2) for x in past)), of_query.unflatten(1, (key.shape[1], -1)))
        parts = [(out.flatten(1, 2), lse.flatten(1, 2)), *far(of_query, of_key, value, hidden, w, is_causal=True)]
        near = self._near_kept(query, key, value, base, line, moved, call)
        gone = (rank < new_base[:, None]) & ~hidden
        past = merge(past, state_of(of_key.masked_fill(~gone[:, None, :, None], -torch.inf), value))
        return line.back(merge_partials([near, *parts])[0][:, :, : 2 * w + N]), past._asdict() | moved

    def _near_kept(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        base: Tensor,
        line: KeyLine,
        kept: dict[str, Tensor],
        call: Call,
    ) -> tuple[Tensor, Tensor]:
        """The near keys, preceded by the sinks that are not near."""
        M, s = query.shape[2], self.sinks
        ranks = replace(ValidIndex.from_mask(None, len(base), M, query.device), lengths=line.lengths)
        near = near_keys(ranks, M // self.window, self.window, 0, is_causal=True)
        begin = base[:, None] + (torch.arange(M // self.window, device=query.device) - 1) * self.window
        sinks = torch.arange(s, device=query.device)
        sinks = torch.where(sinks < begin[..., None], sinks, s + M)
        valid = torch.cat([line.valid.new_ones(len(base), s), F.pad(line.valid, (0, M - line.valid.shape[1]))], dim=1)
        key, value = torch.cat([kept["sink_keys"], key], dim=2), torch.cat([kept["sink_values"], value], dim=2)
        slots = torch.cat([sinks, near + s], dim=2)
        return self.exact(query, key, value, slots, valid, call, Mask.causal(offset=s))

    def fit_loss(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
        """The relative error of the outputs, and of their mean."""
        return output_error(self, query, key, value, call, of_mean=1.0)
