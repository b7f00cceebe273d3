"""Reformer: shared queries and keys, and attention inside buckets of a locality-sensitive hash.

Kitaev, Kaiser, Levskaya 2020, "Reformer: The Efficient Transformer", section 2; "lsh-X" in Vyas et al. 2020 is this
with X rounds:

    k_j   = q_j / ‖q_j‖
    h(x)  = argmax [xR; −xR], R a random D×b/2 matrix            b = 2n/m buckets, m the chunk
    P_i   = {j: h(q_j) = h(q_i), j in i's chunk or in the one before}
    chunks of m: the tokens sorted by (h, position)
    out_i = Σ_{j ∈ P_i, j ≠ i} softmax_j(q_i·k_j / √D) v_j       self only if no other key is visible in any round
    rounds are merged by log-sum-exp

==========  =====================
paper       here
==========  =====================
n_rounds    rounds
m           chunk
n_buckets   2⌈n/m⌉, at most `buckets`
R           directions
==========  =====================

Choices. Only keys of the query's own bucket are visible; some published code lets it see its chunk's other buckets. The
first chunk has no chunk before it; published code wraps around to the last. A key that several rounds find counts as
often. An item with no more tokens than a chunk has one bucket. b is even and each item's own; `buckets` bounds
it, else the hash would take O(N²/m) products, and buckets that then outgrow two chunks see the nearest ones.

The keys that are passed in are checked and then not read. Causality concerns values only: chunks are cut from the whole
sequence, so that later queries may move a key into or out of reach.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from subquad.core.randomness import normal
from subquad.core.rounding import ceil_div
from subquad.core.versions import sym_min
from subquad.kernels.attention.softmax import merge_partials
from subquad.kernels.selection.sorted_chunks import runs_of_labels
from subquad.kernels.tokens.heads import repeat_heads
from subquad.kernels.tokens.positions import ValidPositions
from subquad.kernels.tokens.slots import Buckets, with_itself
from subquad.methods.core.bucketed import Bucketed, attend_inside
from subquad.methods.core.method import MOST_REPEATS, Call, Partial, Traits, upcast, whole


def hash_labels(
    query: Float[Tensor, "B H N D"], directions: Float[Tensor, "R D"], used: Int64[Tensor, "B"]
) -> Int64[Tensor, "B H N"]:
    """argmax [xR; −xR], where each item uses the first `used` directions; label 0 where it uses none."""
    projected = query @ directions.T
    used = used[:, None, None]
    beyond = torch.arange(directions.shape[0], device=query.device) >= used[..., None]
    nearest = projected.abs().masked_fill(beyond, -1.0).argmax(-1)
    behind = projected.gather(3, nearest[..., None])[..., 0] < 0
    return torch.where(behind, used + nearest, nearest).masked_fill(used == 0, 0)


@dataclass(frozen=True)
class Reformer(Bucketed):
    """Reformer's attention by locality-sensitive hashing. Self-attention only; the keys are the normalised queries.

    Args:
        rounds: how often the tokens are hashed and sorted anew.
        chunk: m, tokens of a chunk. A query sees its bucket in its own chunk and in the one before.
        buckets: the most buckets of a round; each item has 2⌈n/m⌉ or, where that is more, the even number up to this.
        seed: random seed of the directions.

    >>> import torch, subquad as sq
    >>> q, k, v = torch.randn(3, 1, 2, 50, 16)
    >>> sq.attention(q, k, v, method=sq.Reformer(rounds=2, chunk=8), is_causal=True).shape
    torch.Size([1, 2, 50, 16])
    """

    rounds: int = whole(4, least=1, most=MOST_REPEATS)
    chunk: int = whole(32, least=1, clamped=True)
    buckets: int = whole(64, least=2)
    seed: int = whole(0)

    name: ClassVar[str] = "reformer"
    traits: ClassVar[Traits] = Traits(
        family="buckets",
        causal="values-only",
        cross=False,
        dropout="attention weights in each round",
        stochastic=True,
        order_free=False,
        positional=True,
        unit="keys",
        exact_limit="the keys are the queries, brought to length 1, and a query does not see itself",
        example={"rounds": 2, "chunk": 8},
        complexity="O(rounds·N·(B + m)·D) time with B buckets and chunks of m",
        source="Kitaev et al. 2020, section 2",
    )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        """Hash, sort, attend to the own bucket in two chunks, merge; a query that meets no other key sees itself."""
        query, value = upcast(query, repeat_heads(value, query.shape[1]))
        buckets, key = self.meetings(query, key, call), F.normalize(query, dim=-1)
        others = attend_inside(query, key, value, buckets, call, other_keys_only=True)
        valid = ValidPositions.from_mask(call.mask, query, query).tokens(valid_as="both")
        alone = with_itself(others[1].isneginf() & valid[:, None])
        return merge_partials([others, attend_inside(query, key, value, alone, call)])

    def meetings(self, query: Tensor, key: Tensor, call: Call) -> tuple[Buckets, ...]:
        """Pairs of queries and keys that meet in any round, and each token itself, which it sees only if alone."""
        with torch.no_grad():
            line, D = ValidPositions.from_mask(call.mask, query, query), query.shape[3]
            valid = line.tokens(valid_as="either")
            most = sym_min(ceil_div(line.N, self.chunk), self.buckets // 2)
            used = ceil_div(valid.sum(1), self.chunk).clamp(max=most)
            used = torch.where(valid.sum(1) <= self.chunk, 0, used)
            directions = normal(call.seed, most, self.rounds * D, like=query).unflatten(1, (self.rounds, D))
            labels = (hash_labels(query, of_round, used) for of_round in directions.unbind(1))
            runs = (
                runs_of_labels(torch.where(valid[:, None], labels_of_round, 2 * most), 2 * most, self.chunk)
                for labels_of_round in labels
            )
            return tuple(run.of_valid(line.valid_queries, line.valid_keys) for run in runs)
