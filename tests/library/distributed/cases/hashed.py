"""Buckets of a fixed size, whose tokens score highest of those of all ranks."""

from dataclasses import dataclass

import torch

import subquad as sq
from subquad.testing.oracle import normal
from tests.library.distributed.ranks import UNEVEN, Case, Sent


@dataclass(frozen=True)
class Training:
    """A layer in training, whose hash functions learn from a loss over all tokens."""

    method: str
    mode: str = "summary"

    @property
    def name(self) -> str:
        return f"{self.method} in training"

    def error(self) -> float:
        of = sq.distributed.Sequence.even(9, mode=self.mode)
        part = of.shard(normal(1, 4, 9, 8), dim=2)
        sq.parse_method(self.method).bind(heads=4, head_dim=8)(part, part, part, parallel=of)
        return 0.0


BUCKETS = (
    "lsh:buckets=4,bucket_size=5",
    "lsh:buckets=4,bucket_size=5,hash=random",
    "lha:buckets=4,bucket_size=5,hidden=8",
    "lha:buckets=3,bucket_size=9,hash=linear,merge=union",
)
TAILS = (
    "lsh:buckets=4,bucket_size=5,tail=3",
    "lha-tail:buckets=4,keys=6,cells=3,hidden=8",
)
# More slots than there are tokens, of a rank or of all, and a cell for each key.
WIDE = (
    "lsh:buckets=2,bucket_size=60,enlarge=1",
    "lsh:buckets=5,bucket_size=9,merge=union",
    "lha-tail:buckets=3,keys=60,cells=4,hash=linear",
    "lha-tail:buckets=3,keys=20,cells=40,hidden=8",
)

CASES = [
    *(Case(name, "summary", "causal left", kv_heads=2) for name in BUCKETS),
    *(Case(name, "summary", "lengths", kv_heads=2) for name in TAILS),
    *(Case(name, "summary", keys=31) for name in WIDE),
    *(Case(name, "summary", lengths=UNEVEN, lse=True) for name in (BUCKETS[0], BUCKETS[-1], *TAILS)),
    Case(BUCKETS[0], "summary", "short"),
    Case(TAILS[-1], "summary", "short", lengths=UNEVEN),
    Case(BUCKETS[0], "summary", dtype=torch.bfloat16),
    Case(TAILS[-1], "summary", dtype=torch.float64),
]
LONG = [
    *(
        Case(name, "summary", mask, kv_heads=2)
        for name in (*BUCKETS, *WIDE[:2])
        for mask in ("none", "causal", "padded", "short")
    ),
    *(Case(name, "summary", mask, kv_heads=3) for name in (*TAILS, *WIDE[2:]) for mask in ("none", "padded", "short")),
    *(Case(name, "summary", lengths=UNEVEN, lse=True) for name in (*BUCKETS[1:-1], *WIDE)),
    *(Case(name, "summary", keys=31) for name in (*BUCKETS, *TAILS)),
]
REFUSED = [
    Case("lsh", "summary"),
    Case("lsh:buckets=0,bucket_size=5", "summary"),
    Case("lha:bucket_size=5,selection=argmax", "summary"),
    Training("lha-tail:buckets=3,keys=5,cells=2"),
]
# Scores and rows; rows come back. A tail: moments with scores, first centroids, five iterations, cells with rows.
SENT = [
    Sent("lsh:buckets=4,bucket_size=6", "summary", 3),
    Sent("lsh:buckets=4,bucket_size=6,hash=random", "summary", 3),
    Sent("lha:buckets=4,bucket_size=6", "summary", 3),
    Sent("lha-tail:buckets=4,keys=6,cells=3", "summary", 10),
]
