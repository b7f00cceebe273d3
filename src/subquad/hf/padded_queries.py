"""What padded queries get where a method's choices must not depend on them.

transformers hides padded keys but computes padded queries, and some models read them: convolutions carry them into
real frames, poolers take the first position under left padding. Methods that group queries must leave them out, or the
amount of padding would change real outputs. So they run apart, by clustered attention with few clusters: padded tokens
share one embedding, so their queries are alike, and with no more of them than clusters this is exact.
"""

from typing import Any

import torch
from torch import Tensor

from subquad.masks import Mask
from subquad.methods import Clustered

PADDED = Clustered(clusters=16)


def padded_queries(own: Tensor, causal: bool) -> Tensor | None:
    """Which queries (B,N) are computed apart: the padded ones; None where there are none.

    In a causal layer those behind the last real token, which may see all real keys. Those before the first see none.
    """
    padded = ~own
    if causal:
        padded = padded & (own.flip(1).cumsum(1).flip(1) == 0)
    return padded if torch.compiler.is_compiling() or bool(padded.any()) else None


def attend_padded(query: Tensor, key: Tensor, value: Tensor, real: Tensor, padded: Tensor, **options: Any) -> Tensor:
    """Clustered attention of the padded queries to the real keys; 0 for all others."""
    gqa, mask = query.shape[1] != key.shape[1], Mask.padding(keys=real, queries=padded)
    return PADDED(query, key, value, mask=mask, enable_gqa=gqa, **options)
