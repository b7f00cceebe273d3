"""ProbSparse attention of Informer: exact rows for queries with uneven weights, the mean of the values for others.

    M_i   = max_{j ∈ S} a_ij − mean_{j ∈ S} a_ij,   a_ij = scale · q_i·k_j,   S = U sampled keys
    T     = the u queries with the largest M_i
    out_i = Σ_j softmax_j(a_ij) v_j   for i ∈ T,    mean_j v_j   for the others
    U = c·⌈ln m⌉ of an item's m keys,   u = c·⌈ln n⌉ of its n queries       Zhou et al. 2021, section 3.1, algorithm 1

A query whose logits are all alike has M_i = 0 and attends to every key alike, so the mean of the values is its exact
output. Under a causal mask j runs over the keys up to the query in both rows, and M_i takes the sampled keys that the
query sees; one that sees none of them has M_i = 0, the smallest value.

================  ===========================================
paper             here
================  ===========================================
c                 `factor`
M̄(q_i, K)         `sparsity`
Q̄                 `top_queries`
================  ===========================================

The log-sum-exp of a query outside T is that of logits which all equal their mean: ln m + scale·q_i·mean_j k_j. It is
the largest lower bound of the true one that their mean gives (Jensen's inequality).

Deviations: the sample of a head is one key out of each of U equal runs of the item's keys, so that no key is drawn
twice and early queries of a causal item see their share of it. It depends on the seed, the head and the item's own
length, where published code shares one sample over a batch, padding included. At least one key and one query are taken.
Under a causal mask the published code adds the values up without dividing by their number.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from subquad.core.randomness import uniform
from subquad.core.versions import sym_max, sym_min
from subquad.kernels.tokens.heads import repeat_heads
from subquad.kernels.tokens.positions import ValidIndex, ValidPositions
from subquad.kernels.tokens.slots import Slots, taken
from subquad.masks import Mask
from subquad.methods.core.exact import exact
from subquad.methods.core.method import Call, Method, Partial, Traits, upcast, whole


def budget(tokens: int, factor: int) -> int:
    """c·⌈ln n⌉ out of n tokens: one at least, and no more than there are."""
    logarithm = 0
    while tokens > math.floor(math.e**logarithm):  # compared with whole numbers: n may be symbolic
        logarithm += 1
    return sym_min(sym_max(factor * logarithm, 1), tokens)


def budgets(lengths: Int64[Tensor, "B"], factor: int) -> Int64[Tensor, "B"]:
    """`budget` of each item; 0 for one without tokens."""
    logarithm = lengths.clamp(min=1).double().log().ceil().long()
    return (factor * logarithm).clamp(min=1).minimum(lengths)


def sample(line: ValidPositions, heads: Int64[Tensor, "H"], factor: int, seed: int) -> Slots:
    """The sampled keys of each head, (B,H,U): one out of each of U equal runs of the item's keys."""
    device, slots = line.device, budget(line.M, factor)
    number = torch.arange(slots, device=device)
    streams = heads[:, None] * 2**32 + number  # the same whatever U is
    lengths = line.key_lengths[:, None, None]
    runs = budgets(line.key_lengths, factor)[:, None, None]
    first, end = (lengths * n // runs.clamp(min=1) for n in (number, number + 1))
    drawn = first + (uniform(seed, streams) * (end - first)).long()
    drawn = torch.where(number < runs, drawn, -1)
    return ValidIndex.from_mask(line.valid_keys, line.B, line.M, device).at(drawn)


def sparsity(query: Tensor, key: Tensor, sampled: Slots, call: Call) -> Float[Tensor, "B H N"]:
    """M, from the logits of the sampled keys alone."""
    (B, H, N, D), (G, M) = query.shape, key.shape[1:3]
    at = sampled.tokens.clamp(max=M - 1)
    of_key_heads = at.view(B, G, -1)[..., None].expand(-1, -1, -1, D)
    keys = key.gather(2, of_key_heads).view(B, H, -1, D)
    filled = (sampled.tokens < M)[:, :, None]
    if call.mask.is_causal:
        numbers = torch.arange(N, device=query.device)[None, None, :, None]
        filled = filled & call.mask.sees(numbers, at[:, :, None])
    logits = query @ keys.mT * call.scale
    count = filled.sum(-1).clamp(min=1)
    largest = torch.where(filled, logits, -torch.inf).amax(-1)
    mean = torch.where(filled, logits, 0.0).sum(-1) / count
    return torch.where(filled.any(-1), largest - mean, 0.0 * logits[..., 0])  # 0, where no NaN is to be passed on


def top_queries(measure: Float[Tensor, "B H N"], line: ValidPositions, factor: int) -> Int64[Tensor, "B H u"]:
    """The queries with the largest measure, NaN first and of equal ones the earlier; N in empty slots."""
    N, most = line.N, budget(line.N, factor)
    if line.valid_queries is not None:
        measure = measure.masked_fill(~line.valid_queries[:, None], -torch.inf)
    best = measure.argsort(dim=-1, descending=True, stable=True)[..., :most]
    count = budgets(line.query_lengths, factor)[:, None, None]
    return torch.where(torch.arange(most, device=line.device) < count, best, N)


def averaged(x: Float[Tensor, "B G M E"], line: ValidPositions, dropout_p: float = 0.0) -> Float[Tensor, "B G #N E"]:
    """The mean over the keys that each query sees; 0 where it sees none. Dropout is that of whole keys, for all."""
    B, G, M, _ = x.shape
    valid = torch.ones(B, M, dtype=torch.bool, device=x.device) if line.valid_keys is None else line.valid_keys
    share = F.dropout(valid.to(x.dtype)[:, None, :, None].expand(-1, G, -1, -1) / M, dropout_p)
    parts = x * share  # divided first: the sum of large values might overflow
    if not line.mask.is_causal:
        return parts.sum(2, keepdim=True) * (M / line.key_lengths.clamp(min=1).to(x.dtype))[:, None, None, None]
    counts = valid.cumsum(1).clamp(min=1).to(x.dtype)
    running = parts.cumsum(2) * (M / counts)[:, None, :, None]
    if line.aligned:
        return running
    at = line.positions.expand(B, line.N)
    return taken(running, at.clamp(0, M - 1)).masked_fill((at < 0)[:, None, :, None], 0.0)


def visible_key_counts(line: ValidPositions) -> Int64[Tensor, "B #N"]:
    """The number of keys that each query sees."""
    if not line.mask.is_causal:
        return line.key_lengths[:, None]
    valid = torch.ones(line.B, line.M, dtype=torch.int64, device=line.device)
    count = (valid if line.valid_keys is None else line.valid_keys).cumsum(1)
    at = line.positions.expand(line.B, line.N)
    return count.gather(1, at.clamp(0, line.M - 1)).masked_fill(at < 0, 0)


def mean_logsumexp(query: Tensor, key: Tensor, line: ValidPositions, scale: float) -> Float[Tensor, "B H N"]:
    """ln m + scale·q·mean k: as if all logits of a query were their mean. −inf for a query that sees no key."""
    means = repeat_heads(averaged(key, line), query.shape[1])
    count = visible_key_counts(line)[:, None].to(query.dtype)
    lse = (query * means).sum(-1) * scale + count.clamp(min=1).log()
    return lse.masked_fill(count == 0, -torch.inf)


@dataclass(frozen=True)
class ProbSparse(Method):
    """Exact attention for the c·⌈ln N⌉ queries with the most uneven weights, the mean of the values for the others.

    Args:
        factor: c, for the sampled keys and for the exact queries alike.
        seed: random seed of the sampled keys.

    >>> import torch, subquad as sq
    >>> q, k, v = torch.randn(3, 1, 2, 300, 4)
    >>> out = sq.attention(q, k, v, method=sq.ProbSparse(factor=5))
    >>> means = torch.isclose(out, v.mean(2, keepdim=True), atol=1e-5).all(-1)
    >>> (~means).sum(-1)  # 5·⌈ln 300⌉
    tensor([[30, 30]])
    """

    factor: int = whole(5, least=1)
    seed: int = whole(0)

    name: ClassVar[str] = "probsparse"
    traits: ClassVar[Traits] = Traits(
        family="summary",
        causal="values-only",
        dropout="attention weights of the exact queries; keys of the mean, for all other queries of a head together",
        stochastic=True,
        positional=True,
        exact_limit={"factor": "N"},
        example={"factor": 2},
        complexity="O((N + M)·c·log(N + M)·D) time, O((N + M)·(c·log(N + M) + D)) memory",
        source="Zhou et al. 2021",
    )

    def refuses(self, mask: Mask, *, cross: bool = False, **asked: bool) -> str | None:
        """The reason why the method refuses a call; under a causal mask it must see all queries to choose some."""
        if not (mask.is_causal and cross):
            return super().refuses(mask, cross=cross, **asked)
        return (
            f"{self.name!r} compares all queries of a sequence to choose the exact ones, so under a causal mask it "
            "takes no cross-attention and no step on a cache (generate with use_cache=False)"
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        """Choose queries, compute their rows, and use the mean of the values for all others."""
        query32, key32, value32 = upcast(query, key, value)
        (_, H, N, _), line = query.shape, ValidPositions.from_mask(call.mask, query, key)
        with torch.no_grad():
            sampled = sample(line, call.head_numbers(query), self.factor, call.seed)
            measure = sparsity(query32, key32, sampled, call)
            top = top_queries(measure, line, self.factor)
        rows, lse_of_rows = self._exact_rows(query, key, value, top, line, call)
        means = repeat_heads(averaged(value32, line, call.dropout_p), H)
        # A choice by NaN is not hidden: a query that may have lost by it is NaN.
        means = torch.where(measure.isnan()[..., None], torch.nan, means)
        slots = top[..., None].expand(-1, -1, -1, means.shape[3])
        out = F.pad(means, (0, 0, 0, 1)).scatter(2, slots, rows.to(means.dtype))[:, :, :N]
        if not call.wants_lse:
            return out, None
        assert lse_of_rows is not None
        lse = F.pad(mean_logsumexp(query32, key32, line, call.scale), (0, 1))
        return out, lse.scatter(2, top, lse_of_rows)[:, :, :N]

    def _exact_rows(
        self, query: Tensor, key: Tensor, value: Tensor, top: Tensor, line: ValidPositions, call: Call
    ) -> Partial:
        """Exact attention of the chosen queries; an empty slot computes a row that is not used."""
        at = top.clamp(max=line.N - 1)
        chosen = query.gather(2, at[..., None].expand(-1, -1, -1, query.shape[3]))
        mask = Mask() if line.valid_keys is None else Mask.padding(keys=line.valid_keys)
        if call.mask.is_causal:
            keys = torch.arange(line.M, device=line.device)
            mask = mask & Mask.dense(call.mask.sees(at[..., None], keys))
        return exact(chosen, key, value, call.under(mask))
