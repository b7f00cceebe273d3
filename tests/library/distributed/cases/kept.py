"""Kept tokens, with summaries of the others."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.library.distributed.ranks import TOKENS, UNEVEN, Case, Sent, error_of


@dataclass(frozen=True)
class Kept:
    """A case in which some tokens are kept: by their numbers, or some of each item by bools."""

    case: Case
    tokens: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        return f"{self.case.name}-keep={self.tokens or 'bools'}"

    @property
    def dtype(self) -> torch.dtype:
        return self.case.dtype

    def error(self) -> float:
        return error_of(self.case, self.arguments)

    def arguments(self, part: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
        if self.tokens is not None:
            return {"keep": list(self.tokens)}
        here = torch.zeros(2, TOKENS, dtype=torch.bool)
        here[0, [0, 19, 52]] = here[1, 7] = here[1, 40] = True
        return {"keep": part(here)}


FEW, ENDS = (0,), (0, 20, -1)
METHODS = ("clustered:clusters=7", "i-clustered:clusters=7,topk=5", "local:window=4")

CASES = [
    *(Kept(Case(name, "summary", "padded", kv_heads=2), ENDS) for name in METHODS),
    *(Kept(Case(name, "summary", "lengths", lse=True)) for name in METHODS),
    Kept(Case("local:window=9", "summary", "causal left", lengths=UNEVEN, lse=True), ENDS),
    Kept(Case("linear", "summary", "causal", lengths=UNEVEN)),
    Kept(Case("clustered:clusters=7,refine=1", "summary"), FEW),
    Kept(Case("lsh:buckets=3,bucket_size=6", "summary", "short"), FEW),
    Kept(Case("local:window=4", "auto", "segments"), ENDS),  # by heads
]
LONG = [
    *(Kept(Case(name, "summary", lengths=UNEVEN, kv_heads=3), FEW) for name in METHODS),
    *(Kept(Case(name, "summary", "short")) for name in METHODS),
    Kept(Case("performer:features=16", "summary", "causal left", lse=True), ENDS),
    Kept(Case("lha-tail:buckets=3,keys=5,cells=2", "summary"), ENDS),
]
REFUSED = [Kept(Case("lsh", "summary"), FEW), Kept(Case("local:window=4", "summary", "segments"), ENDS)]
SENT: list[Sent] = []
