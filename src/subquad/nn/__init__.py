"""Modules: attention layers that run any method, and the losses that they learn from."""

from subquad.nn.attention import MultiheadAttention
from subquad.nn.auxiliary import auxiliary_loss, has_auxiliary_loss, with_auxiliary_loss

__all__ = ["MultiheadAttention", "auxiliary_loss", "has_auxiliary_loss", "with_auxiliary_loss"]
