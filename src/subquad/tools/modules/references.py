"""Rows of a comparison that are there to compare with: exact attention by the path of the methods, and none at all."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from subquad.methods import Full, Method
from subquad.methods.core.method import Call, Partial
from subquad.tools.modules.attention import AttentionSites, ModuleLayers

WITHOUT = "without attention"


@dataclass(frozen=True)
class WithoutAttention(Full):
    """Attention whose outputs are all 0: what a method that computes nothing keeps of the module's output."""

    name: ClassVar[str] = WITHOUT

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        """Zeros."""
        out = value.new_zeros(*query.shape[:3], value.shape[3])
        return out, out.new_zeros(query.shape[:3]) if call.wants_lse else None


def references(sites: AttentionSites) -> dict[str, Method]:
    """The methods of these rows, by the names that the table has for them.

    Layers that `sq.nn.swap` changes leave torch's fused encoder kernels, so exact attention may take longer there.
    """
    swapped: dict[str, Method] = {f"full (by {sites.function})": Full()} if isinstance(sites, ModuleLayers) else {}
    return {**swapped, WITHOUT: WithoutAttention()}
