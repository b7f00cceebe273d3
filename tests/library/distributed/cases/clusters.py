"""Clusters of queries of all ranks, and their top keys."""

from tests.library.distributed.ranks import UNEVEN, Case, Sent

METHODS = (
    "clustered:clusters=7",
    "clustered:clusters=60",
    "i-clustered:clusters=7,topk=5",
    "i-clustered:clusters=30,topk=32",
    "i-clustered:clusters=3,topk=60",
    "i-clustered:clusters=6,topk=5,space=logits,refine=2",
)

CASES = [
    *(Case(name, "summary", mask, kv_heads=2) for name in METHODS for mask in ("none", "padded", "lengths")),
    *(Case(name, "summary", lengths=UNEVEN, lse=True) for name in METHODS),
    *(Case(name, "summary", keys=31) for name in METHODS),
]
REFUSED: list[Case] = []
# Moments, first centroids, two iterations, means and partials; the last two come back.
SENT = [
    Sent("clustered:clusters=8,iterations=2", "summary", 8),
    Sent("i-clustered:clusters=8,iterations=2,topk=4", "summary", 9),
    Sent("clustered:clusters=8,iterations=2,space=logits,refine=2", "summary", 10),
]
