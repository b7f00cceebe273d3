"""Synthesizer: attention whose logits do not come from products of queries and keys.

    out_i = Σ_j softmax_j(Σ_p α_p S^p_ij) v_j,   α = softmax of a learned number for each kind p, for each head
    random              S_ij = R_ij                                  R is L × L, the same for every input
    factorised-random   S_ij = (R₁ R₂ᵀ)_ij                            R₁ and R₂ are L × k
    dense               S_ij = F(x_i)_j,   F(x) = W₂ relu(W₁ x + b₁) + b₂
    factorised-dense    S_ij = F_A(x_i)_{⌊j/b⌋} · F_B(x_i)_{j mod b}    with a and b outputs, a·b ≥ L
    dot                 S_ij = scale · q_i·k_j                        Tay et al. 2020, sections 3.1 to 3.4

==========  =================================
paper       here
==========  =================================
ℓ           L, `max_length` of `bind`
k, a        `rank`
X           `hidden`, the layer's input
α           `Synthesised.shares`
==========  =================================

All N·M logits are computed: it replaces what attention weights are made of, not their number. i and j are ranks among
an item's real tokens, so padding changes nothing, and an item with fewer than L tokens uses the first rows and columns.
`scale` multiplies all logits, and at its default, 1/√D, those that are not products by 1.

Deviations: b = ⌈L/a⌉, where the paper has a·b = L.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from subquad.kernels.attention.softmax import visible_logsumexp, visible_softmax
from subquad.kernels.attention.synthetic_logits import Dense, FactorisedDense, FactorisedRandom, Random
from subquad.kernels.tokens.heads import repeat_heads
from subquad.kernels.tokens.positions import ValidPositions, ranks
from subquad.methods.core.method import WIDEST, Call, Method, Partial, Traits, choice, upcast, whole

AND = "-and-"
DOT = "dot"
KINDS = ("random", "factorised-random", "dense", "factorised-dense")
MIXTURES = (*(kind + AND + DOT for kind in KINDS), "random" + AND + "dense")


class Synthesised(nn.Module):
    """The learned logits of one layer, by their kinds, and how they are mixed."""

    by_query_head: ClassVar[tuple[str, ...]] = ("kinds", "shares")

    def __init__(self, method: "Synthesizer", heads: int, head_dim: int, length: int):
        super().__init__()
        self.max_length = length
        generator, rank = torch.Generator("cpu").manual_seed(method.seed), method.rank
        made: dict[str, nn.Module] = {}
        for kind in method.kinds:
            if kind == "random":
                made[kind] = Random(heads, length, generator)
            elif kind == "factorised-random":
                made[kind] = FactorisedRandom(heads, length, rank, generator)
            elif kind == "dense":
                made[kind] = Dense(heads, head_dim, length, generator)
            elif kind == "factorised-dense":
                made[kind] = FactorisedDense(heads, head_dim, length, min(rank, length), generator)
        self.kinds = nn.ModuleDict(made)
        self.shares = nn.Parameter(torch.zeros(heads, len(method.kinds))) if len(method.kinds) > 1 else None

    def mixed(self, logits: list[Float[Tensor, "#B H N M"]]) -> Float[Tensor, "#B H N M"]:
        """The kinds of logits in their shares."""
        if self.shares is None:
            return logits[0]
        shares = self.shares.to(logits[0].dtype).softmax(-1).unbind(-1)
        parts = [share[:, None, None] * part for share, part in zip(shares, logits, strict=True)]
        return torch.stack(torch.broadcast_tensors(*parts)).sum(0)


@dataclass(frozen=True)
class Synthesizer(Method):
    """Attention by learned logits, with or without products of queries and keys. Only as a bound method.

    Args:
        logits: "random", "factorised-random", "dense" or "factorised-dense"; one of these with products, as in
            "random-and-dot"; or "random-and-dense". Dense ones read the layer's input, which layers of `sq.nn` hand on.
        rank: k of factorised random logits; a, the width of the first factor, of factorised dense ones.
        seed: random seed of the parameters' start.

    >>> import torch, subquad as sq
    >>> layer = sq.nn.MultiheadAttention(64, 4, method=sq.Synthesizer(logits="dense"), max_length=100)
    >>> layer(torch.randn(2, 80, 64), is_causal=True).shape
    torch.Size([2, 80, 64])
    """

    logits: str = choice(*KINDS, *MIXTURES)
    rank: int = whole(8, least=1, most=WIDEST)
    seed: int = whole(0)

    name: ClassVar[str] = "synthesizer"
    traits: ClassVar[Traits] = Traits(
        family="exact",
        causal="strict",
        cross=False,
        cached=True,
        window=True,
        order_free=False,
        subquadratic=False,
        positional=True,
        synthetic=True,
        quadratic_baseline=True,
        learned=True,
        exact_limit="its logits are learned: no setting makes them the products of queries and keys",
        example={"logits": "random-and-dot"},
        complexity="O(N·M·E) time and O(N·M) memory, and the cost of its logits; O(L²) parameters for random logits",
        source="Tay et al. 2020",
    )

    @property
    def kinds(self) -> list[str]:
        """The kinds of logits that are mixed."""
        return self.logits.split(AND)

    def describe(self) -> Traits:
        """Describe the traits: dense logits need the layer's input, and random ones depend on a query's position."""
        return replace(type(self).traits, needs_hidden="dense" in self.logits, order_free="random" not in self.logits)

    def make_learned(self, heads: int, kv_heads: int, head_dim: int, max_length: int | None) -> nn.Module:
        """The initial logits, or what they are computed with."""
        if max_length is None:
            raise ValueError(
                f"{self.name!r} learns a logit for each position, so it must know the longest input: give max_length=… "
                "to bind, sq.nn.MultiheadAttention, sq.nn.swap or sq.hf.swap"
            )
        return Synthesised(self, heads, head_dim, max_length)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        """Compute the logits, and attend."""
        query, key, value = upcast(query, repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1]))
        logits = self._logits(query, key, call)
        visible = call.mask.visible(query.shape[2], key.shape[2], key.device)
        weights = F.dropout(visible_softmax(logits, visible), call.dropout_p)
        return weights @ value, visible_logsumexp(logits, visible) if call.wants_lse else None

    def _logits(self, query: Tensor, key: Tensor, call: Call) -> Float[Tensor, "B H N M"]:
        """All logits, mixed; key heads are repeated already."""
        learned, line, M = call.learned, ValidPositions.from_mask(call.mask, query, key), key.shape[2]
        assert isinstance(learned, Synthesised)
        if learned.max_length < M:
            raise ValueError(
                f"{self.name!r} was bound for at most {learned.max_length} tokens (max_length), but there are {M} "
                "keys; bind it for longer inputs"
            )
        shape, rows, more = (*query.shape[:3], M), line.query_ranks.clamp(max=M - 1), query.shape[3] ** 0.5
        parts = []
        for kind in self.kinds:
            if kind == DOT:
                parts.append(query @ key.mT * call.scale)
                continue
            part = learned.kinds[kind](rows, M, call.hidden, query) * (call.scale * more)
            if line.valid_keys is not None:  # a key's column is its rank
                columns = ranks(line.valid_keys, M, key.device).clamp(max=M - 1)
                part = part.expand(shape).gather(3, columns[:, None, None].expand(shape))
            parts.append(part)
        return learned.mixed(parts).expand(shape)
