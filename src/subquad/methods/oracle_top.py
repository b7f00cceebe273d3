"""Oracle top-k: every query attends to its own k best keys and to nothing else.

    out_i = Σ_{j ∈ T_i} softmax_{j ∈ T_i}(q_i·k_j / √D) v_j,  T_i = the topk keys with the largest logits
                                                               Vyas et al. 2020, section 4.1 ("oracle-top")

The best that any method can do that keeps k keys per query and drops the rest. A reference: it computes all N·M logits,
for some queries at a time.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.core.versions import sym_min
from subquad.kernels.attention.softmax import hide, visible_logsumexp, visible_softmax
from subquad.kernels.tokens.heads import repeat_heads
from subquad.methods.core.exact import logits_of
from subquad.methods.core.method import Call, Method, Partial, Traits, upcast, whole
from subquad.methods.full import Full


def attend_top(
    logits: Tensor, visible: Tensor | None, value: Tensor, topk: int, dropout_p: float
) -> tuple[Tensor, Tensor]:
    """Softmax over the topk largest visible logits of each row, applied to the values; and its log-sum-exp."""
    top = hide(logits, visible).topk(sym_min(topk, logits.shape[-1]), dim=-1)
    allowed = None if visible is None else visible.expand_as(logits).gather(-1, top.indices)
    weights = F.dropout(visible_softmax(top.values, allowed), dropout_p)
    out = torch.zeros_like(logits).scatter(-1, top.indices, weights) @ value
    return out, visible_logsumexp(top.values, allowed)


@dataclass(frozen=True)
class OracleTopK(Method):
    """Exact attention on each query's `topk` best keys, or on all keys if there are fewer.

    Args:
        topk: the number of keys of each query.

    >>> import torch, subquad as sq
    >>> q, k, v = torch.randn(3, 1, 2, 5, 4)
    >>> best = (q @ k.mT).argmax(-1)
    >>> torch.equal(sq.attention(q, k, v, method=sq.OracleTopK(topk=1))[0, 0, 3], v[0, 0, best[0, 0, 3]])
    True
    """

    topk: int = whole(32, least=1)

    name: ClassVar[str] = "oracle-top"
    traits: ClassVar[Traits] = replace(
        Full.traits,
        exact_limit={"topk": "M"},
        example={"topk": 4},
        complexity="O(N·M·D) time, O(M) memory per query in flight",
        source="Vyas et al. 2020, section 4.1",
        skips_padding=False,
    )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        """Top-k attention, a chunk of queries at a time."""
        (value,) = upcast(repeat_heads(value, query.shape[1]))
        chunks = logits_of(query, key, call)
        parts = [attend_top(logits, allowed, value, self.topk, call.dropout_p) for logits, allowed in chunks]
        out, lse = (torch.cat(of_chunks, dim=2) for of_chunks in zip(*parts, strict=True))
        return out, lse
