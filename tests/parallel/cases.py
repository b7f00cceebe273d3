"""The calls that a few ranks make together."""

import torch

import subquad as sq
from tests.parallel.ranks import Case

OF_FEATURES = (
    "linear",
    "linear:feature_map=softmax",
    "performer:features=32",
    "performer:features=16,kind=trigonometric",
)
OF_CLUSTERS = (
    "clustered:clusters=7",
    "clustered:clusters=60",
    "i-clustered:clusters=7,topk=5",
    "i-clustered:clusters=30,topk=32",
    "i-clustered:clusters=3,topk=60",
)
UNEVEN = (5, 1, 30)


def plain() -> list[str]:
    """The methods that run as they are and whose heads are alike."""
    found = []
    for name in sq.list_methods():
        method = sq.parse_method(name)
        if method.treats_heads_alike():
            found.append(name)
    return found


def of_heads(name: str) -> list[Case]:
    traits = sq.parse_method(name).traits
    cases = [Case(name, "heads"), Case(name, "heads", "padded", kv_heads=2), Case(name, "heads", "segments")]
    if traits.causal != "no":
        cases.append(Case(name, "heads", "causal left", lengths=UNEVEN))
    if traits.cross:
        cases.append(Case(name, "heads", keys=31, heads=4, kv_heads=2))
    return cases


CASES = [
    *(case for name in plain() for case in of_heads(name)),
    *(Case(name, "summary", mask) for name in OF_FEATURES for mask in ("none", "causal", "lengths", "causal left")),
    *(Case(name, "summary", keys=31, kv_heads=2) for name in OF_FEATURES),
    *(
        Case(f"local:window={w}", "summary", mask)
        for w in (0, 4, 60)
        for mask in ("none", "causal", "padded", "causal left")
    ),
    *(Case(name, "summary", mask, kv_heads=2) for name in OF_CLUSTERS for mask in ("none", "padded", "lengths")),
    *(Case(name, "summary", lengths=UNEVEN, keys=None, lse=True) for name in OF_CLUSTERS),
    *(Case(name, "summary", keys=31) for name in OF_CLUSTERS),
    Case("local:window=9", "summary", "window"),
    Case("local:window=9", "summary", lengths=UNEVEN, kv_heads=3),
    Case("local:window=25", "summary", "causal", lengths=UNEVEN),
    Case("linear", "summary", "causal", lengths=UNEVEN, lse=True),
    Case("performer:features=16", "summary", lengths=UNEVEN, lse=True),
    Case("full", "heads", heads=2, kv_heads=1, lse=True),
    Case("full", "heads", heads=1, kv_heads=1),
    Case("i-clustered:clusters=5,topk=4", "heads", dtype=torch.bfloat16),
]

REFUSED = [
    Case("linear", "summary", "segments"),
    Case("clustered-tail", "summary"),
    Case("clustered:refine=1", "summary"),
]

# What grows with the length, and what does not.
SENT = [("linear", "summary"), ("performer:features=16", "summary"), ("local:window=8", "summary"), ("full", "heads")]
SENT += [("clustered:clusters=8,iterations=2", "summary"), ("i-clustered:clusters=8,iterations=2,topk=4", "summary")]
