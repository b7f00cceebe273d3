"""Cases in which each rank combines a share of the rows for all ranks, as is done when there are many bytes.

The cases are those of the other modules; here nothing is too small to be shared.
"""

from dataclasses import dataclass
from typing import Any

import torch

from tests.library.distributed.cases import clusters, features, hashed, kept, near, patterns, projections, tails
from tests.library.distributed.combined import everything_by_shares
from tests.library.distributed.ranks import UNEVEN, Case, Sent


@dataclass(frozen=True)
class ByShares:
    """Another case, with all sums and partials by shares."""

    case: Any

    @property
    def name(self) -> str:
        return f"{self.case.name} by shares"

    @property
    def dtype(self) -> torch.dtype:
        return self.case.dtype

    def error(self) -> float:
        with everything_by_shares():
            return self.case.error()


MODULES = clusters, features, hashed, kept, near, patterns, projections, tails

CASES = [
    ByShares(case)
    for case in (
        Case(clusters.METHODS[1], "summary", "padded", kv_heads=2),
        Case(clusters.METHODS[-1], "summary", lengths=UNEVEN, lse=True),
        Case(tails.METHODS[0], "summary", "lengths", lengths=UNEVEN),
        Case(tails.METHODS[1], "summary", keys=31),
        Case(hashed.BUCKETS[-1], "summary", "causal left", kv_heads=2),
        Case(hashed.BUCKETS[0], "summary", "padded", lengths=UNEVEN),
        Case(hashed.TAILS[-1], "summary", "lengths", lengths=UNEVEN, lse=True),
        Case("linformer:k=5", "summary", "causal left", lengths=UNEVEN),
        Case("nystrom:landmarks=6", "summary", keys=31),
        Case("performer:features=24", "summary", "padded", kv_heads=2, lse=True),
        Case("linear", "summary", "causal left", lengths=UNEVEN),
        Case("rfa:features=96", "summary", "causal left", kv_heads=2),
        Case("tilted-pool:pools=5,window=0", "summary", keys=31, lse=True),
        Case("longformer:window=2,first=25", "summary", lengths=UNEVEN, lse=True),
        kept.CASES[0],
    )
]
LONG = [
    ByShares(case)
    for module in MODULES
    for case in (*module.CASES, *getattr(module, "LONG", ()))
    if getattr(case, "mode", "summary") == "summary"
]
REFUSED: list[Case] = []
# Two exchanges for each of the others: moments, first centroids, iterations, means, scores, partials with rows.
SENT = [
    Sent("i-clustered:clusters=8,iterations=2,topk=4", "summary", 18, by_shares=True),
    Sent("lsh:buckets=4,bucket_size=6", "summary", 6, by_shares=True),
    Sent("lha-tail:buckets=4,keys=6,cells=3", "summary", 20, by_shares=True),
    Sent("nystrom:landmarks=8", "summary", 8, by_shares=True),
    Sent("rfa:features=8", "summary", 4, causal=True, by_shares=True),
    Sent("linear", "summary", 4, by_shares=True),
    Sent("performer:features=24", "summary", 4, causal=True, by_shares=True),
]
