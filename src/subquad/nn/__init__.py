"""Modules: attention layers that run any method, doors into others' modules, and the losses that they learn from."""

from subquad.nn.attention import MultiheadAttention
from subquad.nn.auxiliary import auxiliary_loss, has_auxiliary_loss, with_auxiliary_loss
from subquad.nn.swapping import Swapped, describe, restore, swap

__all__ = [
    "MultiheadAttention",
    "Swapped",
    "auxiliary_loss",
    "describe",
    "has_auxiliary_loss",
    "restore",
    "swap",
    "with_auxiliary_loss",
]
