"""A package that brings attention methods for subquad."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from subquad.methods.core.exact import exact
from subquad.methods.core.method import Call, Method, Partial, Traits
from subquad.methods.full import Full


class Temperatures(nn.Module):
    """ln t of each head."""

    by_query_head: ClassVar[tuple[str, ...]] = ("logs",)

    def __init__(self, heads: int, start: float):
        super().__init__()
        self.logs = nn.Parameter(torch.full((heads,), start))


@dataclass(frozen=True)
class Tempered(Method):
    """Exact attention with a learned temperature in each head: softmax(q k^T / (t √D)) v."""

    start: float = 0.0

    name: ClassVar[str] = "tempered"
    traits: ClassVar[Traits] = replace(
        Full.traits, bias=False, skips_padding=False, learned=True, exact_limit={"start": 0.0}, source="a test"
    )

    def make_learned(self, heads: int, kv_heads: int, head_dim: int, max_length: int | None) -> nn.Module:
        return Temperatures(heads, self.start)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        return exact(query * (-call.learned.logs[:, None, None]).exp().to(query.dtype), key, value, call)
