"""Dense oracles of bucketed methods: N×N softmax in which a key counts as often as the method says that it is met."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import subquad as sq
from subquad.methods.core.method import Call

Counts = Callable[[sq.Method, Tensor, Tensor, Call], Tensor]  # (B,H,N,M), how often each query meets each key


def added(method: sq.Method, query: Tensor, key: Tensor, call: Call) -> Tensor:
    """Count how often each query and key share a bucket, over all sets of buckets."""
    N, M = query.shape[2], key.shape[2]
    return sum(part.multiplicity(N, M, call.mask) for part in method.meetings(query, key, call))


def once_a_set(method: sq.Method, query: Tensor, key: Tensor, call: Call) -> Tensor:
    """The number of sets of buckets in which a query and a key share a bucket."""
    N, M = query.shape[2], key.shape[2]
    return sum(part.multiplicity(N, M, call.mask).clamp(max=1) for part in method.meetings(query, key, call))


def others_first(method: sq.Method, query: Tensor, key: Tensor, call: Call) -> Tensor:
    """Like `added`, without the query itself; itself alone where it meets no other key."""
    counts, itself = added(method, query, key, call), torch.eye(query.shape[2])
    others = counts * (1 - itself)
    return torch.where(others.any(-1, keepdim=True), others, call.mask.to_dense(*counts.shape[2:]) * itself)


def shared_keys(query: Tensor, key: Tensor) -> Tensor:
    """The queries."""
    return query


def shared_unit_keys(query: Tensor, key: Tensor) -> Tensor:
    """The queries, brought to length 1."""
    return query / query.norm(dim=-1, keepdim=True)


@dataclass(frozen=True)
class Bucketed:
    """A method that attends inside buckets, and how its oracle counts."""

    text: str
    counts: Counts = added
    keys: Callable[[Tensor, Tensor], Tensor] = lambda query, key: key  # what stands in for the keys

    @property
    def method(self) -> sq.Method:
        return sq.parse_method(self.text)


def weighted_softmax(query: Tensor, key: Tensor, value: Tensor, counts: Tensor, scale: float) -> Tensor:
    """Σ_j m_ij e^{s_ij} v_j / Σ_j m_ij e^{s_ij}; 0 for a query that meets nothing."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    logits = query @ key.mT * scale
    logits = torch.where(counts > 0, logits + counts.clamp(min=1).log(), -torch.inf)
    some = (counts > 0).any(-1, keepdim=True)
    return torch.where(some, logits.masked_fill(~some, 0.0).softmax(-1), 0.0) @ value


def oracle(bucketed: Bucketed, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
    """The method's output from its own meetings, the slow way. Padded queries meet nothing."""
    with torch.no_grad():
        counts = bucketed.counts(bucketed.method, query, key, call).to(query.dtype)
    return weighted_softmax(query, bucketed.keys(query, key), value, counts, call.scale)


def with_tail(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    label: Tensor,
    chosen: Tensor,
    cell: Tensor,
    scale: float,
    window: int = 0,
    start: int = 0,
) -> Tensor:
    """The keys `chosen` (B,H,C,M) of each query's bucket `label` (B,H,N), and a centroid for each cell of the others.

    `cell` is (B,H,M); a key whose cell is negative, and a query whose label is, is padding. Bucket by bucket.
    With a window, query i is at i + start, and near keys are exact: a cell's other keys are then listed one by one,
    each with the weight that the cell counts it with.
    """
    B, H, N, _ = query.shape
    key, value, cell = (x.repeat_interleave(H // x.shape[1], dim=1) for x in (key, value, cell))
    out = []
    for q, k, v, labels, inside, cells in zip(
        *(x.flatten(0, 1) for x in (query, key, value, label, chosen, cell)), strict=True
    ):
        head = [q.new_zeros(v.shape[1])] * N
        for bucket in labels[labels >= 0].unique().tolist():
            mine = (labels == bucket).nonzero()[:, 0].tolist()
            mean = q[mine].sum(0) / len(mine)
            keys = [(k[j], v[j], 0.0) for j in inside[bucket].nonzero()[:, 0].tolist() if cells[j] >= 0]
            counted = []
            for number in cells[cells >= 0].unique().tolist():
                others = (cells == number) & (inside[bucket] == 0)
                if others.any():
                    logits = scale * k[others] @ mean
                    weights = logits.exp() / logits.exp().sum()
                    centroid = weights @ k[others]
                    bias = logits.exp().sum().log() - scale * mean @ centroid
                    if window == 0:
                        keys.append((centroid, weights @ v[others], bias))
                    counted += [
                        (j, centroid, scale * (k[j] - centroid) @ mean) for j in others.nonzero()[:, 0].tolist()
                    ]
            for i in mine:
                met = list(keys)
                for j, centroid, bias in counted if window else ():
                    near = abs(i + start - j) <= window
                    met.append((k[j], v[j], 0.0) if near else (centroid, v[j], bias))
                logits = torch.stack([scale * q[i] @ each + bias for each, _, bias in met]) if met else q.new_zeros(0)
                head[i] = sum((w * each for w, (_, each, _) in zip(logits.softmax(0), met, strict=True)), head[i])
        out.append(torch.stack(head))
    return torch.stack(out).unflatten(0, (B, H))
