"""Sparse Sinkhorn attention: every block of tokens attends to itself and to one block that a sort network sends it.

Tay, Bahri, Yang, Metzler, Juan 2020, "Sparse Sinkhorn Attention", sections 3.1 to 3.4:

    q̄_i, k̄_i = means of the queries and keys of block i
    R_ij = (scale · q̄_i W k̄_j + noise) / τ                           the sort network
    P    = Sinkhorn(R): rows and columns of exp(R) normalised in turn
    K'_i = Σ_j P_ij K_j,  V'_i = Σ_j P_ij V_j                         the block that is sent to i, slot by slot
    out  = softmax attention of block i to the keys [K_i; K'_i] with the values [V_i; V'_i]
    cut > 0:  … of every block to [K'_1; …; K'_cut]                   SortCut, section 3.4

==========  =======================
paper       here
==========  =======================
b           block
N_k         iterations
τ           temperature
n           cut
==========  =======================

The paper's sort network maps a pooled block to one logit for each block, which fixes the number of blocks. Here
the logits are products of pooled queries and keys through a learned D×D matrix per head, the identity at the start: it
fits any length. Gumbel noise is added in training only; it follows from the seed and a step that the layer counts.

Blocks are cut from the real tokens of each item, and it has as many as it needs. The last may be short: a slot of K'_i
then mixes the blocks that have this slot, and its logit is raised by the ln of their share of P_i, so that a missing
token is skipped. Keys and values are sent alike (one published package sends keys as values by mistake).
Non-causal: means and P look at the whole sequence.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from subquad.core.randomness import gumbel
from subquad.kernels.attention.soft_permutations import sinkhorn
from subquad.kernels.attention.softmax import visible_logsumexp, visible_softmax
from subquad.kernels.selection.sorted_chunks import chunks_of
from subquad.kernels.tokens.heads import repeat_heads
from subquad.kernels.tokens.positions import ValidPositions
from subquad.kernels.tokens.slots import valid_slots, vectors_at
from subquad.kernels.transforms import check_can_change
from subquad.methods.core.method import MOST_REPEATS, Call, Method, Partial, Traits, number, upcast, whole

LEAST = 1e-12  # a smaller share of a slot is none: its logarithm would have no use and a huge gradient
MOST_BLOCKS = 2**20  # more than there are blocks


class SortNetwork(nn.Module):
    """The logits R of where each block of keys is sent, in training with new Gumbel noise at each step."""

    steps: Tensor
    by_query_head: ClassVar[tuple[str, ...]] = ("weight",)
    counters: ClassVar[tuple[str, ...]] = ("steps",)

    def __init__(self, heads: int, head_dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(head_dim).repeat(heads, 1, 1))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(
        self, query: Float[Tensor, "B H T D"], key: Float[Tensor, "B H T D"], call: Call
    ) -> Float[Tensor, "B H T T"]:
        """Logits for pooled queries and keys, in their dtype; row i is for what block i receives."""
        logits = query @ self.weight.to(query.dtype) @ key.transpose(-1, -2) * call.scale
        if not self.training:
            return logits
        check_can_change(self.steps, "the state of 'sinkhorn', its count of steps,")
        B, _, T, _ = logits.shape
        block = torch.arange(T, device=logits.device)
        item = torch.arange(B, device=logits.device)[:, None]
        head = (item * call.all_heads(query) + call.head_numbers(query))[..., None, None]
        noise = gumbel(call.seed, self.steps, (head * MOST_BLOCKS + block[:, None]) * MOST_BLOCKS + block, like=logits)
        self.steps.add_(1)
        return logits + noise


def pooled(blocks: Float[Tensor, "B H T S D"], filled: Bool[Tensor, "B H T S"]) -> Float[Tensor, "B H T D"]:
    """The mean of each block's tokens; 0 for an empty one."""
    return blocks.sum(3) / filled.sum(3).clamp(min=1)[..., None]


def send(
    permutation: Float[Tensor, "B H R T"], blocks: Float[Tensor, "B H T S D"], share: Float[Tensor, "B H R S"]
) -> Float[Tensor, "B H R S D"]:
    """Σ_j P_ij X_j for each slot, over the blocks that have it; `share` is their part of P_i."""
    return torch.einsum("bhij,bhjsd->bhisd", permutation, blocks) / share.clamp(min=LEAST)[..., None]


@dataclass(frozen=True)
class Sinkhorn(Method):
    """Attention of each block to itself and to a soft mixture of all blocks. Only as a bound method.

    Args:
        block: tokens of a block.
        iterations: how often columns and rows are normalised.
        temperature: τ; lower is closer to a hard permutation.
        cut: every query attends to the first `cut` sorted blocks alone (SortCut). 0: to its own and its sorted block.
        seed: random seed of the noise in training.

    >>> import torch, subquad as sq
    >>> layer = sq.nn.MultiheadAttention(64, 4, method=sq.Sinkhorn(block=16))
    >>> layer(torch.randn(2, 100, 64)).shape
    torch.Size([2, 100, 64])
    """

    block: int = whole(64, least=1, clamped=True)
    iterations: int = whole(8, least=1, most=MOST_REPEATS)
    temperature: float = number(0.75, least=1e-3)
    cut: int = whole(0)
    seed: int = whole(0)

    name: ClassVar[str] = "sinkhorn"
    traits: ClassVar[Traits] = Traits(
        family="buckets",
        cross=False,
        order_free=False,
        subquadratic=False,
        positional=True,
        learned=True,
        exact_limit={"block": "N"},
        example={"block": 8},
        complexity="O(N·(S + N/S)·D) time with blocks of S; O(N·C·S·D + (N/S)²·D) with a cut of C",
        source="Tay et al. 2020b",
        zeroes_padding=True,  # it is in no block
    )

    def describe(self) -> Traits:
        """The traits; with a cut, a query attends to a constant number of keys, without its own block."""
        return replace(type(self).traits, subquadratic=True) if self.cut else type(self).traits

    def make_learned(self, heads: int, kv_heads: int, head_dim: int, max_length: int | None) -> nn.Module:
        """The initial sort network: products of the pooled queries and keys."""
        return SortNetwork(heads, head_dim)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        """Cut into blocks, permute them, attend to the own and the sorted block."""
        query, key, value = upcast(query, key, value)
        (B, H, N, _), network = query.shape, call.learned
        assert isinstance(network, SortNetwork)
        valid = ValidPositions.from_mask(call.mask, query, key).tokens(valid_as="either")
        slots = chunks_of((~valid).int().argsort(dim=1, stable=True)[:, None], valid.sum(1), self.block)
        slots = slots.expand(B, H, -1, -1)
        of_query = valid_slots(slots, call.mask.query_padding(N))
        of_key = valid_slots(slots, call.mask.key_padding(N))
        q, (k, v) = vectors_at(query, of_query), (vectors_at(repeat_heads(x, H), of_key) for x in (key, value))

        logits = network(pooled(q, of_query < N), pooled(k, of_key < N), call)
        exists = (slots < N)[:, 0, :, 0]
        permutation = sinkhorn(logits / self.temperature, exists, self.iterations)
        filled = (of_key < N).to(q.dtype)
        if self.cut > 0:
            parts = [first_blocks(permutation[:, :, : self.cut], k, v, filled)]
        else:
            several = (exists.sum(1) > 1)[:, None, None, None]  # the mixture of one block has the same keys again
            parts = [(k, v, filled), sorted_blocks(permutation * several, k, v, filled)]
        k, v, share = (torch.cat(together, dim=3) for together in zip(*parts, strict=True))
        out, lse = attend_by_share(q, k, v, share, call)
        lse = None if lse is None else to_tokens(lse[..., None], of_query, N)[..., 0]
        return to_tokens(out, of_query, N), lse


def to_tokens(x: Float[Tensor, "B H T S E"], slots: Tensor, N: int) -> Float[Tensor, "B H {N} E"]:
    """Assign the content of slots to their tokens; 0 for a token in no slot."""
    B, H, *_, E = x.shape
    slot = slots.flatten(2)[..., None].expand(-1, -1, -1, E)
    return x.new_zeros(B, H, N + 1, E).scatter(2, slot, x.flatten(2, 3))[:, :, :N]


def sorted_blocks(permutation: Tensor, k: Tensor, v: Tensor, filled: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The keys and values sent to each block, K' and V', and each slot's share of P_i."""
    share = permutation @ filled
    return send(permutation, k, share), send(permutation, v, share), share


def first_blocks(permutation: Tensor, k: Tensor, v: Tensor, filled: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The sorted blocks of these rows of P as one, the same for every query."""
    k, v, share = sorted_blocks(permutation, k, v, filled)
    return k.flatten(2, 3)[:, :, None], v.flatten(2, 3)[:, :, None], share.flatten(2, 3)[:, :, None]


def attend_by_share(
    q: Float[Tensor, "B H T S D"],
    k: Float[Tensor, "B H #T K D"],
    v: Float[Tensor, "B H #T K E"],
    share: Float[Tensor, "B H #T K"],
    call: Call,
) -> tuple[Float[Tensor, "B H T S E"], Float[Tensor, "B H T S"] | None]:
    """Softmax attention in which a slot counts by its share, from 0 to 1; with its log-sum-exp."""
    allowed = (share > LEAST)[..., None, :]
    logits = q @ k.transpose(-1, -2) * call.scale + share.clamp(min=LEAST).log()[..., None, :]
    out = F.dropout(visible_softmax(logits, allowed), call.dropout_p) @ v
    return out, visible_logsumexp(logits, allowed) if call.wants_lse else None
