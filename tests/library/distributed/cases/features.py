"""Sums by feature."""

from tests.library.distributed.ranks import UNEVEN, Case, Sent

METHODS = (
    "linear",
    "linear:feature_map=softmax",
    "performer:features=32",
    "performer:features=16,kind=trigonometric",
)

CASES = [
    *(Case(name, "summary", mask) for name in METHODS for mask in ("none", "causal", "lengths", "causal left")),
    *(Case(name, "summary", keys=31, kv_heads=2) for name in METHODS),
    Case("linear", "summary", "causal", lengths=UNEVEN, lse=True),
    Case("performer:features=16", "summary", lengths=UNEVEN, lse=True),
]
REFUSED = [Case("linear", "summary", "segments")]
SENT = [Sent("linear", "summary", 2), Sent("performer:features=16", "summary", 2)]
