"""All tokens of each head on one rank."""

import torch

import subquad as sq
from tests.library.distributed.ranks import UNEVEN, Case, Sent


def methods() -> list[str]:
    """Those that run as they are."""
    return [name for name in sq.list_methods() if not sq.parse_method(name).traits.learned]


def of(name: str) -> list[Case]:
    traits = sq.parse_method(name).traits
    cases = [Case(name, "heads"), Case(name, "heads", "padded", kv_heads=2), Case(name, "heads", "segments")]
    if traits.causal != "no":
        cases.append(Case(name, "heads", "causal left", lengths=UNEVEN))
    if traits.cross:
        cases.append(Case(name, "heads", keys=31, heads=4, kv_heads=2))
    return cases


CASES = [
    *(case for name in methods() for case in of(name)),
    Case("full", "heads", heads=2, kv_heads=1, lse=True),
    Case("full", "heads", heads=1, kv_heads=1),
    Case("i-clustered:clusters=5,topk=4", "heads", dtype=torch.bfloat16),
]
REFUSED: list[Case] = []
SENT = [Sent("full", "heads", 4)]
