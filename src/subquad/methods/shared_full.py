"""Shared full attention: exact attention with the queries as keys.

    out_i = Σ_j softmax_j(q_i·q_j / √D) v_j                    Vyas et al. 2020, section 4.1 ("shared-full")

What Reformer's shared queries and keys approximate; a reference, as quadratic as "full". The keys that are passed in
are checked and then not read. With grouped-query heads every query head is its own key head.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from subquad.kernels.tokens.heads import repeat_heads
from subquad.methods.core.exact import exact_by_sdpa
from subquad.methods.core.method import Call, Method, Partial, Traits
from subquad.methods.full import Full


@dataclass(frozen=True)
class SharedFull(Method):
    """Exact attention whose keys are the queries. Self-attention only.

    >>> import torch, subquad as sq
    >>> q, k, v = torch.randn(3, 1, 2, 5, 4)
    >>> torch.equal(sq.attention(q, k, v, method="shared-full"), sq.attention(q, q, v, method="full"))
    True
    """

    name: ClassVar[str] = "shared-full"
    traits: ClassVar[Traits] = replace(
        Full.traits,
        cross=False,
        exact_limit="the queries replace the keys: it equals exact attention only where they are equal",
        source="Vyas et al. 2020, section 4.1",
        skips_padding=False,
    )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        """Exact attention of the queries with themselves."""
        return exact_by_sdpa(query, query, repeat_heads(value, query.shape[1]), call)
