"""Attention that computes nothing: the least that a method can keep of a model's output."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from subquad.methods import Full
from subquad.methods.core.method import Call, Partial

WITHOUT = "without attention"


@dataclass(frozen=True)
class WithoutAttention(Full):
    """Attention whose outputs are all 0: what a method that computes nothing keeps of the module's output."""

    name: ClassVar[str] = WITHOUT

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        """Zeros."""
        out = value.new_zeros(*query.shape[:3], value.shape[3])
        return out, out.new_zeros(query.shape[:3]) if call.wants_lse else None
