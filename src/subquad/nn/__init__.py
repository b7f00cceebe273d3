"""Modules: attention layers that run any method, layers for sets, swaps in others' modules, auxiliary losses."""

from subquad.nn.attention import MultiheadAttention
from subquad.nn.auxiliary import auxiliary_loss, has_auxiliary_loss, with_auxiliary_loss
from subquad.nn.memory import remember
from subquad.nn.sets import InducedSetAttention, PoolingByAttention, SetAttention, SetTransformer
from subquad.nn.swapping import SwappedModule, describe, refusals, restore, swap

__all__ = [
    "InducedSetAttention",
    "MultiheadAttention",
    "PoolingByAttention",
    "SetAttention",
    "SetTransformer",
    "SwappedModule",
    "auxiliary_loss",
    "describe",
    "has_auxiliary_loss",
    "refusals",
    "remember",
    "restore",
    "swap",
    "with_auxiliary_loss",
]
