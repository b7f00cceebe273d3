"""Oracle top-k: every query attends to its own k best keys and to nothing else.

    out_i = Σ_{j ∈ T_i} softmax_{j ∈ T_i}(q_i·k_j / √D) v_j,  T_i = the topk keys with the largest logits
                                                               Vyas et al. 2020, section 4.1 ("oracle-top")

The best that any method can do that keeps k keys a query and forgets the rest. A yardstick: it computes all N·M logits,
for some queries at a time.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.methods.base import Call, Method
from subquad.methods.full import Full
from subquad.ops.heads import repeat_heads
from subquad.ops.softmax import hide, visible_softmax

CHUNK = 2**22  # logits of a head that are in memory at a time


def attend_top(logits: Tensor, visible: Tensor | None, value: Tensor, topk: int, dropout_p: float) -> Tensor:
    """Softmax over the topk largest visible logits of each row, applied to the values."""
    top = hide(logits, visible).topk(torch.sym_min(topk, logits.shape[-1]), dim=-1)
    seen = None if visible is None else visible.expand_as(logits).gather(-1, top.indices)
    weights = F.dropout(visible_softmax(top.values, seen), dropout_p)
    return torch.zeros_like(logits).scatter(-1, top.indices, weights) @ value


def _portions(N: int, M: int) -> list[slice]:
    """Which queries go together. All do where they are traced: a number of portions would fix the length."""
    if torch.compiler.is_compiling():
        return [slice(None)]
    step = max(1, CHUNK // M)
    return [slice(start, start + step) for start in range(0, N, step)]


@dataclass(frozen=True)
class OracleTopK(Method):
    """Exact attention on each query's `topk` best keys. More than there are keys uses all.

    >>> import torch, subquad as sq
    >>> q, k, v = torch.randn(3, 1, 2, 5, 4)
    >>> best = (q @ k.mT).argmax(-1)
    >>> torch.equal(sq.attention(q, k, v, method=sq.OracleTopK(topk=1))[0, 0, 3], v[0, 0, best[0, 0, 3]])
    True
    """

    topk: int = 32

    name: ClassVar[str] = "oracle-top"
    traits = replace(
        Full.traits,
        partial=False,
        exact_limit={"topk": "M"},
        example={"topk": 4},
        complexity="O(N·M·D) time, O(M) memory a query in flight",
        source="Vyas et al. 2020, section 4.1",
    )

    def __post_init__(self) -> None:
        self._require(topk=1)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
        """Top-k attention, a chunk of queries at a time."""
        N, M = query.shape[2], key.shape[2]
        exact = torch.promote_types(query.dtype, torch.float32)
        query, key, value, dtype = query.to(exact), key.to(exact), value.to(exact), query.dtype
        key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])
        visible = call.mask.visible(N, M, query.device)
        parts = []
        for rows in _portions(N, M):
            logits = query[:, :, rows] @ key.transpose(-1, -2) * call.scale
            logits = logits if call.bias is None else logits + call.bias[:, :, rows]
            seen = visible if visible is None or visible.shape[2] == 1 else visible[:, :, rows]
            parts.append(attend_top(logits, seen, value, self.topk, call.dropout_p))
        return torch.cat(parts, dim=2).to(dtype)
