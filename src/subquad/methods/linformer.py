"""Linformer: keys and values projected along the sequence to k of each (Wang et al. 2020).

    K̄ = E K,   V̄ = F V                 E and F are k × n, the same for every input
    out_i = Σ_κ P_iκ V̄_κ,   P_i = softmax_κ(scale · q_i·K̄_κ + b_κ)

Under a causal mask every sum ends at the query. Two chained causal products, and nothing of the future:

    logits_t = scale · Σ_{i≤t} (q_t·k_i) E_·i + b,   P_t = softmax(logits_t),   out_t = Σ_{i≤t} (P_t·F_·i) v_i

With start="pool", E and F begin as means of k segments, of n_κ tokens each. Of these, an item (or the past of a query)
has c_κ tokens. Then

    K̄_κ = n_κ/c_κ Σ_i E_κi k_i,   V̄_κ likewise with F,   b_κ = ln c_κ + a learned number that starts at 0

and a κ with c_κ = 0 has no weight. So the start is exact for keys and values that are constant on segments, whatever
the length. With start="random" it is the paper's form: b = 0, no factor, every κ counts.

====================  ==================================================
paper                 here
====================  ==================================================
k, n                  `k`, `max_length` of `bind`
E, F                  `Projections.key`, `.value`, (heads, k, n)
"pooling"             projection="mean-pool": segments of each item's own
"convolution"         projection="convolution": one kernel of ⌈n/k⌉
====================  ==================================================

Column i of E and F belongs to the token of rank i among its item's real tokens, so padding changes nothing. An item
with fewer than n tokens uses the first columns.

Deviations: the factor, ln c_κ and `ends`, with which the first and the last token take part exactly, in the same
softmax, and are in no sum. Under a causal mask the "last" token is the query's own. If k does not divide n, segments
differ by 1 in size.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from subquad.core.readable import check_readable
from subquad.core.shapes import Sizes
from subquad.kernels.attention.products.op import causal_product
from subquad.kernels.attention.projections import Projections, Shares
from subquad.kernels.attention.softmax import visible_logsumexp, visible_softmax
from subquad.kernels.tokens.heads import repeat_heads
from subquad.kernels.tokens.pools import pool_means, pool_of
from subquad.kernels.tokens.positions import ValidPositions, placed, ranks
from subquad.kernels.tokens.slots import taken
from subquad.kernels.transforms import exact_attention
from subquad.methods.core.exact import exact
from subquad.methods.core.fitting import output_error
from subquad.methods.core.method import WIDEST, Call, Fit, Method, Partial, Traits, choice, upcast, whole

HIDDEN = -1e30  # a logit that is none; −inf rows would be NaN


def sums(matrix: Float[Tensor, "_h k n"], x: Float[Tensor, "B G M D"], valid: Tensor | None, skip: int) -> Tensor:
    """Σ_i E_κi x_i over an item's real tokens, without `skip` at each end: (B,G,k,D)."""
    M = x.shape[2]
    if valid is None:
        return matrix[..., skip : max(M - skip, skip)] @ x[:, :, skip : max(M - skip, skip)]
    rank = ranks(valid, M, x.device)
    inside = valid & (rank >= skip) & (rank < valid.sum(1, keepdim=True) - skip)
    slots = torch.where(inside, rank, M)[:, None, :, None].expand_as(x)
    ordered = torch.zeros_like(F.pad(x, (0, 0, 0, 1))).scatter(2, slots, x)
    return matrix[..., :M] @ ordered[:, :, :M]


def means(
    key: Tensor, value: Tensor, valid: Tensor | None, k: int, skip: int
) -> tuple[Float[Tensor, "B G k D"], Float[Tensor, "B G k E"], Shares]:
    """Mean keys and values of k pools of each item's real tokens, without `skip` at each end."""
    M = key.shape[2]
    rank = ranks(valid, M, key.device) - skip
    tokens = valid_tokens(valid, M, key.device) - 2 * skip
    label = pool_of(rank, tokens, k)
    inside = (rank >= 0) & (rank < tokens)
    label = torch.where(inside if valid is None else inside & valid, label, k)
    (mean_key, sizes), (mean_value, _) = pool_means(key, label, k), pool_means(value, label, k)
    sizes = sizes[:, None]
    return mean_key, mean_value, Shares(sizes > 0, None, sizes.clamp(min=1).to(key.dtype).log()[:, None])


def valid_tokens(valid: Tensor | None, M: int, device: torch.device) -> Int64[Tensor, "#B 1"]:
    """The number of real tokens of each item."""
    return torch.full((1, 1), M, device=device) if valid is None else valid.sum(1, keepdim=True)


def ends_of(x: Float[Tensor, "B G M D"], valid: Tensor | None) -> Float[Tensor, "B G 2 D"]:
    """The first and the last real token of each item; 0 where it has none."""
    if valid is None:
        return torch.cat([x[:, :, :1], x[:, :, -1:]], dim=2)
    last = x.shape[2] - 1 - valid.flip(1).int().argmax(1)
    at = torch.stack([valid.int().argmax(1), last], dim=1)
    taken = x.gather(2, at[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
    return taken.masked_fill(~valid.any(1)[:, None, None, None], 0.0)


def attend_to_summary(query: Tensor, keys: Tensor, values: Tensor, shares: Shares, call: Call) -> Partial:
    """Exact attention to a few keys with a bias each; 0 where none is visible, since their values are 0 then."""
    gqa = bool(query.shape[1] != keys.shape[1])
    bias = shares.of_heads(query.shape[1], query)
    bias = torch.where(shares.visible[:, None], bias, HIDDEN)
    out = exact_attention(
        query, keys, values, attn_mask=bias, scale=call.scale, dropout_p=call.dropout_p, enable_gqa=gqa
    )
    if not call.wants_lse:
        return out, None
    logits = query @ repeat_heads(keys, query.shape[1]).mT * call.scale + bias
    return out, visible_logsumexp(logits, shares.visible[:, None])


@dataclass(frozen=True)
class Past:
    """The state of the tokens so far, of fixed size."""

    tokens: Int64[Tensor, "B"]
    keys: Float[Tensor, "B G k D"]  # Σ_i E_κi k_i
    values: Float[Tensor, "B G k E"]  # Σ_i F_κi v_i
    first_key: Float[Tensor, "B G 1 D"]  # the key of rank 0
    first_value: Float[Tensor, "B G 1 E"]


def by_head(x: Float[Tensor, "B H N a"], of_key: Float[Tensor, "B G a b"]) -> Float[Tensor, "B H N b"]:
    """Each query head's rows times the matrix of its key head."""
    return (x.unflatten(1, (of_key.shape[1], -1)) @ of_key[:, :, None]).flatten(1, 2)


def causal_linformer(
    query: Float[Tensor, "B H L D"],
    key: Float[Tensor, "B G L D"],
    value: Float[Tensor, "B G L E"],
    valid: Bool[Tensor, "B L"] | None,
    call: Call,
    learned: Projections,
    skip: int,
    past: Past | None = None,
) -> tuple[Float[Tensor, "B H L E"], Float[Tensor, "B H L"] | None, Past]:
    """Query t sees the keys up to number t and the past; with `skip`, the very first one and its own exactly."""
    B, H, L, _ = query.shape
    rank = ranks(valid, L, query.device)
    rank = rank if past is None else rank + past.tokens[:, None]
    present = torch.ones_like(rank, dtype=torch.bool) if valid is None else valid
    e, f = learned.columns(rank, present & (rank >= skip), key)
    shares = learned.shares(skip, rank if skip else rank + present, query.dtype)
    factor = 1.0 if shares.factor is None else shares.factor[:, None]
    first_key, first_value = (ends_of(x, valid)[:, :, :1] for x in (key, value))
    if past is not None:
        begun = (past.tokens > 0)[:, None, None, None]
        first_key = torch.where(begun, past.first_key, first_key)
        first_value = torch.where(begun, past.first_value, first_value)
    # What is behind a query, without its own token where that takes part exactly.
    old = [F.pad(x, (0, 0, 1, 0))[:, :, :-1] for x in (key, value, e, f)] if skip else [key, value, e, f]

    logits = causal_product(query, old[0], old[2])
    logits = logits if past is None else logits + by_head(query, past.keys.transpose(-1, -2))
    logits, visible = logits * call.scale * factor + shares.of_heads(H, query), shares.visible
    if skip:
        exact = [(query * repeat_heads(x, H)).sum(-1, keepdim=True) * call.scale for x in (first_key, key)]
        sees = torch.stack([rank + present > 0, present & (rank > 0)], dim=-1)
        logits, visible = torch.cat([*exact, logits], -1), torch.cat([sees, visible.expand(len(sees), -1, -1)], -1)
    weights = F.dropout(visible_softmax(logits, visible[:, None]), call.dropout_p)
    pooled = weights[..., 2 * skip :] * factor
    out = causal_product(pooled, old[3], old[1])
    out = out if past is None else out + by_head(pooled, past.values)
    if skip:
        out = out + weights[..., :1] * repeat_heads(first_value, H) + weights[..., 1:2] * repeat_heads(value, H)
    tokens, keys, values = (rank + present)[:, -1].expand(B), e.transpose(-1, -2) @ key, f.transpose(-1, -2) @ value
    if past is not None:
        keys, values = keys + past.keys, values + past.values
    lse = visible_logsumexp(logits, visible[:, None]) if call.wants_lse else None
    return out, lse, Past(tokens, keys, values, first_key, first_value)


@dataclass(frozen=True)
class Linformer(Method):
    """Attention to k projected keys, for inputs up to a maximum length. Only as a bound method.

    Args:
        k: projected keys and values of each item.
        sharing: "none": each head has its own E and F; "headwise": one E and one F for all heads; "key-value": E = F
            for all heads; "layerwise": one E = F for all heads and layers.
        projection: "learned"; "mean-pool", which has no parameters; "convolution", one kernel for all segments.
        start: where learning starts: "pool", for pretrained models, or "random", for training.
        ends: "exact": the first and the last token take part exactly; "pooled": they are summed like all others.
        seed: random seed of a random start.

    >>> import torch, subquad as sq
    >>> layer = sq.nn.MultiheadAttention(64, 4, method=sq.Linformer(k=16), max_length=100)
    >>> layer(torch.randn(2, 80, 64)).shape
    torch.Size([2, 80, 64])
    """

    k: int = whole(128, least=1, most=WIDEST)
    sharing: str = choice("none", "headwise", "key-value", "layerwise", default="headwise")
    projection: str = choice("learned", "mean-pool", "convolution")
    start: str = choice("pool", "random")
    ends: str = choice("exact", "pooled")
    seed: int = whole(0)

    name: ClassVar[str] = "linformer"
    traits: ClassVar[Traits] = Traits(
        family="summary",
        causal="strict",
        dropout="attention weights of the projected keys",
        recurrent=True,
        positional=True,
        normalised=False,
        learned=True,
        fit=Fit(metric="error", learning_rate=2e-4),
        exact_limit="what E and F have learned decides: the identity is exact, any other square matrix is not",
        example={"k": 5},
        complexity="O((N + M)·k·D) time, O((N + M)·D + k·D) memory; causal O(N·k·D) time, O(N·k) memory",
        source="Wang et al. 2020",
    )

    def describe(self) -> Traits:
        """The traits: means are neither learned nor causal; projections shared by layers cannot be fitted by layer."""
        traits = type(self).traits
        if self.projection == "mean-pool":
            can: dict[str, Any] = {
                "causal": "no",
                "recurrent": False,
                "learned": False,
                "fit": None,
                "normalised": True,
            }
            complexity = "O(N·k·D + M·D) time, O((N + M)·D + k·D) memory"
            return replace(traits, **can, exact_limit={"k": "M"}, complexity=complexity)
        return replace(traits, fit=None, one_for_all_layers=True) if self.sharing == "layerwise" else traits

    def make_learned(self, heads: int, kv_heads: int, head_dim: int, max_length: int | None) -> nn.Module | None:
        """The initial E and F."""
        if self.projection == "mean-pool":
            return None
        if max_length is None:
            raise ValueError(
                f"{self.name!r} learns a projection of the sequence, so it must know the longest input: give "
                "max_length=… to bind, sq.nn.MultiheadAttention, sq.nn.swap or sq.hf.swap; projection='mean-pool' "
                "needs none"
            )
        return Projections(
            kv_heads if self.sharing == "none" else 1,
            self.k,
            max_length,
            start=self.start,
            kernel=self.projection == "convolution",
            tied=self.sharing in ("key-value", "layerwise"),
            seed=self.seed,
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        """Project keys and values, and attend to the projections."""
        if self.projection == "mean-pool" and key.shape[2] <= self.k:  # a segment for each token
            return exact(query, key, value, call)
        query, key, value = upcast(query, key, value)
        return (self._causal if call.mask.is_causal else self._whole)(query, key, value, call)

    def init_state(self, sizes: Sizes, *, like: Tensor, learned: nn.Module | None = None) -> dict[str, Tensor]:
        """The state before the first token: (k + 1)·(D + E) numbers for each key head."""
        zeros = like.new_zeros(sizes.B, sizes.G, 1, 1, dtype=torch.promote_types(like.dtype, torch.float32))
        rows = [(self.k, sizes.D), (self.k, sizes.E), (1, sizes.D), (1, sizes.E)]
        tokens = torch.zeros(sizes.B, dtype=torch.int64, device=like.device)
        return vars(Past(tokens, *(zeros.expand(-1, -1, *shape).clone() for shape in rows)))

    def advance(
        self, query: Tensor, key: Tensor, value: Tensor, state: dict[str, Tensor], call: Call
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Attend to a state's sums, and add the new tokens. Synchronises once, to check that there are not too many."""
        past, N, skip = Past(**state), key.shape[2], int(self.ends == "exact")
        check_readable(past.tokens, "the numbers of tokens in the state of 'linformer'", "take the step without vmap")
        before = 0 if torch.compiler.is_compiling() else int(past.tokens.max())
        learned = self.projections(call, N + before)
        out, _, past = causal_linformer(query, key, value, call.mask.key_padding(N), call, learned, skip, past)
        return out, vars(past)

    def fit_loss(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
        """The relative error of the outputs against exact attention."""
        return output_error(self, query, key, value, call)

    def _whole(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        M, skip = key.shape[2], int(self.ends == "exact")
        valid = call.mask.key_padding(M)
        if self.projection == "mean-pool":
            keys, values, shares = means(key, value, valid, self.k, skip)
        else:
            learned = self.projections(call, M)
            shares = learned.shares(skip, valid_tokens(valid, M, key.device) - skip, key.dtype)
            of_key, of_value = learned.matrices(key.dtype)
            keys, values = sums(of_key, key, valid, skip), sums(of_value, value, valid, skip)
            if shares.factor is not None:
                factor = shares.factor[:, 0, :, None][:, None]
                keys, values = keys * factor, values * factor
        if skip:
            keys, values = (torch.cat([ends_of(x, valid), y], 2) for x, y in ((key, keys), (value, values)))
            shares = with_ends(shares, valid_tokens(valid, M, key.device))
        return attend_to_summary(query, keys, values, shares, call)

    def _causal(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        line, skip = ValidPositions.from_mask(call.mask, query, key), int(self.ends == "exact")
        learned, valid = self.projections(call, line.M), line.valid_keys
        if line.aligned:
            return causal_linformer(query, key, value, valid, call, learned, skip)[:2]
        # Queries aligned with keys; after the last key, and (last of all) those before the first.
        before, more = line.line_positions < 0, line.N + 1
        at = torch.where(before, line.M + line.N, line.line_positions)
        valid = torch.ones(line.B, line.M, dtype=torch.bool, device=key.device) if valid is None else valid
        key, value = (F.pad(x, (0, 0, 0, more)) for x in (key, value))
        beside = placed(query, at, line.M + more)
        out, lse, _ = causal_linformer(beside, key, value, F.pad(valid, (0, more)), call, learned, skip)
        out = taken(out, at).masked_fill(before[:, None, :, None], 0.0)
        if lse is None:
            return out, None
        return out, taken(lse[..., None], at)[..., 0].masked_fill(before[:, None], -torch.inf)

    def projections(self, call: Call, M: int) -> Projections:
        """E and F. ValueError if they are for fewer keys."""
        assert isinstance(call.learned, Projections)
        if call.learned.max_length < M:
            raise ValueError(
                f"{self.name!r} was bound for at most {call.learned.max_length} tokens (max_length), but there are "
                f"{M} keys; bind it for longer inputs, or use projection='mean-pool'"
            )
        return call.learned


def with_ends(shares: Shares, tokens: Int64[Tensor, "#B 1"]) -> Shares:
    """Prepend the item's first and last token, which are the same in an item of one token."""
    sees = torch.stack([tokens > 0, tokens > 1], dim=-1)
    pooled = shares.visible.expand(max(len(sees), len(shares.visible)), -1, -1)
    bias = None if shares.bias is None else F.pad(shares.bias, (2, 0))
    return Shares(torch.cat([sees.expand(len(pooled), -1, -1), pooled], dim=-1), None, bias)
