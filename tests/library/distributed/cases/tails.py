"""Clusters of queries and cells of keys of all ranks."""

from tests.library.distributed.ranks import UNEVEN, Case, Sent

METHODS = (
    "clustered-tail:clusters=7,topk=5,cells=4",
    "clustered-tail:clusters=60,topk=3,cells=70",
    "clustered-tail:clusters=4,topk=60,cells=3,refine=0",
)

CASES = [
    *(Case(name, "summary", mask, kv_heads=2) for name in METHODS for mask in ("none", "padded", "lengths")),
    *(Case(name, "summary", lengths=UNEVEN, lse=True) for name in METHODS),
    *(Case(name, "summary", keys=31) for name in METHODS),
]
LONG: list[Case] = []
REFUSED = [Case("clustered-tail", "summary"), Case("clustered-tail:clusters=9", "summary")]
# Moments, first centroids, three iterations, two rounds, means, scores and cells; means and cells come back.
SENT = [Sent("clustered-tail:clusters=8,topk=4,cells=5", "summary", 12)]
