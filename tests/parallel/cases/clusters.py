"""Clusters of queries of all ranks, and their top keys."""

from tests.parallel.ranks import UNEVEN, Case, Sent

METHODS = (
    "clustered:clusters=7",
    "clustered:clusters=60",
    "i-clustered:clusters=7,topk=5",
    "i-clustered:clusters=30,topk=32",
    "i-clustered:clusters=3,topk=60",
)

CASES = [
    *(Case(name, "summary", mask, kv_heads=2) for name in METHODS for mask in ("none", "padded", "lengths")),
    *(Case(name, "summary", lengths=UNEVEN, lse=True) for name in METHODS),
    *(Case(name, "summary", keys=31) for name in METHODS),
]
REFUSED = [Case("clustered-tail", "summary"), Case("clustered:refine=1", "summary")]
# K-means has one exchange for the counts, the mean, the starts and each iteration.
SENT = [
    Sent("clustered:clusters=8,iterations=2", "summary", 9),
    Sent("i-clustered:clusters=8,iterations=2,topk=4", "summary", 10),
]
