"""Sizes of one, alone and together: heads, key heads, items, a rank's tokens, and its keys.

A size of one is not what all items or heads share.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import subquad as sq
from subquad.testing.oracle import normal
from tests.library.distributed.cases import clusters, features, hashed, near, patterns, projections, tails
from tests.library.distributed.ranks import Case, Sent


@dataclass(frozen=True)
class OtherKeys:
    """One padding for queries and for other keys: a rank that has one of each sees nothing wrong in its own part."""

    @property
    def name(self) -> str:
        return "one padding for one query and one key"

    def error(self) -> float:
        ranks = dist.get_world_size()
        of = sq.distributed.Sequence((2,) + (1,) * (ranks - 1), keys=(1,) * ranks)
        query, key = normal(1, 1, of.lengths[of.rank], 4), normal(1, 1, 1, 4)
        mask = sq.Mask.padding(torch.ones(1, of.lengths[of.rank], dtype=torch.bool))
        sq.attention(query, key, key, method="linear", mask=mask, parallel=of)
        return 0.0


@dataclass(frozen=True)
class BrokenSegments:
    """A window over segments that other tokens interrupt, of one head: ranks without heads refuse it too."""

    @property
    def name(self) -> str:
        return "a window over broken segments of one head"

    def error(self) -> float:
        of = sq.distributed.Sequence.even(12, mode="heads")
        part = of.shard(normal(1, 1, 12, 4), dim=2)
        mask = sq.Mask.window(2) & sq.Mask.segments(of.shard(torch.arange(12)[None] % 2))
        sq.attention(part, part, part, method="local:window=2", mask=mask, parallel=of)
        return 0.0


METHODS = (
    clusters.METHODS[0],
    clusters.METHODS[-1],
    tails.METHODS[0],
    features.METHODS[0],
    features.METHODS[2],
    hashed.BUCKETS[1],
    hashed.TAILS[0],
    hashed.TAILS[1],
    patterns.NEAR[0],
    patterns.GLOBAL[0],
    projections.LINFORMERS[0],
    f"{near.NAME},window=4",
    "tilted-pool:pools=3,window=2",
)
TOKENS: tuple[int, ...] = (1, 1)  # the last rank has the others
HEAD = {"heads": 1, "kv_heads": 1}
SIZES: tuple[dict[str, Any], ...] = (
    HEAD,
    {"kv_heads": 1},
    {"items": 1},
    {"lengths": TOKENS},
    HEAD | {"items": 1},
    HEAD | {"lengths": TOKENS, "mask": "padded"},
    HEAD | {"items": 1, "lengths": TOKENS},
)

CASES = [
    *(Case(name, "summary", **sizes) for name in METHODS for sizes in SIZES),
    *(Case("full", "ring", **sizes) for sizes in SIZES),
    *(Case("i-clustered:clusters=5,topk=4", "heads", **sizes) for sizes in SIZES),
    *(Case(name, "summary", keys=3, **HEAD) for name in (clusters.METHODS[-1], *tails.METHODS[:2], "linear")),
]
REFUSED = [OtherKeys(), BrokenSegments()]
SENT: list[Sent] = []
